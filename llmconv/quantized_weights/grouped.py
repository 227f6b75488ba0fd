"""GroupedWeight: low-bit integers in int32 words, with a scale and a zero point per group of inputs and per output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import FileTensor
from llmconv.quantized_weights.packed_weight import IntegerCodes, PackedWeight, bounded, finite, refuse, tiled
from llmconv.tensors import Array, LazyTensor
from llmconv.transpose import transposed


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

    Attributes:
        words, scales: names of the tensors of codes and of scales.
        read_scales, read_zeros: read scales and zero points as stored, both out×groups; no zero points if all are the
            middle code.
    """

    words: str
    scales: str
    read_scales: Callable[[], Array]
    read_zeros: Callable[[], Array] | None
    groups: Array  # the group of every input
    packing: Packing  # layout of the codes in the words
    levels: int  # number of values of a code
    by_rows: LazyTensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_rows", self.packing.by_outputs(self.parts[self.words]))

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
        plain = not self.packing.inputs_first and self.read_zeros is None and words.nbytes * 8 == self._exact_bits
        in_file = (words, scales) if isinstance(words, FileTensor) and isinstance(scales, FileTensor) else None
        return IntegerCodes(
            self.shape,
            self.levels.bit_length() - 1,
            self.groups,
            self.codes,
            lambda start, stop: bounded(self._finite_scales(start, stop), self.levels - 1, self.name),
            self.read_zeros,
            scales.dtype,
            in_file=in_file if plain else None,
        )

    @property
    def _exact_bits(self) -> int:
        """Bits of the codes without padding."""
        return self.shape[0] * self.shape[1] * (self.levels.bit_length() - 1)

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
        raise MalformedInput(
            f"the model's `{name}` is {str(size)[:80]}",
            hint="it is a positive number such as 128, or -1 for one group per row; repair the `config.json`",
        )
    return size


def require_count(name: str, columns: int, count: int, size: int | None) -> None:
    """Raises MalformedInput unless the number of groups follows from their size.

    `columns` are those of the weight; `count` groups have a scale; `size`, from `group_size`, is None if unknown.
    """
    if size is None:
        return
    wanted = 1 if size == WHOLE_ROW else -(-columns // size)
    if count != wanted:
        groups = "one group" if size == WHOLE_ROW else f"groups of {str(size)[:20]}"
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
