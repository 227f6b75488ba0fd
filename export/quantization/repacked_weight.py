"""RepackedWeight: integer codes of a checkpoint in the layout of onnxruntime's operators; no value changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from llmconv.export.quantization.block_format import BITS, BlockFormat
from llmconv.export.quantization.block_rounding import pack
from llmconv.export.quantization.quantized_tensor import CODES, ORDER, SCALES, ZEROS
from llmconv.export.quantization.stored_scales import require_kept, squares_lost, stored_scales
from llmconv.files.safetensors_file import FileTensor
from llmconv.quantized_weights.packed_weight import IntegerCodes, tiled
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, in_memory


@dataclass(frozen=True, eq=False)
class RepackedWeight:
    """A weight of a quantized checkpoint: its codes as stored, and its layout in the new file.

    `order` int32 [K] is the stored column of each column of codes, None where they are in their own order. If
    `symmetric`, all zero points are the middle code.
    """

    integers: IntegerCodes
    form: BlockFormat
    order: Array | None

    @property
    def transposed(self) -> bool:
        """Whether the model's weight is [K, N]."""
        return self.integers.turned

    def tensors(self, name: str, scale_dtype: DType | None = None) -> dict[str, LazyTensor]:
        """Codes, zero points, scales (None: as stored) and column order by name, as in `QuantizedTensor.tensors`."""
        outer, form = self.integers.shape[:-1], self.form
        columns, dtype = self.integers.shape[-1], scale_dtype or self.integers.scale_dtype
        blocks = form.blocks(columns)
        codes = LazyTensor(BY_NAME["uint8"], (*outer, blocks, form.block_bytes), self._codes)
        made = {CODES: tiled(codes, prod(self.integers.shape[1:]))}
        if not form.symmetric:
            made[ZEROS] = LazyTensor(BY_NAME["uint8"], (*outer, form.zero_bytes(columns)), self._zeros)

        def scales(start: int, stop: int) -> Array:
            if start == 0 and dtype != self.integers.scale_dtype:
                whole = self.integers.scales(0, outer[0])
                require_kept(squares_lost(whole, stored_scales(whole, dtype, name, kept=True)), dtype, name, kept=True)
            return stored_scales(self.integers.scales(start, stop)[..., self._block_groups], dtype, name, kept=True)

        made[SCALES] = LazyTensor(dtype, (*outer, blocks), scales)
        if self.order is not None:
            made[ORDER] = in_memory(self.order, BY_NAME["int32"])
        return {name + suffix: tensor for suffix, tensor in made.items()}

    def in_file(self, name: str) -> dict[str, FileTensor] | None:
        """The same tensors over the checkpoint's own bytes; None if those differ.

        Raises:
            MalformedInput: scales that are not finite, or so large that values are not.
        """
        known, form = self.integers.in_file, self.form
        rows, columns = self.integers.shape[-2:]
        fits = form.bits == self.integers.bits and columns % form.size == 0 and self.order is None
        if not known or not fits or known[1].shape[-1] != form.blocks(columns):
            return None
        self.integers.scales(0, rows)  # graphs map them unread
        shape = rows, form.blocks(columns), form.block_bytes
        codes = FileTensor(known[0].path, known[0].offset, BY_NAME["uint8"], shape, known[0].record)
        return {name + CODES: codes, name + SCALES: known[1]}

    @property
    def _block_groups(self) -> Array:
        """The group of each block."""
        return self._sorted_groups[:: self.form.size]

    @property
    def _sorted_groups(self) -> Array:
        groups = self.integers.groups
        return groups if self.order is None else groups[self.order]

    def _codes(self, start: int, stop: int) -> Array:
        codes, form = self.integers.codes(start, stop), self.form
        if self.order is not None:
            codes = codes[..., self.order]
        padding = -codes.shape[-1] % form.size
        padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
        return pack(padded.reshape(-1, form.size), form.bits).reshape(*codes.shape[:-1], -1, form.block_bytes)

    def _zeros(self, start: int, stop: int) -> Array:
        return np.ascontiguousarray(pack(zero_points(self.integers)[start:stop][:, self._block_groups], self.form.bits))


def repacked(integers: IntegerCodes) -> RepackedWeight | None:
    """The codes in blocks, or None if onnxruntime has no operator for groups like these."""
    order = None if (np.diff(integers.groups) >= 0).all() else np.argsort(integers.groups, kind="stable")
    if not integers.has_operator or (size := integers.block_size) is None:
        return None
    bits = next(bits for bits in BITS if bits >= integers.bits)
    middle = 1 << (bits - 1)
    symmetric = bits == integers.bits and (integers.zeros is None or bool((zero_points(integers) == middle).all()))
    form = BlockFormat(bits, size, symmetric, search=False)
    return RepackedWeight(integers, form, None if order is None else order.astype(np.int32))


def zero_points(integers: IntegerCodes) -> Array:
    """All zero points, uint8 [N, groups]."""
    if integers.zeros is None:
        return np.full((integers.shape[-2], int(integers.groups.max()) + 1), 1 << (integers.bits - 1), np.uint8)
    return integers.zeros()
