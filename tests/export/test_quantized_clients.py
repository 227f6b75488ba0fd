"""Quantized graphs in the layouts of clients, which give the tokens of llmconv's own runner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.export import export
from llmconv.runtime import OrtRunner
from tests.conftest import save_tiny
from tests.export.test_clients import LAYOUTS, NEW, PROMPTS, genai, optimum, transformersjs, until_end

DTYPES: list[tuple[str, dict[str, Any], str, str]] = [
    ("int4", {}, "q4", "model_q4.onnx"),
    ("int4-mixed", {"symmetric": True}, "q4", "model_q4.onnx"),
    ("int4", {"precision": "float16"}, "q4f16", "model_q4f16.onnx"),
    ("int8", {}, "q8", "model_quantized.onnx"),
]

KINDS = [(kind, quant) for kind in ("llama", "gemma2", "bloom", "qwen3", "qwen3_moe") for quant in ("int4", "int8")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of several families, quantized, with all layouts."""
    home, made = tmp_path_factory.mktemp("quantized"), {}
    for kind, quant in KINDS:
        if not (home / kind).exists():
            save_tiny(kind, home / kind)
        made[f"{kind} {quant}"] = export(home / kind, home / f"{kind}-{quant}", quant=quant, layout=LAYOUTS).folder
    return made


def greedy(folder: Path, prompt: list[int], new: int = NEW) -> list[int]:
    """The tokens that llmconv's own runner adds, the end token left out."""
    runner, tokens = OrtRunner.from_folder(folder), list(prompt)
    step = runner.prefill(np.array([prompt]), np.ones((1, len(prompt)), np.int64), np.arange(len(prompt))[None])
    for _ in range(new - 1):
        tokens.append(int(step.logits[0, -1].argmax()))
        mask, position = np.ones((1, len(tokens)), np.int64), np.array([[len(tokens) - 1]])
        step = runner.decode(np.array([tokens[-1:]]), mask, position, step.present)
    return until_end([*tokens, int(step.logits[0, -1].argmax())][len(prompt) :])


@pytest.mark.quick_rows("int8-options3-q8-model_quantized.onnx")
@pytest.mark.parametrize(("quant", "options", "dtype", "name"), DTYPES)
def test_transformersjs_finds_a_quantized_graph_without_options(
    quant: str, options: dict[str, Any], dtype: str, name: str, tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    made = export(folder, tmp_path / "out", quant=quant, layout="transformersjs", **options)
    assert made.client_files[1:] == (f"onnx/{name}", f"onnx/{name}_data")
    assert sorted(path.name for path in (made.folder / "onnx").iterdir()) == [name, f"{name}_data"]
    assert (made.folder / "onnx" / f"{name}_data").resolve() == (made.folder / "quantized.safetensors").resolve()
    content = json.loads((made.folder / "config.json").read_text())["transformers.js_config"]
    assert content["dtype"] == dtype and content["use_external_data_format"] == {name: 1}
    assert content.get("kv_cache_dtype") == ({dtype: "float16"} if options.get("precision") else None)


@pytest.mark.slow
def test_codes_are_packed_in_both_sessions_of_genai(tmp_path: Path) -> None:
    """Without packing, the whole matrix is dequantized at every call."""
    folder = save_tiny("llama", tmp_path / "llama")
    out = export(folder, tmp_path / "out", quant="int4", prefill=True, incremental=True, layout="genai").folder
    options = json.loads((out / "genai_config.json").read_text())["model"]["decoder"]["session_options"]
    assert "session.disable_prepacking" not in options


@pytest.mark.slow
@pytest.mark.parametrize("client", [optimum, transformersjs], ids=lambda client: client.__name__)
def test_a_client_gives_the_tokens_of_llmconv(
    folders: dict[str, Path], client: Callable[[list[dict[str, Any]]], list[Any]]
) -> None:
    jobs = [{"folder": str(folder), "batch": [prompt], "new": NEW} for folder in folders.values() for prompt in PROMPTS]
    answers = [until_end(rows[0]) for rows in client(jobs)]
    assert answers == [greedy(folder, prompt) for folder in folders.values() for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [("model",), ("prefill", "decode")], ids=["one graph", "two graphs"])
def test_genai_gives_the_tokens_of_llmconv(folders: dict[str, Path], graphs: tuple[str, ...], tmp_path: Path) -> None:
    kept = folders
    if len(graphs) == 2:
        kept = {name: tmp_path / name for name in folders}
        for name, out in kept.items():
            source = folders[name].with_name(name.split()[0])
            export(source, out, quant=name.split()[1], prefill=True, incremental=True, layout="genai")
    jobs = [{"folder": str(folder), "turns": [prompt], "new": NEW} for folder in kept.values() for prompt in PROMPTS]
    assert genai(jobs) == [prompt + greedy(folder, prompt) for folder in kept.values() for prompt in PROMPTS]


@pytest.mark.slow
def test_genai_runs_a_quantized_graph_over_one_shared_buffer(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["llama int4"].with_name("llama")
    out = export(source, tmp_path / "out", quant="int4", layout="genai", cache="shared-buffer").folder
    jobs = [{"folder": str(out), "turns": [prompt], "new": NEW} for prompt in PROMPTS]
    assert genai(jobs) == [prompt + greedy(out, prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_transformersjs_runs_float16_and_copies_without_links(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["llama int4"].with_name("llama")
    out = export(source, tmp_path / "out", quant="int4", precision="float16", layout="transformersjs").folder
    copied = Path(shutil.copytree(out / "onnx", tmp_path / "copied" / "onnx")).parent
    for name in ("config.json", "generation_config.json"):
        shutil.copy(out / name, copied)
    jobs = [{"folder": str(each), "batch": [PROMPTS[0]], "new": NEW} for each in (out, copied)]
    expected = greedy(out, PROMPTS[0])
    assert [until_end(rows[0]) for rows in transformersjs(jobs)] == [expected, expected]
