"""Constants in a graph are computed where they are small, so that a hostile graph cannot start unlimited work."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from llmconv.tensors import Array
from llmconv.verify.audit.decisions import fold

ONES = np.ones(1 << 16, np.float32)
COLUMN, ROW = np.ones((300, 1), np.float32), np.ones((1, 300), np.float32)


def node(op: str, count: int, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    """One with as many inputs."""
    return helper.make_node(op, [f"x{at}" for at in range(count)], ["y"], domain=domain, **attributes)


@pytest.mark.parametrize(
    ("made", "arrays"),
    [
        (node("Range", 3), [np.array(0), np.array(1 << 40), np.array(1)]),
        (node("Range", 3), [np.array(0.0), np.array(1.0), np.array(1e-9)]),
        (node("ConstantOfShape", 1), [np.array([1 << 40])]),
        (node("Expand", 2), [np.ones(1, np.float32), np.array([1 << 20, 1 << 20])]),
        (node("Tile", 2), [np.ones(4), np.array([1 << 40])]),
        (node("Abs", 1), [ONES]),
        (node("Add", 2), [COLUMN, ROW]),
        (node("Sum", 4), [np.ones((9, 1, 1, 1))] * 4),
        (node("Conv", 2), [np.ones((1, 1, 4)), np.ones((1, 1, 4))]),
        (node("Abs", 1, "com.example"), [np.array([-1])]),
        (node("Add", 2), [np.array(["a"], object), np.array([1])]),
        (node("Add", 2), [np.ones(3), np.ones(2)]),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_unlimited_work_is_not_started(made: onnx.NodeProto, arrays: list[Array]) -> None:
    assert fold(made, arrays) is None


@pytest.mark.parametrize(
    ("made", "arrays", "expected"),
    [
        (node("Range", 3), [np.array(2), np.array(8), np.array(3)], [2, 5]),
        (node("Add", 2), [np.array([1, 2]), np.array(3)], [4, 5]),
        (node("Gather", 2, axis=0), [np.array([5, 6, 7]), np.array([2, 0])], [7, 5]),
        (node("Squeeze", 1), [np.array([[3, 4]])], [3, 4]),
        (node("Cast", 1, to=onnx.TensorProto.INT64), [np.array([1.5])], [1]),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_small_constants_are_computed(made: onnx.NodeProto, arrays: list[Array], expected: list[int]) -> None:
    found = fold(made, arrays)
    assert found is not None and found.tolist() == expected
