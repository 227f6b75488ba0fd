"""GroupedWeight: low-bit integers in int32 words, with a scale and a zero point per group of inputs and per output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np

from llmconv.files.safetensors_file import FileTensor
from llmconv.quantized_weights.integer_codes import IntegerCodes
from llmconv.quantized_weights.packed_weight import PackedWeight, bounded, finite, tiled
from llmconv.tensors import Array, LazyTensor
from llmconv.transpose import transposed


@dataclass(frozen=True)
class Packing:
    """The layout of codes in the words of a weight.

    Attributes:
        outputs: number of outputs per row of words, after transposing.
        unpack: words (rows×columns) to codes (rows·outputs×inputs), uint8.
        pack: the reverse.
        inputs_first: the file has inputs in rows, so the words are transposed.
    """

    outputs: int
    unpack: Callable[[Array], Array]
    pack: Callable[[Array], Array]
    inputs_first: bool = True

    def by_outputs(self, words: LazyTensor) -> LazyTensor:
        """The words in the file transposed to outputs in rows, or the reverse."""
        return transposed(words) if self.inputs_first else words


@dataclass(frozen=True, eq=False)
class GroupedWeight(PackedWeight):
    """value = (code - zero point of its group) · scale of its group.

    Attributes:
        words: name of the tensor of codes.
        scales: name of the tensor of scales.
        read_scales, read_zeros: read scales and zero points as stored, both out×groups; no zero points if all are the
            middle code.
        groups: the group of every input.
        packing: layout of the codes in the words.
        levels: number of values of a code.
    """

    words: str
    scales: str
    read_scales: Callable[[], Array]
    read_zeros: Callable[[], Array] | None
    groups: Array
    packing: Packing
    levels: int
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
        """See `PackedWeight`."""
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
