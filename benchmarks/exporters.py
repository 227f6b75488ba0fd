"""Other exporters of Hugging Face decoders to ONNX: one command each, run in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import environments
from benchmarks.measure import FOLDER

OPTIMUM, GENAI, MOBIUS = "optimum-onnx", "ORT-GenAI builder", "mobius-onnx"
TRANSFORMERS, FUSED = "transformers' exporter", 'transformers\' exporter, `ort_fusions="cpu"`'

_TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.exporters import OnnxConfig, OnnxExporter

source, output, fusions = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
ids = torch.arange(3, 11)[None]
config = OnnxConfig(dynamic=True, ort_fusions=fusions or None)
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
OnnxExporter().export_for_generation(model, inputs, config).save_pretrained(output)
"""


def command(name: str, model: Path, output: Path) -> list[str]:
    """How an exporter makes float32 graphs for the CPU out of a model's folder."""
    optimum, builders = ("-m", "optimum.commands.optimum_cli"), ("-m", "onnxruntime_genai.models.builder")
    source, target = str(model), str(output)
    if name == OPTIMUM:
        task = ("--task", "text-generation-with-past")
        return [str(environments.python("optimum")), *optimum, "export", "onnx", "--model", source, target, *task]
    if name == GENAI:
        cache = str(FOLDER / "hub")
        given = ("-i", source, "-o", target, "-p", "fp32", "-e", "cpu", "-c", cache)
        return [str(environments.python("builders")), *builders, *given]
    if name == MOBIUS:
        tool = environments.python("builders").with_name("mobius")
        return [str(tool), "build", "--config", source, target, "--ep", "cpu", "--dtype", "f32"]
    return [sys.executable, "-c", _TRANSFORMERS, source, target, "cpu" if name == FUSED else ""]


def add_tokenizer(folder: Path) -> None:
    """Sixteen words: the ORT-GenAI builder asks for a tokenizer."""
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(16)}, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
