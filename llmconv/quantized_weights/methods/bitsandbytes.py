"""bitsandbytes: 4-bit codes (nf4, fp4) with a scale per block, or int8 with a scale per row (LLM.int8).

4-bit codes are in blocks of the flattened weight. Layout (`bitsandbytes/functional.py`, `QuantState.as_dict`):
`X.weight` two codes per byte, the first in the upper half; `X.weight.absmax` the scale of each block;
`X.weight.quant_map` the value of each code; the rest as JSON in the bytes of
`X.weight.quant_state.bitsandbytes__nf4`. With double quantization the scales are 8-bit codes themselves:
`nested_quant_map[absmax] · nested_absmax of its block + nested_offset`.

LLM.int8: `X.weight` int8 of out×in, `X.SCB` float32 of out, `X.weight_format` 0 (row by row). Formulas:
`bitsandbytes/backends/default/ops.py` (`int8_vectorwise_quant`), `functional.py` (`int8_vectorwise_dequant`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, Self

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput, short
from llmconv.quantized_weights.packed_weight import (
    FLOAT32,
    TILE_ELEMENTS,
    IntegerCodes,
    PackedWeight,
    as_bytes,
    bounded,
    finite,
    part,
    peaks_of,
    refuse,
    refuse_strays,
    require,
    tiled,
    unsigned,
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import BY_NAME, Array, LazyTensor

PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")


def open_bitsandbytes(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The quantized weights; MalformedInput for mismatched parts, UnsupportedInput for int8 in a GPU kernel's order."""
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        if STATE in name:
            weight = name[: name.index(STATE)]
            weights[weight] = open_four_bit(checkpoint, weight, name)
        elif tensor.dtype.name == "int8" and name.endswith(".weight"):
            weights[name] = open_int8(checkpoint, name)
    refuse_strays(checkpoint, PARTS, weights)
    return weights


METHOD = QuantizationMethod("bitsandbytes", open_bitsandbytes)
STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
STATE_BYTES = 64 << 10
BLOCK_SIZES = tuple(1 << power for power in range(4, 13))  # 16 to 4096; bitsandbytes allows 32 and up
SCALES = ("float32", "float16", "bfloat16")
TINY = np.float32(1e-38)  # the divisor of bitsandbytes for a block of zeros
LARGE = 1e38  # limit of an offset, within the range of float32


@dataclass(frozen=True)
class NestedScales:
    """Scales that are stored as 8-bit codes (double quantization)."""

    peaks: str  # name of the scales of the scales
    map: str  # name of the 256 values of their codes
    offset: float  # added to all scales
    block: int  # number of scales that share one scale


