"""tuned - base by rows as other tools subtract, and how many elements their sum does not restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from llmconv.convert.algebra.rounding import round_into, widen
from llmconv.errors import UnsupportedInput
from llmconv.tensors import BY_NAME, FLOATS, Array, DType, LazyTensor

EXACT = "without `--to` the delta is exact"


@dataclass(frozen=True)
class Arithmetic:
    """How a tool subtracts and adds in float32: the type of both `operands`, and of difference and sum (`stored`)."""

    operands: DType
    stored: DType


@dataclass
class Differences:
    """Makes differences, and compares the sum of base and difference with the tuned model while they are read.

    `elements` counts those of all tuned tensors.
    """

    arithmetic: Arithmetic
    elements: int = 0
    _made: dict[int, tuple[LazyTensor, LazyTensor]] = field(default_factory=dict)
    _counts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def of(self, name: str, base: LazyTensor | None, tuned: LazyTensor) -> LazyTensor:
        """`tuned` - `base`; the same tensor again for the same `tuned`, which counts once.

        Rows of `base` have the same shape; those it lacks, and None, count as zeros. Raises UnsupportedInput if one of
        them is not floating-point; when rows are read, for a value too large for float16.
        """
        if id(tuned) not in self._made:
            self._made[id(tuned)] = (tuned, self._difference(name, base, tuned))
            self._names.append(name)
            self.elements += _size(tuned)
        return self._made[id(tuned)][1]

    def _difference(self, name: str, base: LazyTensor | None, tuned: LazyTensor) -> LazyTensor:
        for side in (base, tuned):
            if side and side.dtype.name not in SUMMED:
                raise UnsupportedInput(
                    f"unsupported dtype {side.dtype.name} of `{name}`", hint=f"only floats are subtracted; {EXACT}"
                )
        stored, number = self.arithmetic.stored, len(self._made)

        def load(start: int, stop: int) -> Array:
            rows = tuned.rows(start, stop)
            above = self._operand(rows, name)
            below = np.zeros_like(above)
            last = max(start, min(stop, base.num_rows)) if base else start
            if base and start < last:
                below[: last - start] = self._operand(base.rows(start, last), name)
            result = _rounded(above - below, stored, name)
            restored = _rounded(below + widen(result), stored, name)
            self._counts[number, start] = rows.size, _unlike(rows, restored)
            return result

        return LazyTensor(stored, tuned.shape, load)

    def _operand(self, rows: Array, name: str) -> Array:
        """Rows in float32, rounded as the tool loads them."""
        return widen(_rounded(widen(rows), self.arithmetic.operands, name))

    def inexact(self) -> int | None:
        """How many elements the sum does not restore to the bit; None if not all were read, as in a resumed run."""
        if sum(size for size, _ in self._counts.values()) != self.elements:
            return None
        return sum(count for _, count in self._counts.values())

    def inexact_tensors(self) -> dict[str, int]:
        """The number of elements that the sum does not restore, by the names of the tensors that have any."""
        found: Counter[str] = Counter()
        for (number, _), (_, count) in self._counts.items():
            found[self._names[number]] += count
        return {name: count for name, count in sorted(found.items()) if count}


def _size(tensor: LazyTensor) -> int:
    return tensor.nbytes // tensor.dtype.itemsize


def _rounded(values: Array, dtype: DType, name: str) -> Array:
    result = np.empty(values.shape, dtype.numpy)
    try:
        round_into(result, values)
    except UnsupportedInput as error:
        raise UnsupportedInput(f"`{name}` has a value too large for {dtype.name}", hint=EXACT) from error
    return result


def _unlike(tuned: Array, restored: Array) -> int:
    """The number of elements whose values differ by a bit, in the wider of the two types."""
    wide, other = widen(tuned), widen(restored)
    if wide.dtype != other.dtype:
        wide, other = wide.astype(np.float64), other.astype(np.float64)
    bits = np.dtype(f"u{wide.itemsize}")
    return int(np.count_nonzero(wide.view(bits) != other.view(bits)))


FLOAT16, FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]


SUMMED = ("float64", *FLOATS)


def added(name: str, base: LazyTensor | None, delta: LazyTensor) -> LazyTensor:
    """`base` + `delta` in float32 or float64; rows that the base lacks, and None, are zeros.

    Raises UnsupportedInput if one of them is not floating-point.
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
    """A sum rounded once to `dtype`; reading raises UnsupportedInput for a finite sum too large for float16."""
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
    """Every sum rounded once to `dtype`, or with `keep` to its dtype in `kept`."""
    chosen = BY_NAME.get(dtype)
    return {name: rounded(tensor, chosen or kept[name]) for name, tensor in sums.items()}
