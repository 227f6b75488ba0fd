"""All runners have the same methods and give the same results; the float64 reference computes in float64."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.export.exporter import export
from llmconv.runtime import OrtGraph, OrtRunner, Runner, SessionSettings, default_positions
from llmconv.runtime.eager.limit_margins import Float64Casts
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.tensors import Array

IDS = np.random.default_rng(0).integers(0, 96, (2, 7))
MASK = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
STOP = "session.force_spinning_stop"


def exported(model: Path, folder: Path, **options: Any) -> Path:
    """The model with graphs of another kind."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.onnx", "llmconv.json"))
    export(folder, **options)
    return folder


def spins(graph: OrtGraph) -> bool:
    """Whether its threads wait for the next run by spinning."""
    return bool(graph._session.last.get_session_options().get_session_config_entry(STOP) == "0")


def continue_by_one(runner: Runner) -> tuple[Array, dict[str, Array]]:
    """Logits and cache after a prompt and a step."""
    first = runner.prefill(IDS, MASK, default_positions(MASK, 7))
    mask = np.concatenate([MASK, np.ones((2, 1), dtype=np.int64)], axis=1)
    step = runner.decode(np.array([[5], [6]]), mask, default_positions(mask, 1), first.present)
    assert (first.present.length, step.present.length) == (7, 8)
    return step.logits, dict(step.present.arrays())


@pytest.mark.slow
def test_the_graphs_and_the_eager_model_agree(talking: Path) -> None:
    logits, cache = continue_by_one(OrtRunner.from_folder(talking))
    expected, exact = continue_by_one(EagerRunner(talking, "float64"))
    assert np.allclose(logits, expected, atol=1e-5)
    assert list(cache) == list(exact)
    assert all(np.allclose(cache[name][:, :, 2:], exact[name][:, :, 2:], atol=1e-5) for name in cache)


@pytest.mark.slow
def test_a_cache_from_one_runner_continues_in_another(talking: Path) -> None:
    eager, graphs = EagerRunner(talking), OrtRunner.from_folder(talking)
    mask = np.ones((1, 4), dtype=np.int64)
    past = eager.prefill(IDS[:1, :3], mask[:, :3], default_positions(mask[:, :3], 3)).present
    inputs = (IDS[:1, 3:4], mask, default_positions(mask, 1), past)
    assert np.allclose(graphs.decode(*inputs).logits, eager.decode(*inputs).logits, atol=1e-5)


@pytest.mark.slow
def test_a_step_does_not_change_its_past(talking: Path) -> None:
    for runner in (EagerRunner(talking), OrtRunner.from_folder(talking)):
        past = runner.prefill(IDS, MASK, default_positions(MASK, 7)).present
        before = past.arrays()["present.0.key"].copy()
        mask = np.ones((2, 8), dtype=np.int64)
        runner.decode(IDS[:, :1], mask, default_positions(mask, 1), past)
        assert past.length == 7
        assert np.array_equal(past.arrays()["present.0.key"], before)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SessionSettings(1, True, "disable"), SessionSettings(2, False, "extended")])
def test_session_settings_do_not_change_the_logits(talking: Path, settings: SessionSettings) -> None:
    logits, _ = continue_by_one(OrtRunner.from_folder(talking, settings))
    assert np.allclose(logits, continue_by_one(OrtRunner.from_folder(talking))[0], atol=1e-5)


def test_the_graph_declares_its_inputs(talking: Path) -> None:
    graph = OrtGraph(talking / "decode.onnx")
    assert graph.takes_positions
    assert graph.inputs["past_key_values.0.key"] == ["batch_size", 2, "past_sequence_length", 16]
    assert graph.present_names == [f"present.{i}.{part}" for i in range(4) for part in ("key", "value")]


@pytest.mark.slow
def test_a_failing_run_is_one_clear_error(talking: Path) -> None:
    ids = np.array([[10_000]])
    with pytest.raises(MalformedInput, match=r"`decode.onnx` fails in onnxruntime"):
        OrtGraph(talking / "decode.onnx").run(ids, np.ones_like(ids), np.zeros_like(ids))


def test_the_eager_model_refuses_a_token_outside_of_its_vocabulary(talking: Path) -> None:
    ids = np.array([[10_000]])
    with pytest.raises(UsageProblem, match="token 10000 is not in the vocabulary of 96 tokens"):
        EagerRunner(talking).prefill(ids, np.ones_like(ids), np.zeros_like(ids))


def test_casts_to_lower_floats_stay_in_float64() -> None:
    third = torch.tensor(1.0, dtype=torch.float64) / 3
    with Float64Casts():
        assert float(third.float().double()) == float(third)
        assert torch.softmax(third.reshape(1), 0, dtype=torch.float32).dtype is torch.float64
    assert float(third.float().double()) != float(third)


def test_float64_is_more_exact_than_doubling_the_model_alone(talking: Path) -> None:
    exact, naive = EagerRunner(talking, "float64"), EagerRunner(talking, "float64")
    naive.dtype = "float32"  # the model stays doubled, the mode is left out
    inputs = (IDS[1:], MASK[1:], default_positions(MASK[1:], 7))
    difference = np.abs(exact.prefill(*inputs).logits - naive.prefill(*inputs).logits).max()
    assert 1e-9 < difference < 1e-4


@pytest.mark.slow
def test_logits_of_a_step_stay_when_the_next_is_run(tmp_path: Path, talking: Path) -> None:
    runner = OrtRunner.from_folder(exported(talking, tmp_path / "model", cache="shared-buffer"))
    step = runner.prefill(IDS, MASK, default_positions(MASK, 7))
    logits, copies = [], []
    for columns in range(8, 12):
        mask = np.concatenate([MASK, np.ones((2, columns - 7), dtype=np.int64)], axis=1)
        step = runner.decode(IDS[:, :1], mask, default_positions(mask, 1), step.present)
        logits.append(step.logits)
        copies.append(step.logits.copy())
    assert all(np.array_equal(one, copy) for one, copy in zip(logits, copies, strict=True))
    assert not np.array_equal(copies[-1], copies[-2])


@pytest.mark.slow
def test_threads_of_prompts_leave_the_cores_to_those_of_steps(talking: Path, tmp_path: Path) -> None:
    different = {"cache": "shared-buffer", "target": "ort-cpu"}
    runner = OrtRunner.from_folder(exported(talking, tmp_path / "model", **different))
    assert [spins(graph) for graph in (runner._prompt_graph, runner._step_graph)] == [False, True]
    assert spins(OrtRunner.from_files(talking / "decode.onnx")._step_graph)


@pytest.mark.slow
def test_threads_of_a_stage_leave_the_cores_to_those_of_the_next(talking: Path, tmp_path: Path) -> None:
    runner = OrtRunner.from_folder(exported(talking, tmp_path / "model", stages=2))
    assert not any(spins(graph) for graph in (runner._prompt_graph, runner._step_graph))


@pytest.mark.slow
def test_torch_is_not_imported_for_the_graphs() -> None:
    code = "import sys, llmconv.runtime, llmconv.cli.generate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputRefused, match="contains no safetensors weights"):
        EagerRunner(tmp_path)
