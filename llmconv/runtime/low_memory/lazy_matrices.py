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

BLOCK = 1 << 26
"""Maximum number of elements of a matrix in memory at a time."""


class LazyMatrices(TorchFunctionMode):
    """While active, `embedding` and `linear` read only the required rows of lazy matrices.

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
        return func(*args, **kwargs)

    def _look_up(self, ids: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        stored = self._matrices[id(parameter)]
        tokens, indices = torch.unique(ids, return_inverse=True)
        rows = torch.cat([stored.rows(token, token + 1) for token in tokens.tolist()])
        return functional.embedding(indices, rows.to(parameter.dtype))


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
    results = [value.new_empty((*value.shape[:-1], rows), dtype=dtype) for value, _ in inputs]
    for start in range(0, rows, step):
        block = slice(start, min(rows, start + step))
        matrix = (stored[...] if step >= rows else stored.rows(block.start, block.stop)).to(dtype)
        for result, (value, bias) in zip(results, inputs, strict=True):
            result[..., block] = functional.linear(value, matrix, None if bias is None else bias[block])
    return results
