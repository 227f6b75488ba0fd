"""transformers.js on WebGPU in a headless Chromium and in Node, with drivers that compute on the CPU.

SwiftShader comes with Chromium and has float32 only. Mesa's driver has float16; Chromium takes it under SwiftShader's
ids (`mesa_in_chromium.c`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import environments
from llmconv.export import export
from llmconv.export.clients.transformersjs import TEXT_MODELS
from tests.builders.exact_logits import exact_logits, wrong_token
from tests.export.test_clients import until_end
from tools.tiny_models import depth, save_tiny

ROOT = Path(__file__).parents[3]
HOMES = {name: ROOT / environments.folder(name) for name in ("transformersjs", "chromium")}
MANIFEST = Path("/usr/share/vulkan/icd.d/lvp_icd.json")
FLAGS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
NEW = 12
NEAR = {"fp32": 1e-4, "q4": 1e-4, "fp16": 0.05, "q4f16": 0.05}
"""How far rounding moves a logit, in standard deviations of all of them."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((home / "complete").exists() for home in HOMES.values()),
        reason="`make clients` makes the environments of transformers.js and of Chromium",
    ),
]


def in_browser(folder: Path, dtype: str, batches: list[list[list[int]]], place: Path) -> list[list[list[int]]]:
    """The tokens that transformers.js continues each prompt of each batch with, greedily, on WebGPU."""
    request: dict[str, Any] = {name: str(home) for name, home in HOMES.items()}
    request |= {"folder": str(folder), "dtype": dtype, "flags": FLAGS}
    environment = {**os.environ, "TMPDIR": str(place)}  # npm has compressed the browser
    if dtype.endswith("16"):
        request["flags"] = [*FLAGS, "--disable-gpu-sandbox"]
        request["driver"] = str(of_mesa(place))
        environment |= {"VK_ICD_FILENAMES": request["driver"], "XDG_RUNTIME_DIR": str(place)}
        environment["DRIVER"] = json.loads(MANIFEST.read_text())["ICD"]["library_path"]
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("browser.mjs"))],
        input=json.dumps({**request, "batches": batches, "new": NEW}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "missing" not in answer, (answer, done.stderr[-3000:])
    assert ("shader-f16" in answer["features"]) is dtype.endswith("16")
    rows: list[list[list[int]]] = answer["rows"]
    return rows


def of_mesa(place: Path) -> Path:
    """A manifest of Mesa's driver under SwiftShader's ids; skips without the driver or a compiler."""
    if not MANIFEST.exists() or not shutil.which("cc"):
        pytest.skip("no Vulkan driver of Mesa for CPUs (mesa-vulkan-drivers), or no C compiler")
    source, library = Path(__file__).with_name("mesa_in_chromium.c"), place / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    manifest = json.loads(MANIFEST.read_text())
    manifest["ICD"]["library_path"] = str(library)
    made = place / "driver.json"
    made.write_text(json.dumps(manifest))
    return made


def in_node(folder: Path, dtype: str, batches: list[list[list[int]]], place: Path) -> list[list[list[int]]]:
    """The same in Node, whose onnxruntime takes the system's driver."""
    options = {"device": "webgpu", "dtype": dtype}
    jobs = [{"folder": str(folder), "batch": batch, "new": NEW, "options": options} for batch in batches]
    line = ["node", str(ROOT / "tests/export/clients/transformersjs_client.mjs")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(place)}
    given = json.dumps(jobs)
    done = subprocess.run(
        line, cwd=HOMES["transformersjs"], input=given, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return [[until_end(row) for row in batch] for batch in rows]


Places = Callable[[Path, str, list[list[list[int]]], Path], list[list[list[int]]]]


def webgpu_problem(out: Path, model: Path, dtype: str, place: Path, run: Places = in_browser) -> str:
    """The first token that is not the model's; empty if none."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    batches = prompts(vocabulary)
    for batch, rows in zip(batches, run(out, dtype, batches, place), strict=True):
        for prompt, row in zip(batch, rows, strict=True):
            logits = exact_logits(out / "model.onnx", model, [*prompt, *row])
            if problem := wrong_token(logits, prompt, row, NEAR[dtype] * float(logits.std())):
                return problem
    return ""


def prompts(vocabulary: int) -> list[list[list[int]]]:
    """Prompts of 1, 4, 17 and 70 tokens, and a batch that is padded on the left."""
    torch.manual_seed(1)
    lengths = [[1], [4], [17], [70], [3, 9, 5]]
    return [[torch.randint(3, vocabulary, (length,)).tolist() for length in batch] for batch in lengths]


@pytest.mark.parametrize(
    ("model_type", "dtype", "options"),
    [
        ("llama", "fp32", {}),
        ("gpt2", "fp32", {}),
        ("gemma3_text", "fp32", {}),
        ("llama", "fp32", {"target": "ort-webgpu", "precision": "float32"}),
        ("llama", "q4", {"quant": "int4"}),
        ("llama", "fp16", {"precision": "float16"}),
        ("gemma3_text", "fp16", {"target": "ort-webgpu", "precision": "float16"}),
        ("llama", "q4f16", {"quant": "int4", "precision": "float16"}),
        ("qwen3", "q4f16", {"quant": "int4", "precision": "float16"}),
        ("phi3", "q4f16", {"quant": "int4", "precision": "float16"}),
        ("gpt2", "q4f16", {"quant": "int4", "precision": "float16"}),
        ("gemma3_text", "q4f16", {"quant": "int4", "target": "ort-webgpu", "precision": "float16"}),
    ],
)
def test_its_tokens_are_those_of_the_model(
    model_type: str, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path / "model", depth(model_type))
    out = export(tmp_path / "model", tmp_path / "out", layout=["transformersjs"], **options).folder
    assert webgpu_problem(out, tmp_path / "model", dtype, tmp_path) == ""


@pytest.mark.skipif(not MANIFEST.exists(), reason="no Vulkan driver of Mesa for CPUs (mesa-vulkan-drivers)")
@pytest.mark.parametrize(
    ("model_type", "dtype", "options"),
    [
        ("llama", "fp32", {}),
        ("gemma3_text", "fp16", {"precision": "float16"}),
        ("qwen3", "q4f16", {"quant": "int4", "precision": "float16"}),
    ],
)
def test_its_tokens_in_node_are_those_of_the_model(
    model_type: str, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path / "model", depth(model_type))
    out = export(tmp_path / "model", tmp_path / "out", layout=["transformersjs"], **options).folder
    assert webgpu_problem(out, tmp_path / "model", dtype, tmp_path, in_node) == ""


def test_the_types_of_the_client_are_those_that_an_export_knows() -> None:
    library = HOMES["transformersjs"] / "node_modules/@huggingface/transformers/dist/transformers.web.js"
    table = library.read_text().partition("var MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("]);")[0]
    assert {*re.findall(r'\["([a-z0-9_-]+)", "', table)} == TEXT_MODELS
