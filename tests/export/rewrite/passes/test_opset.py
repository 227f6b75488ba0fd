"""Operators expanded for older runtimes give the results of the runtime's own operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from llmconv.errors import UnsupportedInput
from llmconv.export.rewrite.passes import to_opset
from tests.export.rewrite.passes.graphs import INT64, graph, port, run

RNG = np.random.default_rng(2)
BATCH, HEADS, NEW, TOTAL, SIZE = 2, 6, 3, 5, 4


def attention(kv_heads: int, value_size: int, **attributes: Any) -> ir.Model:
    """One Attention node over a past, with an additive mask."""
    node = helper.make_node(
        "Attention", ["q", "k", "v", "mask"], ["y"], name="layers.0.self_attn/Attention", **attributes
    )
    inputs = [
        port("q", ["b", HEADS, "s", SIZE]),
        port("k", ["b", kv_heads, "t", SIZE]),
        port("v", ["b", kv_heads, "t", value_size]),
        port("mask", ["b", 1, "s", "t"]),
    ]
    return graph([node], inputs, [port("y", ["b", HEADS, "s", value_size])], {})


@pytest.mark.parametrize(("kv_heads", "value_size"), [(6, 4), (2, 4), (1, 4), (3, 7)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_attention_is_expanded_exactly(kv_heads: int, value_size: int, softcap: float) -> None:
    given = {"scale": 0.3, **({"softcap": softcap} if softcap else {})}
    feeds = {
        "q": RNG.normal(size=(BATCH, HEADS, NEW, SIZE)).astype(np.float32),
        "k": RNG.normal(size=(BATCH, kv_heads, TOTAL, SIZE)).astype(np.float32),
        "v": RNG.normal(size=(BATCH, kv_heads, TOTAL, value_size)).astype(np.float32),
        "mask": np.where(RNG.random((BATCH, 1, NEW, TOTAL)) > 0.3, 0, np.finfo(np.float32).min).astype(np.float32),
    }
    model = attention(kv_heads, value_size, **given)
    expected = run(attention(kv_heads, value_size, **given), **feeds)["y"]
    to_opset(model, 21)
    assert model.opset_imports[""] == 21 and "Attention" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, **feeds)["y"], expected, atol=1e-6)


def test_rms_normalization_is_expanded() -> None:
    def norm() -> ir.Model:
        node = helper.make_node("RMSNormalization", ["x", "scale"], ["y"], epsilon=1e-3)
        scale = np.arange(8, dtype=np.float32)
        return graph([node], [port("x", ["b", "s", 8])], [port("y", ["b", "s", 8])], {"scale": scale})

    rows = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    model = norm()
    to_opset(model, 21)
    np.testing.assert_allclose(run(model, x=rows)["y"], run(norm(), x=rows)["y"], atol=1e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("by_position", [False, True])
def test_rotary_embedding_is_expanded(interleaved: int, size: int, by_position: bool) -> None:
    names = ["x", "cos", "sin", "positions"][: 4 if by_position else 3]
    table = [16, (size or 8) // 2] if by_position else [2, 3, (size or 8) // 2]

    def rotary() -> ir.Model:
        node = helper.make_node("RotaryEmbedding", names, ["y"], interleaved=interleaved, rotary_embedding_dim=size)
        ports = [port("x", [2, 4, 3, 8]), port("cos", table), port("sin", table), port("positions", [2, 3], INT64)]
        return graph([node], ports[: len(names)], [port("y", [2, 4, 3, 8])], {})

    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in ([2, 4, 3, 8], table, table)]
    feeds = dict(zip(names, [*arrays, np.array([[0, 5, 15], [1, 2, 3]])], strict=False))
    model = rotary()
    to_opset(model, 21)
    np.testing.assert_allclose(run(model, **feeds)["y"], run(rotary(), **feeds)["y"], atol=1e-6)


def test_nodes_keep_the_names_of_their_modules() -> None:
    model = attention(2, 4, scale=0.5)
    to_opset(model, 21)
    names = [node.name or "" for node in model.graph]
    assert len(set(names)) == len(names)
    assert all(name.startswith("layers.0.self_attn/Attention/") for name in names)


def test_a_newer_opset_changes_no_nodes() -> None:
    model = attention(2, 4, scale=0.5)
    to_opset(model, 24)
    assert [node.op_type for node in model.graph] == ["Attention"] and model.opset_imports[""] == 24


def test_an_operator_without_an_equivalent_is_refused() -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
    ports = [port(name, ["b", HEADS, "s", SIZE]) for name in "qkv"]
    with pytest.raises(UnsupportedInput, match="Attention"):
        to_opset(graph([node], ports, [port("y", ["b", HEADS, "s", SIZE])], {}), 21)
