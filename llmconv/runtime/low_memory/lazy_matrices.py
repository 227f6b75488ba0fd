"""LazyMatrices: embedding tables and output heads that are read by rows, never as a whole.

A vocabulary of 128k tokens times a width of 4096 is 4 GB in float64. Such a matrix stays on the meta device: a lookup
reads the rows of its tokens, and a product reads one block of rows after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llmconv.runtime.eager.stored_tensors import StoredTensor

BLOCK = 1 << 21
"""Maximum number of elements of a matrix that is read at a time."""

CONVERTED = 1 << 20
"""Elements of a matrix that are converted at a time: a block that stays in the processor's cache."""


class LazyMatrices(TorchFunctionMode):
    """While active, `embedding` and `linear` read only the required rows of lazy matrices.

    `linear` also accepts a matrix in another dtype than its input, such as weights as they are stored: blocks of its
    rows are converted, so that no converted copy of the matrix is in memory.

    Args:
        matrices: the stored tensors by the id of the meta parameter that represents them.
        multiply: computes `linear` for the lazy matrix with that id, an input and a bias.
    """

    def __init__(
        self,
        matrices: Mapping[int, StoredTensor],
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor],
    ) -> None:
        super().__init__()
        self._matrices, self._multiply = matrices, multiply

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding and id(args[1]) in self._matrices:
            return self._look_up(args[0], args[1])
        if func is functional.linear and id(args[1]) in self._matrices:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self._multiply(id(args[1]), args[0], bias)
        if func is functional.linear and args[0].dtype is not args[1].dtype:
            return linear_by_blocks(*args, **kwargs)
        return func(*args, **kwargs)

    def _look_up(self, ids: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        stored = self._matrices[id(parameter)]
        tokens, indices = torch.unique(ids, return_inverse=True)
        rows = torch.cat([stored.rows(token, token + 1) for token in tokens.tolist()])
        return functional.embedding(indices, rows.to(parameter.dtype))


def linear_by_blocks(value: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` in the input's dtype with a matrix in another.

    Args:
        value: [..., columns].
        matrix: [rows, columns]; its values are exact in the dtype of `value`.
        bias: [rows], or None.
    """
    if matrix.dtype is value.dtype:
        return functional.linear(value, matrix, bias)
    rows, columns = matrix.shape
    step = max(1, CONVERTED // columns)
    flat = value.reshape(-1, columns)
    result = flat.new_empty((len(flat), rows))
    block = flat.new_empty((min(step, rows), columns))
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        converted = block[: len(part)].copy_(part)
        result[:, start : start + step] = functional.linear(flat, converted)
    if bias is not None:
        result += bias.to(value.dtype)
    return result.reshape(*value.shape[:-1], rows)


def product_by_rows(
    stored: StoredTensor, dtype: torch.dtype, inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> list[torch.Tensor]:
    """`linear(input, matrix, bias)` for several inputs; the matrix is read once.

    Args:
        stored: the matrix, [rows, columns].
        dtype: dtype of the computation and of the results.
        inputs: pairs of an input [..., columns] and a bias [rows] or None.

    Returns:
        One tensor [..., rows] per input.
    """
    rows, columns = stored.shape
    step = max(1, BLOCK // columns)
    values = [value.to(dtype) for value, _ in inputs]
    together = rows > step  # one product for all inputs; small ones keep the bits of a product of their own
    if together:
        values = [torch.cat([value.reshape(-1, columns) for value in values])]
    results = [value.new_empty((*value.shape[:-1], rows)) for value in values]
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        matrix = stored.rows(block.start, block.stop) if together else stored[...]
        for result, value in zip(results, values, strict=True):
            result[..., block] = linear_by_blocks(value, matrix)
    if together:
        counts = [value[..., 0].numel() for value, _ in inputs]
        shapes = [(*value.shape[:-1], rows) for value, _ in inputs]
        results = [part.reshape(shape) for part, shape in zip(torch.split(results[0], counts), shapes, strict=True)]
    biased = zip(results, inputs, strict=True)
    return [result if bias is None else result + bias.to(dtype) for result, (_, bias) in biased]
