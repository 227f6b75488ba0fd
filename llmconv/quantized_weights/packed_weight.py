"""PackedWeight: one quantized weight of a checkpoint: its tensors in the files, and its plain values.

A GroupedWeight has low-bit integers in int32 words, with a scale and a zero point per group of inputs and per output; a
ScaledWeight float8 or int8 codes with a scale per block, of which those at the edges may be partial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import prod
from threading import Lock
from typing import Any, NoReturn, Self

import numpy as np

from llmconv.checkpoint import transposed
from llmconv.errors import MalformedInput, short
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor

FLOAT32 = BY_NAME["float32"]
INFINITE = "has scales so large that its values are infinite"
TILE_ELEMENTS = 1 << 18  # values computed at once: a megabyte in float32, which fits into the cache


@dataclass(frozen=True, eq=False)
class PackedWeight(ABC):
    """A weight that is stored as codes with scales, and possibly zero points or tables."""

    name: str  # name of the plain weight
    parts: Mapping[str, LazyTensor]  # its tensors in the files, by name
    shape: tuple[int, ...]  # of the plain weight

    @abstractmethod
    def values(self, start: int, stop: int) -> Array:
        """Rows `start:stop` of the plain weight in float32, of shape `(stop - start, *shape[1:])`.

        The arithmetic is that of the library that wrote the files, in float32, without its final rounding.
        """

    @abstractmethod
    def requantized(self, weight: LazyTensor) -> Self:
        """Another weight of the same shape in the same format: parts with the same names, dtypes and shapes."""

    @property
    def integers(self) -> IntegerCodes | None:
        """The stored codes if they are integers with scales; None for codes of another kind."""
        return None

    @property
    def plain(self) -> LazyTensor:
        """The values as a lazy float32 tensor, computed by tiles."""
        return tiled(LazyTensor(FLOAT32, self.shape, self._finite_values), prod(self.shape[1:]))

    def _finite_values(self, start: int, stop: int) -> Array:
        try:
            with np.errstate(over="raise"):
                return self.values(start, stop)
        except FloatingPointError:
            refuse(self.name, INFINITE)


def with_recent_rows(tensor: LazyTensor) -> LazyTensor:
    """A computed tensor that caches its last small ranges of rows, which must not be changed."""

    def load(start: int, stop: int) -> Array:
        small = (stop - start) * prod(tensor.shape[1:]) <= TILE_ELEMENTS
        return _remember(tensor, start, stop) if small else tensor.rows(start, stop)

    return LazyTensor(tensor.dtype, tensor.shape, load)


@lru_cache(maxsize=32)
def _remember(tensor: LazyTensor, start: int, stop: int) -> Array:
    return tensor.rows(start, stop)


def tiled(tensor: LazyTensor, columns: int) -> LazyTensor:
    """The same computed tensor, computed few rows at a time; one row is computed from `columns` values."""
    step = max(1, TILE_ELEMENTS // max(1, columns))

    def load(start: int, stop: int) -> Array:
        result = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype.numpy)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            result[first - start : last - start] = tensor.rows(first, last)
        return result

    return LazyTensor(tensor.dtype, tensor.shape, load)


def peaks_of(weight: LazyTensor, start: int, stop: int) -> Array:
    """The largest absolute value of each of the rows `start:stop` of a weight [rows, columns], float32."""
    rows = np.abs(weight.rows(start, stop).reshape(stop - start, -1))
    largest: Array = rows.max(axis=1, initial=0)
    return largest.astype(np.float32)


def as_bytes(tensor: LazyTensor) -> LazyTensor:
    """The data of a tensor of any dtype and shape as one-dimensional uint8."""
    uint8 = BY_NAME["uint8"]
    if isinstance(tensor, FileTensor):
        return FileTensor(tensor.path, tensor.offset, uint8, (tensor.nbytes,), tensor.record)
    size = max(1, tensor.nbytes // max(1, tensor.num_rows))

    def load(start: int, stop: int) -> Array:
        rows = tensor.rows(start // size, -(-stop // size)).reshape(-1).view(np.uint8)
        return rows[start % size :][: stop - start]

    return LazyTensor(uint8, (tensor.nbytes,), load)


def unsigned(tensor: LazyTensor) -> LazyTensor:
    def load(start: int, stop: int) -> Array:
        return tensor.rows(start, stop).view(np.uint8) ^ np.uint8(128)

    return LazyTensor(BY_NAME["uint8"], tensor.shape, load)


def finite(scales: Array, name: str) -> Array:
    """Scales in float32; raises MalformedInput for a value that is not finite."""
    wide = scales.astype(np.float32)
    if not np.isfinite(wide).all():
        refuse(name, "has a scale that is not finite")
    return wide


def bounded(scales: Array, largest: int, name: str) -> Array:
    """Finite scales float32, as they are; raises MalformedInput if their product with `largest` is not finite."""
    with np.errstate(over="ignore"):
        reach = np.abs(scales).max(initial=0) * np.float32(largest)
    if not np.isfinite(reach):
        refuse(name, INFINITE)
    return scales


def require_middle(zeros: Array, middle: int, name: str) -> Array:
    """Zero points of a symmetric weight, as they are; raises MalformedInput for any but `middle`."""
    if (zeros != middle).any():
        refuse(name, f"has zero points other than {middle}, and the `quantization_config` says they are symmetric")
    return zeros


def require(tensor: LazyTensor, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> LazyTensor:
    """`tensor`, a part of a quantized weight; raises MalformedInput for another shape, or none of `dtypes`."""
    if tensor.dtype.name not in dtypes:
        refuse(name, f"is stored as {tensor.dtype.name}, not as {' or '.join(dtypes)}")
    if tensor.shape != shape:
        refuse(name, f"has a shape mismatch: expected {list(shape)}, got {list(tensor.shape)}")
    return tensor


def part(tensors: Mapping[str, LazyTensor], name: str, of: str) -> LazyTensor:
    """The tensor `name`, a part of the weight `of`; raises MalformedInput if it is missing."""
    if name not in tensors:
        refuse(of, f"is quantized, with the missing key `{name}`")
    return tensors[name]


def refuse(name: str, problem: str) -> NoReturn:
    """Raises MalformedInput about one tensor of a quantized model."""
    hint = "the model is damaged, or not quantized as its `quantization_config` says; copy or download it again"
    raise MalformedInput(f"`{name}` {problem}", hint=hint)


def refuse_strays(names: Iterable[str], ends: str | tuple[str, ...], weights: Mapping[str, PackedWeight]) -> None:
    """Refuses names that end as parts of a quantized weight do, and that belong to none of the `weights`."""
    known = {part for weight in weights.values() for part in weight.parts}
    for name in names:
        if name.endswith(ends) and name not in known and f"{name.rpartition('.')[0]}.weight" not in weights:
            refuse(name, "does not belong to a quantized weight")


MOST_BITS = 8  # of a code of onnxruntime's products
# blocks of onnxruntime's products; in larger ones activations would be rounded to int8 too coarsely
SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class IntegerCodes:
    """value = (code - zero point of its group) * scale of its group + offset of its group."""

    shape: tuple[int, ...]  # [N, K], or [experts, N, K]; columns of K share a scale in groups
    bits: int  # of a code
    groups: Array  # int64 [K], the group of each column
    # `codes(start, stop)` returns those of rows `start:stop` of the first axis, uint8 [rows, …, K]
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]  # `scales(start, stop)` returns theirs, [rows, …, groups], finite
    # `zeros()` returns all zero points, uint8 [N, groups]; None if all are the middle code
    zeros: Callable[[], Array] | None
    scale_dtype: DType  # element type of the scales
    turned: bool = False  # the plain weight is [..., K, N]
    # the tensors with the codes and scales if their bytes are these codes, the first in the low bits, and these scales
    in_file: tuple[FileTensor, FileTensor] | None = None
    # `offsets()` returns all offsets, float32 [N, groups]; None for none
    offsets: Callable[[], Array] | None = None

    @property
    def block_size(self) -> int | None:
        """The largest block, columns sorted by group, that onnxruntime has a product for; else None.

        With offsets, which are multiplied by the sums of blocks, all blocks are whole.
        """
        groups = np.sort(self.groups)
        for size in SIZES:
            if self.offsets and len(groups) % size:
                continue
            blocks = np.pad(groups, (0, -len(groups) % size), mode="edge").reshape(-1, size)
            if (blocks == blocks[:, :1]).all():
                return size
        return None

    @property
    def has_operator(self) -> bool:
        """Whether onnxruntime has a product for codes like these."""
        return self.bits <= MOST_BITS and self.block_size is not None


@dataclass(frozen=True)
class Packing:
    """The layout of codes in the words of a weight."""

    outputs: int  # number of outputs per row of words, after transposing
    unpack: Callable[[Array], Array]  # words (rows×columns) to codes (rows·outputs×inputs), uint8
    pack: Callable[[Array], Array]  # the reverse
    inputs_first: bool = True  # the file has inputs in rows, so the words are transposed

    def by_outputs(self, words: LazyTensor) -> LazyTensor:
        """The words in the file transposed to outputs in rows, or the reverse."""
        return transposed(words) if self.inputs_first else words


@dataclass(frozen=True, eq=False)
class GroupedWeight(PackedWeight):
    """value = (code - zero point of its group) · scale of its group.

    `words` and `scales` are names of the tensors; `read_scales` and `read_zeros` read them as stored, both out×groups;
    no zero points if all are the middle code.
    """

    words: str
    scales: str
    read_scales: Callable[[], Array]
    read_zeros: Callable[[], Array] | None
    groups: Array  # the group of every input
    packing: Packing  # layout of the codes in the words
    levels: int  # number of values of a code

    @cached_property
    def by_rows(self) -> LazyTensor:
        return self.packing.by_outputs(self.parts[self.words])

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; exact where scales are of 16 bits."""
        scales, zeros = self._spread(start, stop)
        wide = self.codes(start, stop).astype(np.float32)
        wide -= zeros
        wide *= scales
        return wide

    def codes(self, start: int, stop: int) -> Array:
        """The codes of rows `start:stop`, uint8 [rows, inputs]."""
        size = self.packing.outputs
        codes = self.packing.unpack(self.by_rows.rows(start // size, -(-stop // size)))
        return codes[start % size :][: stop - start, : self.shape[1]]

    @property
    def integers(self) -> IntegerCodes:
        words, scales = self.parts[self.words], self.parts[self.scales]
        bits = self.levels.bit_length() - 1
        is_exact = words.nbytes * 8 == self.shape[0] * self.shape[1] * bits  # without padding
        plain = not self.packing.inputs_first and self.read_zeros is None and is_exact
        in_file = (words, scales) if isinstance(words, FileTensor) and isinstance(scales, FileTensor) else None
        return IntegerCodes(
            self.shape,
            bits,
            self.groups,
            self.codes,
            lambda start, stop: bounded(self._finite_scales(start, stop), self.levels - 1, self.name),
            self.read_zeros,
            scales.dtype,
            in_file=in_file if plain else None,
        )

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`; scales and zero points stay, so values change by whole steps."""
        words, size = self.parts[self.words], self.packing.outputs

        def load(start: int, stop: int) -> Array:
            first, last = start * size, min(stop * size, self.shape[0])
            scales, zeros = self._spread(first, last)
            rows = weight.rows(first, last).astype(np.float32)
            steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0)
            codes = np.clip(np.rint(steps + zeros), 0, self.levels - 1).astype(np.uint8)
            return self.packing.pack(codes)

        by_rows = tiled(LazyTensor(words.dtype, self.by_rows.shape, load), size * self.shape[1])
        new = replace(self, parts={**self.parts, self.words: self.packing.by_outputs(by_rows)})
        object.__setattr__(new, "by_rows", by_rows)  # without transposing twice
        return new

    def _spread(self, start: int, stop: int) -> tuple[Array, Array]:
        """Scale and zero point of every element of rows `start:stop`, float32."""
        scales = np.take(self._finite_scales(start, stop), self.groups, axis=1)
        if self.read_zeros is None:
            return scales, np.full_like(scales, self.levels // 2)
        return scales, np.take(_grid(self.read_zeros)[start:stop], self.groups, axis=1).astype(np.float32)

    def _finite_scales(self, start: int, stop: int) -> Array:
        return finite(_grid(self.read_scales)[start:stop], self.scales)


@lru_cache(maxsize=8)
def _grid(read: Callable[[], Array]) -> Array:
    """Scales or zero points of one weight; those of the last few are cached."""
    return read()


WHOLE_ROW = -1  # the `group_size` of one group per row


def group_size(config: Mapping[str, Any], *names: str) -> int | None:
    """The number of columns in a group, `WHOLE_ROW`, or None if it is not given in a `quantization_config`.

    Of the fields `names`, the first that is given counts. Raises MalformedInput unless it is a positive integer or -1.
    """
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    size = config[name]
    if type(size) is not int or (size < 1 and size != WHOLE_ROW):
        hint = "it is a positive number such as 128, or -1 for one group per row; repair the `config.json`"
        raise MalformedInput(f"the model's `{name}` is {short(size, 80)}", hint=hint)
    return size


def require_count(name: str, columns: int, count: int, size: int | None) -> None:
    """Raises MalformedInput unless the number of groups follows from their size.

    `columns` are those of the weight; `count` groups have a scale; `size`, from `group_size`, is None if unknown.
    """
    if size is None:
        return
    wanted = 1 if size == WHOLE_ROW else -(-columns // size)
    if count != wanted:
        groups = "one group" if size == WHOLE_ROW else f"groups of {short(size, 20)}"
        refuse(name, f"has scales of {count} groups, and {columns} columns in {groups} need {wanted}")


def groups_in_order(name: str, columns: int, count: int, size: int | None) -> Array:
    """int64 [columns]: each column's group, the last perhaps partial; MalformedInput as `require_count`."""
    if size is None and count > 1:
        refuse(name, f"has scales of {count} groups, and the `quantization_config` has no `group_size`")
    require_count(name, columns, count, size)
    return np.arange(columns) // (min(size, columns) if size and size > 0 else columns)


WIDTHS = (2, 3, 4, 8)


def unpack(words: Array, bits: int) -> Array:
    """The numbers of `bits` bits in `words`, int32 rows×(columns·bits/32), as uint8 rows×columns."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 3:
        digits = np.unpackbits(raw, axis=1, bitorder="little")
        digits = digits[:, : digits.shape[1] // 3 * 3].reshape(len(raw), -1, 3)
        return digits[..., 0] | digits[..., 1] << 1 | digits[..., 2] << 2
    per_byte = 8 // bits
    numbers = np.empty((*raw.shape, per_byte), np.uint8)
    for place in range(per_byte):
        np.right_shift(raw, place * bits, out=numbers[..., place])
    numbers &= (1 << bits) - 1
    return numbers.reshape(len(raw), -1)


def pack(numbers: Array, bits: int, width: int) -> Array:
    """The reverse of `unpack`: int32 rows×`width` words, padded with zeros, from uint8 rows×columns."""
    full = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32)))
    if bits == 3:
        digits = np.unpackbits(full[..., np.newaxis], axis=2, count=3, bitorder="little")
        raw = np.packbits(digits.reshape(len(full), -1), axis=1, bitorder="little")
    else:
        grouped = full.reshape(len(full), -1, 8 // bits)
        raw = np.zeros(grouped.shape[:2], np.uint8)
        for place in range(8 // bits):
            raw |= grouped[..., place] << (place * bits)
    return np.ascontiguousarray(raw.view("<i4")[:, :width])


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}  # the largest absolute value of the codes
EXPONENTS = ("uint8", "float8_e8m0fnu")  # dtypes of scales that are stored as exponents of two
SCALES = ("float32", "bfloat16", "float16", *EXPONENTS)
NORMAL = 0x3C800000  # the bits in float32 of the smallest normal float8_e4m3fn, 2^-6
EXPONENT_BIAS = 127  # bias of scales that are stored as exponents of two (OCP Microscaling, E8M0)


@dataclass(frozen=True, eq=False)
class ScaledWeight(PackedWeight):
    """value = code · scale of its block of `block` (rows, columns); codes have the weight's shape."""

    codes: str
    scales: str
    block: tuple[int, int]

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix."""
        return -(-self.shape[-2] // self.block[0]), -(-self.shape[-1] // self.block[1])

    def values(self, start: int, stop: int) -> Array:
        """See `PackedWeight`; a tensor of experts is a stack of matrices."""
        codes = self.parts[self.codes].rows(start, stop)
        table = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)  # of every code
        wide = table[codes.view(np.uint8)].reshape(-1, self.shape[-1])
        height = prod(self.shape[1:-1])
        wide *= self._spread(self.grid, start * height, stop * height)
        return wide.reshape(codes.shape)

    @property
    def integers(self) -> IntegerCodes | None:
        """See `PackedWeight`; None for float8."""
        codes = self.parts[self.codes]
        if codes.dtype.name != "int8" or len(self.shape) != 2:
            return None

        def scales(start: int, stop: int) -> Array:
            return bounded(self.grid[np.arange(start, stop) // self.block[0]], 128, self.name)

        groups = np.arange(self.shape[1]) // self.block[1]
        return IntegerCodes(self.shape, 8, groups, unsigned(codes).rows, scales, None, FLOAT32)

    def requantized(self, weight: LazyTensor) -> Self:
        """See `PackedWeight`. A block keeps its scale where its largest value fits and uses half of the range."""
        scales, codes = self.parts[self.scales], self.parts[self.codes]
        lock = Lock()

        @cache
        def computed_grid() -> Array:
            dtype, old, codes = self.parts[self.scales].dtype, self.grid, self.parts[self.codes].dtype.name
            largest = LARGEST[codes]
            peaks = self._peaks(weight)
            reach = largest + 1 if codes == "int8" else largest  # -128 is a code, too
            fits = (peaks <= old * reach) & (peaks > old * largest / 2) | (peaks == 0)
            new = np.where(fits, old, peaks / np.float32(largest))
            return _decoded(_encoded(new, dtype), dtype, self.scales)

        def grid() -> Array:
            with lock:  # one pass over the weight, for the thread that comes first
                return computed_grid()

        def new_codes(start: int, stop: int) -> Array:
            height = prod(self.shape[1:-1])
            rows = weight.rows(start, stop).astype(np.float32)
            flat = rows.reshape(-1, self.shape[-1])
            flat /= self._spread(grid(), start * height, stop * height)
            return _rounded(flat, codes.dtype).reshape(rows.shape)

        def new_scales(start: int, stop: int) -> Array:
            return _encoded(grid(), scales.dtype).reshape(scales.shape or (1,))[start:stop]

        parts = {
            self.codes: tiled(LazyTensor(codes.dtype, codes.shape, new_codes), prod(codes.shape[1:])),
            self.scales: LazyTensor(scales.dtype, scales.shape, new_scales),
        }
        return replace(self, parts={**self.parts, **parts})

    def _spread(self, grid: Array, start: int, stop: int) -> Array:
        """The scale of every element of rows `start:stop`, counted over all matrices."""
        rows = np.arange(start, stop)
        cells = rows // self.shape[-2] * self.cells[0] + rows % self.shape[-2] // self.block[0]
        return np.repeat(grid[cells], self.block[1], axis=1)[:, : self.shape[-1]]

    @cached_property
    def grid(self) -> Array:
        """Scales in float32: a row of `cells` below the other, of all matrices."""
        scales = self.parts[self.scales]
        return _decoded(scales.read(), scales.dtype, self.scales).reshape(-1, self.cells[1])

    def _peaks(self, weight: LazyTensor) -> Array:
        """The largest absolute value of every block."""
        peaks = np.zeros_like(self.grid)
        height, columns = prod(self.shape[1:-1]), self.shape[-1]
        edges = np.arange(0, columns, self.block[1])
        for start, stop in weight.blocks(TILE_ELEMENTS * weight.dtype.itemsize):
            rows = np.abs(weight.rows(start, stop).reshape(-1, columns)).astype(np.float32)
            by_row = np.maximum.reduceat(rows, edges, axis=1)
            index = np.arange(start * height, stop * height)
            cells = index // self.shape[-2] * self.cells[0] + index % self.shape[-2] // self.block[0]
            firsts = np.flatnonzero(np.diff(cells, prepend=-1))
            largest = np.maximum.reduceat(by_row, firsts, axis=0)
            peaks[cells[firsts]] = np.maximum(peaks[cells[firsts]], largest)
        return peaks


def _rounded(values: Array, dtype: DType) -> Array:
    """float32 values as codes, to nearest even, within the range."""
    limit = LARGEST[dtype.name]
    if dtype.name == "float8_e4m3fn":
        return float8(np.clip(values, -limit, limit)).view(dtype.numpy)
    limits = (-limit, limit)
    if dtype.name == "int8":
        values, limits = np.rint(values), (-limit - 1, limit)
    clipped: Array = np.clip(values, *limits)
    return clipped.astype(dtype.numpy)


def float8(values: Array) -> Array:
    """float32 up to 448 as bits of float8_e4m3fn, to nearest even, by integers: numpy then releases the lock."""
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    small = np.rint(np.abs(values) * np.float32(512)).astype(np.uint32)  # subnormal: multiples of 2^-9
    normal = (size + (size >> 20 & 1) + np.uint32(0x7FFFF) >> 20) - np.uint32(120 << 3)  # the exponent's bias: 127 to 7
    codes: Array = np.where(size < NORMAL, small, normal) | (bits >> 24 & 0x80)
    return codes.astype(np.uint8)


def _decoded(scales: Array, dtype: DType, name: str) -> Array:
    if dtype.name == "uint8":
        with np.errstate(over="ignore"):
            scales = np.exp2(scales.astype(np.float32) - np.float32(EXPONENT_BIAS))
    return finite(scales, name)


def _encoded(scales: Array, dtype: DType) -> Array:
    """Scales in the stored dtype; exponents are rounded up, so that the largest value fits."""
    if dtype.name in EXPONENTS:
        exponents = np.ceil(np.log2(np.maximum(scales, np.finfo(np.float32).tiny))) + EXPONENT_BIAS
        fitting: Array = np.clip(exponents, 0, 254)
        return fitting.astype(np.uint8).view(dtype.numpy)
    return scales.astype(dtype.numpy)


def open_scaled(
    tensors: Mapping[str, LazyTensor], name: str, scales: str, block: tuple[int, int] | None
) -> ScaledWeight:
    """The weight of codes `name` with one scale, one per row or per `block` (rows, columns); MalformedInput."""
    codes, grid = tensors[name], part(tensors, scales, name)
    if codes.dtype.name not in LARGEST or len(codes.shape) not in (2, 3):
        refuse(name, f"has scales, but is stored as {codes.dtype.name} of shape {list(codes.shape)}")
    if grid.dtype.name not in SCALES:
        refuse(scales, f"is stored as {grid.dtype.name}, which is not supported for scales")
    shape = codes.shape
    found = _block_of(shape, grid.shape, block)
    if found is None or 0 in shape:
        of_block = f" in blocks of {list(block)}" if block else ""
        refuse(scales, f"has shape {list(grid.shape)}, which fits no weight of shape {list(shape)}{of_block}")
    inside = min(found[0], shape[-2]), min(found[1], shape[-1])
    return ScaledWeight(name, {name: codes, scales: grid}, shape, name, scales, inside)


def _block_of(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns per scale, or None for mismatched shapes."""
    stack, (rows, columns) = shape[:-2], shape[-2:]
    if block and grid == (*stack, -(-rows // block[0]), -(-columns // block[1])):
        return block
    if prod(grid) == prod(stack) and len(grid) <= len(shape):
        return rows, columns
    if grid in ((*stack, rows), (*stack, rows, 1)):
        return 1, columns
    return None


def block_size(given: Any) -> tuple[int, int] | None:
    """`weight_block_size` or `block_structure` as (rows, columns), both positive; else raises MalformedInput."""
    if given is None:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(type(n) is int and n > 0 for n in given):
        problem = f"the model's `weight_block_size` is {short(given, 80)}"
        raise MalformedInput(problem, hint="it is a pair of numbers such as [128, 128]; repair the `config.json`")
    return given[0], given[1]
