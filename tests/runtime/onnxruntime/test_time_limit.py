"""Graphs that would run for hours or fill the memory are refused by their structure, or stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmconv.errors import MalformedInput
from llmconv.runtime.onnxruntime import time_limit
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from tests.builders import graph_bombs as bombs

TOKENS = np.ones((1, 2), np.int64)
HUGE = np.array([1 << 40], np.int64)
ONE = np.float32(1)


def test_a_loop_of_2_60_iterations_is_stopped_and_not_started_again(tmp_path: Path) -> None:
    graph = OrtGraph(bombs.loop(tmp_path, 1 << 60), SessionSettings(timeout=0.3))
    with pytest.raises(MalformedInput, match="it was stopped: 2 tokens took more than 0 s"):
        graph.run(TOKENS, TOKENS, TOKENS)
    began = time.monotonic()
    with pytest.raises(MalformedInput, match="it was stopped"):
        graph.run(TOKENS, TOKENS, TOKENS)
    assert time.monotonic() - began < 0.2


def test_a_loop_that_ends_is_run(tmp_path: Path) -> None:
    graph = OrtGraph(bombs.loop(tmp_path, 3), SessionSettings(timeout=30))
    assert graph.run(TOKENS, TOKENS, TOKENS).logits == 8


def test_functions_that_call_functions_are_counted(tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="has 1111.* nodes"):
        load_guarded(bombs.functions(tmp_path, 40, 10))


def test_functions_of_a_reasonable_size_run(tmp_path: Path) -> None:
    graph = OrtGraph(bombs.functions(tmp_path, 3, 4))
    assert graph.run(TOKENS, TOKENS, TOKENS).logits.tolist() == [[2.0**64, 2.0**64]]


def test_time_that_other_programs_take_counts_a_tenth() -> None:
    deadline = time_limit.Deadline(0.1)
    time.sleep(0.2)
    assert not deadline.is_over()
    time.sleep(0.1 * time_limit.PATIENCE)
    assert deadline.is_over()


def test_opening_a_graph_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "POLL", 0.05)
    with pytest.raises(MalformedInput, match="cannot be opened: it was stopped"):
        OrtGraph(bombs.functions(tmp_path, 5, 9), SessionSettings(timeout=0.1))


@pytest.mark.parametrize("levels", [2, 1])
def test_a_function_that_calls_itself_is_refused(tmp_path: Path, levels: int) -> None:
    with pytest.raises(MalformedInput, match="recursive function"):
        load_guarded(bombs.functions(tmp_path, levels, 2, f"f{levels - 1}", "f"))


@pytest.mark.parametrize(
    "build",
    [
        lambda folder: bombs.filled(folder, "ConstantOfShape", HUGE),
        lambda folder: bombs.filled(folder, "Expand", ONE, np.array([1 << 20, 1 << 20], np.int64)),
        lambda folder: bombs.filled(folder, "Tile", np.zeros(2, np.float32), HUGE),
        lambda folder: bombs.filled(folder, "Range", np.int64(0), np.int64(1 << 62), np.int64(1)),
        lambda folder: bombs.filled(folder, "RandomNormal", shape=[1 << 40]),
    ],
    ids=["zeros", "expanded", "repeated", "range", "random"],
)
def test_a_constant_of_a_terabyte_is_refused(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    with pytest.raises(MalformedInput, match="computes a constant"):
        load_guarded(build(tmp_path))


@pytest.mark.slow
def test_constants_are_not_doubled_without_end_when_a_graph_is_opened(tmp_path: Path) -> None:
    graph = OrtGraph(bombs.doubled(tmp_path, 40), SessionSettings(timeout=30))
    assert list(graph.outputs) == ["logits"]


def test_a_range_of_a_long_number_is_refused(tmp_path: Path) -> None:
    path = bombs.doubled(tmp_path, 1)
    model = load_guarded(path)
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[1], data_location=1)
    for key, value in (("location", path.name), ("offset", "9" * 5000), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(MalformedInput, match="beyond the end"):
        load_guarded(path)
