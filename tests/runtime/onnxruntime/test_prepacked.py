"""Sessions with prepacked weights: fewer products, bit-identical logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.export.exporter import export
from llmconv.runtime import OrtRunner, SessionSettings, default_positions
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.packed_cache import join_projections
from llmconv.tensors import Array
from tests.builders.tracing import trace_once

IDS = np.random.default_rng(0).integers(3, 96, (2, 7))
MASK = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * 7])

pytestmark = pytest.mark.slow

OTHERS = ["qwen2", "qwen3"]
"""With something between product and attention: a bias, a norm."""


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(model_type)`: graphs with onnxruntime's own attention."""
    trace_once()
    folders: dict[str, Path] = {}

    def exported(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = tmp_path_factory.mktemp("packed") / model_type
            shutil.copytree(tiny(model_type), folders[model_type])
            export(folders[model_type], target="ort-cpu", cache="shared-buffer")
        return folders[model_type]

    return exported


def products(graph: onnx.GraphProto) -> int:
    """How many matrices are multiplied."""
    return sum(node.op_type == "FusedMatMul" for node in graph.node)


def said(folder: Path, settings: SessionSettings) -> list[Array]:
    """Logits of a batch, [tokens, vocabulary], and of two steps behind it, [2, 1, vocabulary]."""
    runner = OrtRunner.from_folder(folder, settings)
    step = runner.prefill(IDS, MASK, default_positions(MASK, 7))
    logits = [step.logits[MASK == 1]]
    for columns in (8, 9):
        mask = np.concatenate([MASK, np.ones((2, columns - 7), dtype=np.int64)], axis=1)
        step = runner.decode(IDS[:, :1], mask, default_positions(mask, 1), step.present)
        logits.append(step.logits)
    return logits


def test_query_key_and_value_of_a_step_are_one_product(folder: Callable[[str], Path]) -> None:
    graph = load_guarded(folder("llama") / "decode.onnx").graph
    before = products(graph)

    join_projections(graph)

    assert products(graph) == before - 2 * 4
    assert [list(node.input[1:3]) for node in graph.node if node.op_type == "GroupQueryAttention"] == [["", ""]] * 4


@pytest.mark.one_row_in(3)
@pytest.mark.parametrize("model_type", ["llama", *OTHERS])
def test_joined_products_give_bit_identical_logits(
    folder: Callable[[str], Path], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SessionSettings(threads=1, prepack=True)
    joined = said(folder(model_type), settings)
    monkeypatch.setattr("llmconv.runtime.onnxruntime.graph.join_projections", lambda graph: None)
    apart = said(folder(model_type), settings)

    assert all(np.array_equal(one, other) for one, other in zip(joined, apart, strict=True))


@pytest.mark.parametrize("optimization", ["all", "disable"])
def test_packed_graphs_give_the_logits_of_mapped_ones(folder: Callable[[str], Path], optimization: str) -> None:
    mapped = said(folder("llama"), SessionSettings())
    packed = said(folder("llama"), SessionSettings(prepack=True, optimization=optimization))

    for one, other in zip(mapped, packed, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


def test_packing_works_from_another_directory(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder("llama")
    monkeypatch.chdir(home.parent)
    assert len(said(Path(home.name), SessionSettings(prepack=True))) == 3


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("model_type", OTHERS)
def test_a_node_between_product_and_attention_prevents_joining(folder: Callable[[str], Path], model_type: str) -> None:
    graph = load_guarded(folder(model_type) / "decode.onnx").graph
    before = graph.SerializeToString()

    join_projections(graph)

    assert graph.SerializeToString() == before


@pytest.mark.parametrize("reader", ["a node", "the caller"])
def test_a_product_that_another_node_reads_is_not_joined(folder: Callable[[str], Path], reader: str) -> None:
    graph = load_guarded(folder("llama") / "decode.onnx").graph
    before = products(graph)
    attention = next(node for node in graph.node if node.op_type == "GroupQueryAttention")
    if reader == "a node":
        graph.node.append(onnx.helper.make_node("Identity", [attention.input[1]], ["seen"]))
    else:
        graph.output.append(onnx.helper.make_tensor_value_info(attention.input[1], onnx.TensorProto.FLOAT, None))

    join_projections(graph)

    assert products(graph) == before - 2 * 3
