"""Graphs over one buffer for past and present, as ORT-GenAI's `past_present_share_buffer` requires."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.export import export
from llmconv.runtime import OrtGraph, default_positions
from llmconv.runtime.extra_inputs import MAX_LENGTH
from llmconv.verify import verify
from tests.builders.mutants.surgery import add_constant, maker, users
from tests.conftest import CONFIGS

Tiny = Callable[[str], Path]
QUICK = ("llama",)
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]


@pytest.fixture(scope="session")
def shared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`shared(model_type)` is a folder with weights and model.onnx over a shared buffer."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = tmp_path_factory.mktemp("shared") / model_type
            shutil.copytree(tiny(model_type), folders[model_type])
            export(folders[model_type], unified=True, cache="shared-buffer")
        return folders[model_type]

    return folder


def graph_of(folder: Path) -> onnx.ModelProto:
    """The unified graph without its weights."""
    return onnx.load(folder / "model.onnx", load_external_data=False)


@pytest.mark.one_row_in(8)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_scenario_equals_the_eager_model(model_type: str, shared: Tiny) -> None:
    report = verify(shared(model_type))
    assert report.verdict == "pass", report.closing_lines()
    assert not any(check.verdict == "skip" for check in report.checks)


@pytest.mark.slow
def test_past_and_present_are_one_buffer_and_no_node_copies_it(shared: Tiny) -> None:
    graph = OrtGraph(shared("llama") / "model.onnx")
    assert graph.inputs["past_key_values.3.key"] == graph.outputs["present.3.key"] == ["batch_size", 2, MAX_LENGTH, 16]
    model = graph_of(shared("llama"))
    assert len(users(model, "GroupQueryAttention")) == 4
    assert not users(model, "Attention") + users(model, "TensorScatter")


@pytest.mark.slow
def test_attention_without_an_attention_node_uses_standard_operators(shared: Tiny) -> None:
    model = graph_of(shared("bloom"))
    assert users(model, "TensorScatter") and not users(model, "GroupQueryAttention")


@pytest.mark.slow
def test_a_length_that_is_one_too_small_is_caught(shared: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shared("llama"), tmp_path / "mutant"))
    model = graph_of(folder)
    lengths = maker(model, users(model, "GroupQueryAttention")[0].input[5])
    last = maker(model, lengths.input[0]) if lengths else None
    assert last is not None and last.op_type == "Sub"
    last.input[1] = add_constant(model, np.array([2], dtype=np.int32))
    onnx.save(model, folder / "model.onnx")
    assert verify(folder, allow_changed=True).verdict == "fail"


@pytest.mark.slow
def test_a_buffer_that_is_too_small_is_replaced_by_a_larger_one(shared: Tiny) -> None:
    graph = OrtGraph(shared("llama") / "model.onnx")
    mask = np.ones((1, 100), dtype=np.int64)
    ids, positions = np.random.default_rng(0).integers(0, 96, mask.shape), default_positions(mask, 100)
    first = graph.run(ids[:, :60], mask[:, :60], positions[:, :60])
    second = graph.run(ids[:, 60:], mask, positions[:, 60:], first.present)
    assert [step.present.buffers.capacity for step in (first, second)] == [64, 128]  # type: ignore[attr-defined]
    np.testing.assert_allclose(second.logits[0, -1], graph.run(ids, mask, positions).logits[0, -1], atol=1e-5)
