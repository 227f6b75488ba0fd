"""The importance of columns in a folder: what it must be, and that scales without it were searched without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmconv.export.quantization.block_rounding import BlockFormat
from llmconv.export.quantization.quantized_tensor import QuantizedTensor
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory
from llmconv.verify.other_exporters.quantized.dequantized_reference import StoredSmoothing, unstacked
from llmconv.verify.other_exporters.quantized.quantized_matrix import QuantizedMatrix, unpacked
from llmconv.verify.other_exporters.quantized.rounding_error import ExpectedCodes, rounding_errors
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch

FLOAT32 = BY_NAME["float32"]
ROWS, COLUMNS = 48, 64
COUNTS = np.linspace(0.01, 2, COLUMNS).astype(np.float32)
MODEL = {"down": (ROWS, COLUMNS), "experts": (3, ROWS, COLUMNS), "norm": (COLUMNS,)}


def problems(folder: Path, tensors: dict[str, Array]) -> list[str]:
    save_file(tensors, folder / "quantized.safetensors")
    reference = {name: in_memory(np.ones(shape, np.float32), FLOAT32) for name, shape in MODEL.items()}
    return StoredSmoothing.of(folder).problems(unstacked(reference))


def test_importance_of_matrices_and_of_stacks_is_accepted(tmp_path: Path) -> None:
    several = np.stack([COUNTS, np.ones_like(COUNTS), COUNTS * (np.arange(COLUMNS) > 2)])
    assert problems(tmp_path, {"down.importance": COUNTS, "experts.importance": several}) == []


def with_one(value: float) -> Array:
    changed = COUNTS.copy()
    changed[3] = value
    return changed


DAMAGED = {
    "no number": ("down", with_one(np.nan), "not mean squares"),
    "infinite": ("down", with_one(np.inf), "not mean squares"),
    "negative": ("down", -COUNTS, "not mean squares"),
    "all zero": ("down", 0 * COUNTS, "not mean squares"),
    "one of a stack": ("experts", np.stack([COUNTS, with_one(np.nan), COUNTS]), "`experts[1].importance` has values"),
    "too many experts": ("experts", np.stack([COUNTS] * 4), "`experts[3].importance` belongs to no matrix"),
    "too short": ("down", COUNTS[1:], "of shape [63], not float32 of [64]"),
    "another shape": ("down", COUNTS[None], "`down[0].importance` belongs to no matrix"),
    "another type": ("down", COUNTS.view(np.int32), "is int32 of shape [64]"),
    "another name": ("up", COUNTS, "`up.importance` belongs to no matrix"),
    "of a vector": ("norm", COUNTS, "`norm.importance` belongs to no matrix"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_importance_is_named(damage: str, tmp_path: Path) -> None:
    name, values, problem = DAMAGED[damage]
    found = problems(tmp_path, {f"{name}.importance": np.ascontiguousarray(values)})
    assert len(found) == 1 and problem in found[0]


def quantized(importance: Array) -> tuple[MatchedMatrix, dict[str, LazyTensor]]:
    """A matrix in blocks of 32, whose scales were searched with this importance, and the model."""
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    given: Any = {"importance": importance} if importance.size else {}
    parts = QuantizedTensor("", in_memory(values, FLOAT32), BlockFormat(), **given).tensors()
    codes, zeros = (unpacked(parts[end].read().reshape(ROWS, -1), 4) for end in (".codes", ".zeros"))
    grids = parts[".scales"].read(), zeros.astype(np.float32)
    shape, repeat = (ROWS, COLUMNS), (1, 32)
    stored = QuantizedMatrix(
        "down.codes", "4 bits", shape, lambda start, stop: codes[start:stop], lambda: grids, repeat, "s", largest=15
    )
    match = TensorMatch("down", False, range(ROWS), range(COLUMNS))
    return MatchedMatrix(stored, [match]), {"down": in_memory(values, FLOAT32)}


KNOWN = {"down": in_memory(COUNTS, FLOAT32)}


@pytest.mark.parametrize("method", ["search", "gptq"])
def test_scales_must_be_those_of_a_search_with_the_stored_importance(method: str) -> None:
    """Also in a folder with error feedback, whose other codes are not searched."""
    expected = ExpectedCodes(nearest=True, weighted=True, feedback=method == "gptq", importance=KNOWN)
    assert [one.problem for one in rounding_errors(*quantized(COUNTS), expected)] == [""]
    assert "search of an export" in rounding_errors(*quantized(COUNTS[::-1].copy()), expected)[0].problem


def test_scales_of_a_tensor_without_importance_must_be_those_of_equal_columns() -> None:
    expected = ExpectedCodes(nearest=True, weighted=True, importance={})
    assert [one.problem for one in rounding_errors(*quantized(np.empty(0, np.float32)), expected)] == [""]
    assert "search of an export" in rounding_errors(*quantized(COUNTS), expected)[0].problem


def test_any_search_is_accepted_where_the_folder_says_nothing_of_importance() -> None:
    expected = ExpectedCodes(nearest=True, weighted=True)
    assert [one.problem for one in rounding_errors(*quantized(COUNTS), expected)] == [""]
