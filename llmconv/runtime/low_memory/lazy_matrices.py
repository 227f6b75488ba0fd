"""LazyMatrices: embedding tables and heads that are read by rows, and never whole.

A vocabulary of 128k tokens times a width of 4096 is 4 GB in float64. Such a matrix stays on the meta device; a lookup
reads the rows of its tokens, and a product takes some rows of the matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from llmconv.runtime.eager.stored_tensors import StoredTensor

BLOCK = 1 << 26
"""Elements of a matrix that are there at a time."""


class LazyMatrices(TorchFunctionMode):
    """While active, `embedding` and `linear` with a lazy matrix read what they need of it.

    Args:
        matrices: by the id of the parameter that stands for them.
        multiply: called for the product of an input with the lazy matrix of that id.
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
        tokens, places = torch.unique(ids, return_inverse=True)
        rows = torch.cat([stored.rows(token, token + 1) for token in tokens.tolist()])
        return functional.embedding(places, rows.to(parameter.dtype))


def product_by_rows(
    stored: StoredTensor, dtype: torch.dtype, inputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
) -> list[torch.Tensor]:
    """`linear(input, matrix, bias)` of several inputs; the matrix is read once.

    Args:
        stored: [rows, columns].
        dtype: to compute in.
        inputs: each [..., columns], with the bias [rows] or None.
    """
    rows, columns = stored.shape
    step = max(1, BLOCK // columns)
    results = [value.new_empty((*value.shape[:-1], rows), dtype=dtype) for value, _ in inputs]
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        matrix = (stored[...] if step >= rows else stored.rows(part.start, part.stop)).to(dtype)
        for result, (value, bias) in zip(results, inputs, strict=True):
            result[..., part] = functional.linear(value, matrix, None if bias is None else bias[part])
    return results
