"""StoredSmoothing: factors in a folder of llmconv; norms are divided by them, and matrices multiplied with them.

`X.smoothing` in the folder's files belongs to the tensor `X` of the model. A norm `y` and a matrix `W` with the same
factors `s` are the same function as without: `(y / s) @ (s * W)`. Whether those that meet have the same is decided by
the scenarios: their reference has the model's own norms, and the graph's codes, divided by the factors of the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmconv.files.safetensors_file import read_header
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.verify.results.report import Check

FILES, SUFFIX = "quantized*.safetensors", ".smoothing"
FLOAT32 = BY_NAME["float32"]
LARGEST = 64
"""The largest exponent of a factor that float32 weights can be divided by and multiplied with."""
SHOWN = 4
MATRIX = 2


@dataclass(frozen=True)
class StoredSmoothing:
    """The factors of a folder.

    Attributes:
        factors: by name of the model's tensor, as stored: [K] of a norm or of a matrix [N, K], [K, 1] of [K, N].
    """

    factors: Mapping[str, LazyTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> StoredSmoothing:
        """The factors in the files of a folder; reads their headers.

        Raises:
            MalformedInput: a file is damaged.
        """
        tensors = {name: found for path in folder.glob(FILES) for name, found in read_header(path).tensors.items()}
        return cls({name.removesuffix(SUFFIX): found for name, found in tensors.items() if name.endswith(SUFFIX)})

    def problems(self, reference: Mapping[str, LazyTensor]) -> list[str]:
        """What is wrong with the factors of each tensor.

        Args:
            reference: tensors of the model by name.
        """
        return [f"`{name}{SUFFIX}` {problem}" for name in self.factors if (problem := self._problem(name, reference))]

    def _problem(self, name: str, reference: Mapping[str, LazyTensor]) -> str:
        tensor, stored = reference.get(name), self.factors[name]
        if tensor is None or len(tensor.shape) not in (1, MATRIX):
            return "belongs to no vector or matrix of the model"
        shapes = [tensor.shape[-1:], *([(tensor.shape[0], 1)] if len(tensor.shape) == MATRIX else [])]
        if stored.dtype != FLOAT32 or stored.shape not in shapes:
            return f"is {stored.dtype.name} of shape {list(stored.shape)}, not float32 of {list(shapes[0])}"
        mantissas, exponents = np.frexp(factors := stored.read())
        if not (np.isfinite(factors) & (mantissas == 0.5) & (np.abs(exponents - 1) <= LARGEST)).all():
            return "has factors that are not powers of two"
        if len(tensor.shape) == 1:
            values = tensor.read().astype(np.float32)
            with np.errstate(all="ignore"):
                if not np.array_equal(values / factors * factors, values):
                    return "has factors by which the norm cannot be divided without rounding"
        return ""

    def check(self, graph: str, reference: Mapping[str, LazyTensor]) -> list[Check]:
        """One failed check if factors are wrong, else none.

        Args:
            graph: name of the graph in reports.
            reference: tensors of the model by name.
        """
        problems = self.problems(reference)
        more = f"; and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
        detail = "; ".join(problems[:SHOWN]) + more
        return [Check("weights", graph, "", verdict="fail", detail=detail)] if problems else []

    def applied(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors that codes and norms of the folder are made of: matrices times factors, norms divided by them.

        Args:
            tensors: of the model, by name.
        """
        return self._changed(tensors, lambda tensor: np.multiply if len(tensor.shape) == MATRIX else np.divide)

    def undone(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The inverse of `applied`, exact.

        Args:
            tensors: results of `applied`, or matrices of codes in their place.
        """
        return self._changed(tensors, lambda tensor: np.divide if len(tensor.shape) == MATRIX else np.multiply)

    def _changed(
        self, tensors: Mapping[str, LazyTensor], operation: Callable[[LazyTensor], np.ufunc]
    ) -> dict[str, LazyTensor]:
        return {
            name: _scaled(tensor, self.factors[name].read(), operation(tensor)) if name in self.factors else tensor
            for name, tensor in tensors.items()
        }


def _scaled(tensor: LazyTensor, factors: Array, operation: np.ufunc) -> LazyTensor:
    """A tensor in float32, multiplied with factors or divided by them."""
    by_row = len(tensor.shape) == 1 or factors.ndim == MATRIX

    def load(start: int, stop: int) -> Array:
        rows = tensor.rows(start, stop).astype(np.float32)
        result: Array = operation(rows, factors[start:stop] if by_row else factors)
        return result

    return LazyTensor(FLOAT32, tensor.shape, load)
