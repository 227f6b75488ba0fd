"""Constants are computed from constants by a few operators only, and no larger than they may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from llmconv.tensors import Array
from llmconv.verify.audit.derived_values import FOLDED, fold

ONES = np.ones(1 << 16, np.float32)


def node(op: str, inputs: int, **attributes: Any) -> onnx.NodeProto:
    """One with as many inputs."""
    return helper.make_node(op, [f"input_{at}" for at in range(inputs)], ["output"], **attributes)


@pytest.mark.parametrize(
    ("made", "arrays"),
    [
        (node("RegexFullMatch", 1, pattern="(a+)+$"), [np.array(["a" * 40 + "b"])]),
        (node("Mul", 2), [ONES[:, None], ONES[None]]),
        (node("MatMul", 2), [ONES[:, None], ONES[None]]),
        (node("Tile", 2), [ONES, np.array([1 << 20])]),
        (node("Expand", 2), [ONES[:, None], np.array([1, 1 << 20])]),
        (node("ConstantOfShape", 1), [np.array([1 << 40])]),
        (node("ConstantOfShape", 1), [np.array([1 << 20] * 4)]),
        (node("Range", 3), [np.array(0), np.array(1 << 40), np.array(1)]),
        (node("Range", 3), [np.array(0.0), np.array(1.0), np.array(1e-12)]),
        (node("Gather", 2), [ONES.reshape(1, -1), np.zeros(FOLDED, np.int64)]),
        (node("OneHot", 3), [np.arange(9), np.array(1 << 40), np.array([0, 1])]),
        (node("Pad", 2), [ONES, np.array([0, 1 << 40])]),
        (node("Conv", 2), [ONES.reshape(1, 1, -1), ONES.reshape(1, 1, -1)]),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_unlimited_work_is_not_started(made: onnx.NodeProto, arrays: list[Array]) -> None:
    assert fold(made, arrays) is None


@pytest.mark.parametrize(
    ("made", "arrays", "expected"),
    [
        (node("Range", 3), [np.array(2), np.array(8), np.array(3)], [2, 5]),
        (node("Range", 3), [np.array(8), np.array(2), np.array(-3)], [8, 5]),
        (node("Tile", 2), [np.array([1, 2]), np.array([2])], [1, 2, 1, 2]),
        (node("Add", 2), [np.array([1, 2]), np.array(3)], [4, 5]),
        (node("Gather", 2), [np.array([5, 6, 7]), np.array([2])], [7]),
        (node("ConstantOfShape", 1), [np.array([2])], [0, 0]),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_small_constants_are_computed(made: onnx.NodeProto, arrays: list[Array], expected: list[int]) -> None:
    found = fold(made, arrays)
    assert found is not None and found.tolist() == expected


def test_an_operator_of_another_domain_is_not_computed() -> None:
    made = node("Add", 2)
    made.domain = "com.example"
    assert fold(made, [np.array(1), np.array(2)]) is None
