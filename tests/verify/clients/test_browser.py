"""transformers.js on WebGPU in a headless Chromium, whose driver computes on the CPU (SwiftShader, float32 only)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import environments
from llmconv.export import export
from llmconv.export.clients.transformersjs import TEXT_MODELS
from tools.tiny_models import depth, save_tiny

ROOT = Path(__file__).parents[3]
HOMES = {name: ROOT / environments.folder(name) for name in ("transformersjs", "chromium")}
FLAGS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((home / "complete").exists() for home in HOMES.values()),
        reason="`make clients` makes the environments of transformers.js and of Chromium",
    ),
]
NEW = 12


def in_browser(folder: Path, dtype: str, batches: list[list[list[int]]], place: Path) -> list[list[list[int]]]:
    """The tokens that transformers.js continues each prompt of each batch with, greedily, on WebGPU."""
    request = {name: str(home) for name, home in HOMES.items()}
    request |= {"folder": str(folder), "dtype": dtype}
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("browser.mjs"))],
        input=json.dumps({**request, "batches": batches, "new": NEW, "flags": FLAGS}),
        env={**os.environ, "TMPDIR": str(place)},  # npm has compressed the browser
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "missing" not in answer, answer
    rows: list[list[list[int]]] = answer["rows"]
    return rows


def prompts(vocabulary: int) -> list[list[list[int]]]:
    """Prompts of 1, 4, 17 and 70 tokens, and a batch that is padded on the left."""
    torch.manual_seed(1)
    lengths = [[1], [4], [17], [70], [3, 9, 5]]
    return [[torch.randint(3, vocabulary, (length,)).tolist() for length in batch] for batch in lengths]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("llama", {}), ("gpt2", {}), ("gemma3_text", {}), ("llama", {"target": "ort-webgpu", "precision": "float32"})],
)
def test_its_tokens_are_those_of_the_eager_model(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    config = save_tiny(model_type, model, depth(model_type))
    out = export(model, tmp_path / "out", layout=["transformersjs"], **options).folder
    batches = prompts(config.vocab_size)
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for batch in batches:
        found = []
        for prompt in batch:
            given = torch.tensor([prompt])
            tokens = eager.generate(given, attention_mask=torch.ones_like(given), **settings)
            found.append(tokens[0, len(prompt) :].tolist())
        expected.append(found)
    assert in_browser(out, "fp32", batches, tmp_path) == expected


def test_its_tokens_of_codes_are_those_of_the_codes_without_rounded_activations(tmp_path: Path) -> None:
    config = save_tiny("llama", tmp_path / "model", depth("llama"))
    out = export(tmp_path / "model", tmp_path / "out", layout=["transformersjs"], quant="int4").folder
    batches = prompts(config.vocab_size)
    found = in_browser(out, "q4", batches, tmp_path)
    model = onnx.load(out / "model.onnx", load_external_data=False)
    for node in model.graph.node:  # the CPU rounds activations to 8 bits, WebGPU does not
        for attribute in (one for one in node.attribute if one.name == "accuracy_level"):
            attribute.i = 1
    onnx.save(model, out / "model.onnx")
    session = ort.InferenceSession(out / "model.onnx")
    for batch, rows in zip(batches, found, strict=True):
        for prompt, row in zip(batch, rows, strict=True):
            tokens = list(prompt)
            for _ in range(NEW):
                tokens.append(int(logits_of(session, tokens)[-1].argmax()))
            assert tokens[len(prompt) :] == row


def logits_of(session: ort.InferenceSession, tokens: list[int]) -> Any:
    """Logits of a whole prompt, `[tokens, vocabulary]`."""
    feeds: dict[str, Any] = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for port in session.get_inputs():
        if port.name == "position_ids":
            feeds[port.name] = np.arange(len(tokens))[None]
        elif port.name.startswith("past"):
            feeds[port.name] = np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
    return session.run(["logits"], feeds)[0][0]


def test_the_types_of_the_client_are_those_that_an_export_knows() -> None:
    library = HOMES["transformersjs"] / "node_modules/@huggingface/transformers/dist/transformers.web.js"
    table = library.read_text().partition("var MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("]);")[0]
    assert {*re.findall(r'\["([a-z0-9_-]+)", "', table)} == TEXT_MODELS
