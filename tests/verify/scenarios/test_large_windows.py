"""Windows of any size are crossed: dropped, one token too long, or one too short, a graph fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llmconv.export.exporter import export
from llmconv.verify import verify
from tests.builders.mutants.surgery import constants
from tests.conftest import DECODER, save_tiny
from tests.verify.conftest import decode_only

CROSSING = "window crossed behind a made-up past"
LOCAL = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
NEO = {"vocab_size": 96, "hidden_size": 64, "num_heads": 4, "max_position_embeddings": 128, **LOCAL}
CHUNKED = {**DECODER, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "num_hidden_layers": 4}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a window of 600": ("mistral", 600, {**DECODER, "sliding_window": 600, "max_position_embeddings": 4096}),
    "a window of 32,768": (
        "mistral",
        32768,
        {**DECODER, "num_hidden_layers": 2, "sliding_window": 32768, "max_position_embeddings": 1 << 17},
    ),
    "a window of 4,096 in some layers": (
        "gemma2",
        4096,
        {**DECODER, "head_dim": 16, "sliding_window": 4096, "max_position_embeddings": 8192},
    ),
    "a chunk of 8,192": (
        "llama4_text",
        8192,
        {**CHUNKED, "attention_chunk_size": 8192, "max_position_embeddings": 1 << 15},
    ),
}
OFF = {"dropped": 1 << 30, "one too long": 1, "one too short": -1}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`windowed(name)` is an exported model of `MODELS`; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            model_type, _, fields = MODELS[name]
            folders[name] = save_tiny(model_type, tmp_path_factory.mktemp("windowed") / "model", **fields)
            export(folders[name], incremental=True)
        return folders[name]

    return folder


pytestmark = pytest.mark.slow


def resized(model: onnx.ModelProto, window: int, by: int) -> None:
    """Another window, wherever the graph has the number."""
    found = [(tensor, value) for tensor, value in constants(model) if value.dtype == np.int64 and value.size == 1]
    tensors = [(tensor, value) for tensor, value in found if int(value.reshape(())) == window]
    assert tensors, "the graph has no such number"
    for tensor, value in tensors:
        tensor.CopyFrom(numpy_helper.from_array(value + by, tensor.name))


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_correct_graph_passes(name: str, windowed: Callable[[str], Path]) -> None:
    report = verify(windowed(name), scenario=[CROSSING])
    assert report.verdict == "pass", report.closing_lines()
    assert not [check for check in report.checks if check.verdict == "skip"]


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("fault", OFF)
@pytest.mark.parametrize("name", MODELS)
def test_another_window_fails(name: str, fault: str, windowed: Callable[[str], Path], tmp_path: Path) -> None:
    target = decode_only(windowed(name), tmp_path / "mutant")
    model = onnx.load(target / "decode.onnx", load_external_data=False)
    resized(model, MODELS[name][1], OFF[fault])
    onnx.save(model, target / "decode.onnx")
    report = verify(target, reference=windowed(name), scenario=[CROSSING])
    assert CROSSING in {check.name for check in report.checks if check.verdict == "fail"}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-Neo whose window is 40; its graphs hold the window as a table."""
    folder = save_tiny("gpt_neo", tmp_path_factory.mktemp("local") / "model", window_size=40, **NEO)
    export(folder, incremental=True)
    return folder


def test_a_local_window_of_40_that_is_dropped_fails(local: Path, tmp_path: Path) -> None:
    """The graph is that of a model with the same weights and no window within its context."""
    other = tmp_path / "other"
    shutil.copytree(local, other)
    (other / "decode.onnx").unlink()
    config = (other / "config.json").read_text().replace('"window_size": 40', '"window_size": 128')
    (other / "config.json").write_text(config)
    export(other, incremental=True, overwrite=True)
    report = verify(other, reference=local)
    assert {CROSSING, "sliding window crossed"} <= {check.name for check in report.checks if check.verdict == "fail"}
