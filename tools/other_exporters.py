"""Runs `llmconv verify --graph` on graphs of other exporters: tiny models of six families, all scenarios.

Exporters run in the environments of `benchmarks/environments.py`, where these were made before (`make bench` makes
them); without one its column says so. Exports are kept in build/other-exporters.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.exporters import GENAI, MOBIUS, OPTIMUM, TRANSFORMERS, add_tokenizer, command
from llmconv.errors import LlmconvError
from llmconv.verify import Report, verify_graphs
from llmconv.verify.reference.eager import Eager
from tests.conftest import save_tiny
from tools.diagnoses import DIAGNOSES, NO_GRAPH

FOLDER = Path("build/other-exporters")
PAGE = Path("docs/verification-other-exporters.md")
BEGIN, END = "<!-- other exporters: written by `make other-exporters` -->", "<!-- end of other exporters -->"

DECODER = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DECODER, "head_dim": 32, "rms_norm_eps": 1e-5},
    "qwen3": {**DECODER, "head_dim": 32, "num_key_value_heads": 1},
    "mistral": {**DECODER, "sliding_window": 8},
    "gemma2": {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 4},
    "gemma3_text": {
        **DECODER,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "num_hidden_layers": 6,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        **{k: DECODER[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")},
    },
}
"""Head sizes are multiples of 16, as GroupQueryAttention of onnxruntime's CPU demands."""

PORTABLE, FUSED = "mobius-onnx, portable", "transformers' exporter, fused"
EXPORTERS = {
    OPTIMUM: "optimum",
    GENAI: "builders",
    MOBIUS: "builders",
    PORTABLE: "builders",
    TRANSFORMERS: "",
    FUSED: "",
}
"""Name to its environment; empty for llmconv's own."""

HALF = {
    f"{OPTIMUM}, fp16": ("optimum", ("--dtype", "fp16")),
    f"{GENAI}, fp16 for CUDA": ("builders", ("-p", "fp16", "-e", "cuda")),
    f"{GENAI}, bf16 for CUDA": ("builders", ("-p", "bf16", "-e", "cuda")),
}
"""Name to its environment and the options for half precision; the models are the same, in float32."""

_TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.exporters import OnnxConfig, OnnxExporter

source, output, fusions = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
ids = torch.arange(3, 23).reshape(2, 10)
mask = torch.ones_like(ids)
mask[1, :3] = 0
config = OnnxConfig(dynamic=True, ort_fusions=fusions or None)
inputs = {"input_ids": ids, "attention_mask": mask}
OnnxExporter().export_for_generation(model, inputs, config).save_pretrained(output)
"""
"""A padded batch of two: with one full sequence the exporter makes graphs for exactly one, without a mask."""


def main() -> int:
    """Prints the tables, or writes them into the page; returns 1 if nothing could be compared."""
    options = _options()
    lines = [
        "| model | exporter | verdict | outputs | differ | skipped | largest sigma | what it is |",
        "| --- " * 8 + "|",
    ]
    reports = 0
    for model in options.models:
        eager = None
        for exporter in (*EXPORTERS, *HALF):
            paths, problem = exported(model, exporter)
            if not paths:
                lines.append(
                    f"| {model} | {exporter} | no graph | | | | | {NO_GRAPH.get((exporter, model), problem)} |"
                )
                print(lines[-1], flush=True)
                continue
            eager = eager or Eager(_model(model), "float32", keep=True)
            lines.append(_row(model, exporter, paths, eager, options.suite))
            print(lines[-1], flush=True)
            reports += 1
    if options.write:
        _write("\n".join([_versions(), "", *lines]))
    return 0 if reports else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--write", action="store_true", help=f"write the section of {PAGE}")
    return parser.parse_args()


def _model(name: str) -> Path:
    folder = FOLDER / name
    if not (folder / "tokenizer.json").exists():
        save_tiny(name, folder, **MODELS[name])
        add_tokenizer(folder)
    return folder


def exported(model: str, exporter: str) -> tuple[list[Path], str]:
    """The graphs of an exporter, exported unless they exist; or the reason why there are none."""
    environment = HALF[exporter][0] if exporter in HALF else EXPORTERS[exporter]
    if environment and not (environments.folder(environment) / "complete").exists():
        return [], f"`{environments.folder(environment)}` is not there"
    folder = FOLDER / f"{model}-{re.sub('[^a-z]+', '-', exporter.lower())}"
    failure = folder / "failure.txt"
    if not (folder / "complete").exists() and not failure.exists():
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(_command(exporter, _model(model), folder), capture_output=True, text=True, check=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "complete").touch() if done.returncode == 0 else failure.write_text(done.stderr or done.stdout)
    if failure.exists():
        return [], f"the exporter fails: `{failure.read_text().strip().splitlines()[-1][:160]}`"
    whole = folder / "model.onnx"
    return ([whole] if whole.exists() else [folder / "prefill.onnx", folder / "decode.onnx"]), ""


def _command(exporter: str, model: Path, folder: Path) -> list[str]:
    if exporter in {TRANSFORMERS, FUSED}:
        return [sys.executable, "-c", _TRANSFORMERS, str(model), str(folder), "cpu" if exporter == FUSED else ""]
    if exporter in HALF:
        return _half_command(exporter, model, folder)
    if exporter == PORTABLE:
        return [part if part != "cpu" else "default" for part in command(MOBIUS, model, folder)]
    return command(exporter, model, folder)


def _half_command(exporter: str, model: Path, folder: Path) -> list[str]:
    plain, given = command(exporter.partition(",")[0], model, folder), HALF[exporter][1]
    replaced = set(given[::2])
    kept = [part for at, part in enumerate(plain) if not replaced & {part, *plain[max(0, at - 1) : at]}]
    return [*kept, *given]


def _row(model: str, exporter: str, paths: list[Path], eager: Eager, suite: str) -> str:
    try:
        report = verify_graphs(paths, reference=eager.folder, suite=suite, eager=eager)
    except LlmconvError as error:
        return f"| {model} | {exporter} | REFUSED | | | | | {error.message.replace('|', '/')} |"
    counts = [sum(check.verdict == word for check in report.checks) for word in ("fail", "skip")]
    worst = max((check.sigma for check in report.checks), default=0.0)
    note = DIAGNOSES.get((exporter, model), _first(report)) if report.verdict == "fail" else ""
    cells = [model, exporter, report.verdict.upper(), str(len(report.checks)), *map(str, counts), f"{worst:.2f}", note]
    return f"| {' | '.join(cells)} |"


def _first(report: Report) -> str:
    return (report.where.text if report.where else "").replace("|", "/")[:200]


def _versions() -> str:
    """The pinned versions."""
    pinned = {
        name: " ".join(part for step in environments.ENVIRONMENTS[name] for part in step)
        for name in ("optimum", "builders")
    }
    own = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "onnxruntime"))
    return f"Versions: {own}; optimum-onnx with {pinned['optimum']}; the builders with {pinned['builders']}."


def _write(content: str) -> None:
    text = PAGE.read_text()
    new, count = re.subn(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{content}\n\n{END}", text, flags=re.DOTALL
    )
    if count != 1:
        raise LookupError(f"{PAGE} has no place for the table, between `{BEGIN}` and `{END}`")
    PAGE.write_text(new)


if __name__ == "__main__":
    sys.exit(main())
