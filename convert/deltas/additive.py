"""base + delta by rows: in float32 (float64 if either is), rounded once at the end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmconv.convert.algebra.rounding import round_into, widen
from llmconv.errors import UnsupportedInput
from llmconv.tensors import BY_NAME, FLOATS, Array, DType, LazyTensor

SUMMED = ("float64", *FLOATS)


def added(name: str, base: LazyTensor | None, delta: LazyTensor) -> LazyTensor:
    """`base` + `delta` in float32, or float64; rows that the base does not have count as zeros.

    Args:
        name: of the tensor, for messages.
        base: rows of the same shape as those of `delta`, at most as many; None counts as zeros.
        delta: the difference.

    Raises:
        UnsupportedInput: one of them is not floating-point.
    """
    kinds = [tensor.dtype.name for tensor in (base, delta) if tensor is not None]
    if odd := [kind for kind in kinds if kind not in SUMMED]:
        raise UnsupportedInput(
            f"unsupported dtype {odd[0]} of `{name}`", hint="give base and delta unquantized, in floating point"
        )
    work = BY_NAME["float64" if "float64" in kinds else "float32"]

    def load(start: int, stop: int) -> Array:
        total = _widened(delta.rows(start, stop), work)
        last = min(stop, base.num_rows) if base else start
        if base and start < last:
            total[: last - start] += _widened(base.rows(start, last), work)
        return total

    return LazyTensor(work, delta.shape, load)


def _widened(rows: Array, work: DType) -> Array:
    wide = widen(rows)
    return wide.astype(work.numpy, copy=wide is rows)


def rounded(tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """A sum rounded once to `dtype`.

    Raises (when rows are read):
        UnsupportedInput: a finite sum is too large for float16.
    """
    if tensor.dtype == dtype or tensor.dtype.name not in SUMMED:
        return tensor

    def load(start: int, stop: int) -> Array:
        values = tensor.rows(start, stop)
        values = widen(values) if dtype.name == "float16" else values
        result = np.empty(values.shape, dtype.numpy)
        round_into(result, values)
        return result

    return tensor.recast(dtype) if tensor.recast else LazyTensor(dtype, tensor.shape, load)


def wider(one: DType, other: DType) -> DType:
    """The dtype of a sum with `keep`: the base's, or the delta's if it has more bits."""
    return other if other.name in SUMMED and other.itemsize > one.itemsize else one


def all_rounded(sums: Mapping[str, LazyTensor], kept: Mapping[str, DType], dtype: str) -> dict[str, LazyTensor]:
    """Every sum rounded once.

    Args:
        sums: by name.
        kept: dtype of each for `keep`.
        dtype: `keep` or a floating-point type.
    """
    chosen = BY_NAME.get(dtype)
    return {name: rounded(tensor, chosen or kept[name]) for name, tensor in sums.items()}