@dataclass(frozen=True, eq=False)
class FourBitWeight(PackedWeight):
    """value = quant_map[code] · scale of its `block` of elements; `nested` are the scales of 8-bit scales."""

    block: int
    nested: NestedScales | None

    @cached_property
    def code_values(self) -> Array:
        """The value of each of the 16 codes, float32."""
        return self._table(f"{self.name}.quant_map")

    @property
    def count(self) -> int:
        """Elements of the weight."""
        return prod(self.shape)

    def values(self, start: int, stop: int) -> Array:
        columns = prod(self.shape[1:])
        first, last = start * columns, stop * columns
        packed = as_bytes(self.parts[self.name]).rows(first // 2, -(-last // 2))
        codes = np.empty((len(packed), 2), np.uint8)
        np.right_shift(packed, 4, out=codes[:, 0])
        np.bitwise_and(packed, 15, out=codes[:, 1])
        wide = self.code_values[codes.reshape(-1)[first % 2 :][: last - first]]
        scales = self.scales(first // self.block, -(-last // self.block))
        wide *= np.repeat(scales, self.block)[first % self.block :][: last - first]
        return wide.reshape(stop - start, *self.shape[1:])

    def scales(self, start: int, stop: int) -> Array:
        """The scales of blocks `start:stop` in float32."""
        stored = self.parts[f"{self.name}.absmax"].rows(start, stop)
        if not self.nested:
            return finite(stored, f"{self.name}.absmax")
        block = self.nested.block
        peaks = self.parts[self.nested.peaks].rows(start // block, -(-stop // block))
        spread = np.repeat(finite(peaks, self.nested.peaks), block)[start % block :][: stop - start]
        scales: Array = self._table(self.nested.map)[stored] * spread + np.float32(self.nested.offset)
        return scales

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`. Double quantization keeps its offset."""
        stored, absmax = self.parts[self.name], f"{self.name}.absmax"
        size = stored.nbytes // max(1, stored.num_rows)

        def codes(start: int, stop: int) -> Array:
            numbers = self._codes(weight, 2 * start * size, 2 * stop * size)
            packed = numbers[::2] << 4 | numbers[1::2]
            return packed.view(stored.dtype.numpy).reshape(stop - start, *stored.shape[1:])

        parts = {self.name: tiled(LazyTensor(stored.dtype, stored.shape, codes), 2 * size)}
        if not self.nested:
            dtype = self.parts[absmax].dtype
            parts[absmax] = LazyTensor(
                dtype, self.parts[absmax].shape, lambda a, b: self._peaks(weight, a, b).astype(dtype.numpy)
            )
        else:
            parts |= self._nested_parts(weight, self.nested)
        return replace(self, parts={**self.parts, **parts})

    def _nested_parts(self, weight: LazyTensor, nested: NestedScales) -> dict[str, LazyTensor]:
        """The scales of the scales, and the codes of the scales (`quantize_blockwise` of bitsandbytes)."""
        absmax = self.parts[f"{self.name}.absmax"]
        code = self._table(nested.map)
        bounds = (code[:-1] + code[1:]) / 2

        def centered(start: int, stop: int) -> Array:
            """Blocks of scales minus the offset, as rows."""
            first, last = start * nested.block, min(stop * nested.block, absmax.num_rows)
            scales = self._peaks(weight, first, last) - np.float32(nested.offset)
            return np.pad(scales, (0, (stop - start) * nested.block - len(scales))).reshape(-1, nested.block)

        def peaks(start: int, stop: int) -> Array:
            largest: Array = np.abs(centered(start, stop)).max(axis=1)
            return largest

        def codes(start: int, stop: int) -> Array:
            rows = centered(start // nested.block, -(-stop // nested.block))
            rows *= 1 / np.maximum(np.abs(rows).max(axis=1, keepdims=True), TINY)
            numbers = np.searchsorted(bounds, rows.reshape(-1)).astype(np.uint8)  # few: one per block of weights
            return numbers[start % nested.block :][: stop - start]

        return {
            f"{self.name}.absmax": LazyTensor(absmax.dtype, absmax.shape, codes),
            nested.peaks: LazyTensor(BY_NAME["float32"], self.parts[nested.peaks].shape, peaks),
        }

    def _peaks(self, weight: LazyTensor, start: int, stop: int) -> Array:
        """The largest absolute value of blocks `start:stop`, few at a time."""
        step = max(1, TILE_ELEMENTS // self.block)
        peaks = np.empty(stop - start, np.float32)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            np.abs(self._blocks(weight, first, last)).max(axis=1, out=peaks[first - start : last - start])
        return peaks

    def _codes(self, weight: LazyTensor, start: int, stop: int) -> Array:
        """The codes of elements `start:stop`, padded with zeros."""
        code = self.code_values
        order = np.argsort(code, kind="stable").astype(np.uint8)
        bounds = (code[order[:-1]] + code[order[1:]]) / 2
        blocks = self._blocks(weight, start // self.block, -(-min(stop, self.count) // self.block))
        largest = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), TINY)
        # the number of bounds that each value exceeds, uint8; for few bounds fifteen times as fast as `searchsorted`
        values = (blocks * (1 / largest)).reshape(-1)
        count = np.zeros(values.shape, np.uint8)
        for bound in bounds:
            count += values > bound
        numbers = order[count]
        numbers = numbers[start % self.block :][: stop - start]
        return np.pad(numbers, (0, stop - start - len(numbers)))

    def _blocks(self, weight: LazyTensor, start: int, stop: int) -> Array:
        """Elements of blocks `start:stop` as rows, in float32, padded with zeros."""
        first, last = start * self.block, min(stop * self.block, self.count)
        columns = prod(self.shape[1:])
        rows = weight.rows(first // columns, -(-last // columns)).astype(np.float32)
        flat = rows.reshape(-1)[first % columns :][: last - first]
        return np.pad(flat, (0, (stop - start) * self.block - len(flat))).reshape(-1, self.block)

    def _table(self, name: str) -> Array:
        return finite(self.parts[name].read(), name)


def open_four_bit(tensors: Mapping[str, LazyTensor], name: str, state_name: str) -> FourBitWeight:
    """The weight `name`, whose JSON state is in the tensor `state_name`; raises MalformedInput if they do not match."""
    tensor = tensors[state_name]
    if tensor.dtype.name != "uint8" or tensor.nbytes > STATE_BYTES:
        refuse(state_name, f"is {tensor.dtype.name} of {tensor.nbytes} bytes, not a small JSON text in uint8")
    try:
        state = json.loads(tensor.read().tobytes().decode())
    except (ValueError, RecursionError):
        refuse(state_name, "is not valid JSON")
    if not isinstance(state, dict):
        refuse(state_name, "is not a JSON object")
    if state_name.removeprefix(name + STATE) not in KINDS or state.get("quant_type") not in KINDS:
        refuse(state_name, f"is of the type {short(state.get('quant_type'))!r}, neither nf4 nor fp4")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        refuse(state_name, "has a `shape` that is not a matrix")
    block = _block_size(state, "blocksize", state_name)
    codes = part(tensors, name, name)
    if codes.nbytes != -(-prod(shape) // (2 * codes.dtype.itemsize)) * codes.dtype.itemsize:
        refuse(name, f"has {codes.nbytes} bytes, its state says shape {list(shape)} of 4 bits each")
    blocks = -(-prod(shape) // block)
    parts = {name: codes, state_name: tensors[state_name]}
    nested = _nested(state, name, state_name) if "nested_blocksize" in state else None
    wanted = {".absmax": ((blocks,), ("uint8",) if nested else SCALES), ".quant_map": ((16,), ("float32",))}
    if nested:
        wanted[".nested_absmax"] = ((-(-blocks // nested.block),), ("float32",))
        wanted[".nested_quant_map"] = ((256,), ("float32",))
    for end, (size, dtypes) in wanted.items():
        parts[name + end] = require(part(tensors, name + end, name), name + end, size, dtypes)
    return FourBitWeight(name, parts, tuple(shape), block, nested)


def _nested(state: Mapping[str, Any], name: str, source: str) -> NestedScales:
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float) or not -LARGE < offset < LARGE:
        refuse(source, "has a `nested_offset` that is not a number")
    block = _block_size(state, "nested_blocksize", source)
    return NestedScales(f"{name}.nested_absmax", f"{name}.nested_quant_map", float(offset), block)


def _block_size(state: Mapping[str, Any], field_name: str, name: str) -> int:
    size = state.get(field_name)
    if type(size) is not int or size not in BLOCK_SIZES:
        refuse(name, f"has a `{field_name}` of {short(size)}")
    return size


STEP = np.float32(7.874015718698502e-3)  # 1/127, as bitsandbytes writes it


@dataclass(frozen=True, eq=False)
class Int8Rows(PackedWeight):
    """value = code · scale of its row / 127; `scales` is the name of the tensor of scales."""

    scales: str

    def values(self, start: int, stop: int) -> Array:
        scales = finite(self.parts[self.scales].rows(start, stop), self.scales)
        wide = self.parts[self.name].rows(start, stop).astype(np.float32)
        wide *= scales[:, np.newaxis]
        wide *= STEP
        return wide

    @property
    def integers(self) -> IntegerCodes:
        def scales(start: int, stop: int) -> Array:
            stored = finite(self.parts[self.scales].rows(start, stop), self.scales)
            return (bounded(stored, 128, self.name) * STEP)[:, np.newaxis]  # codes come first in `values`

        codes = unsigned(self.parts[self.name])
        return IntegerCodes(self.shape, 8, np.zeros(self.shape[1], np.int64), codes.rows, scales, None, FLOAT32)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; a row's scale is its largest absolute value."""

        def codes(start: int, stop: int) -> Array:
            largest = peaks_of(weight, start, stop)
            steps = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            return np.rint(weight.rows(start, stop).astype(np.float32) * steps[:, np.newaxis]).astype(np.int8)

        stored, columns = self.parts[self.name], self.shape[1]
        parts = {
            self.name: tiled(LazyTensor(stored.dtype, stored.shape, codes), columns),
            self.scales: tiled(LazyTensor(FLOAT32, stored.shape[:1], partial(peaks_of, weight)), columns),
        }
        return replace(self, parts={**self.parts, **parts})


def open_int8(tensors: Mapping[str, LazyTensor], name: str) -> Int8Rows:
    """The weight `name`; MalformedInput for its scales, UnsupportedInput for codes in a GPU kernel's order."""
    stem = name.removesuffix("weight")
    codes, scales = tensors[name], part(tensors, f"{stem}SCB", name)
    if len(codes.shape) != 2:
        refuse(name, f"is int8 of shape {list(codes.shape)}, not a matrix")
    parts = {name: codes, f"{stem}SCB": require(scales, f"{stem}SCB", codes.shape[:1], ("float32",))}
    order = f"{stem}weight_format"
    if order in tensors:
        parts[order] = require(tensors[order], order, tensors[order].shape[:1] and (1,), ("uint8",))
        if parts[order].read().any():
            problem = f"`{name}` is int8 in the order of one kind of GPU"
            raise UnsupportedInput(problem, hint="load and save it with bitsandbytes 0.43 or later, which stores rows")
    return Int8Rows(name, parts, codes.shape, f"{stem}SCB")
