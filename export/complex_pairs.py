"""Complex numbers as pairs of real tensors while a model is traced: ONNX has no complex type.

Some families rotate positions by complex multiplication (`torch.polar`, `view_as_complex`, `view_as_real`). Between
these three functions a pair supports the operations of a complex tensor that a rotation needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ComplexPair:
    """Real and imaginary part, two tensors of one shape."""

    real: Tensor
    imag: Tensor

    def __mul__(self, other: Any) -> ComplexPair:
        """Product with another pair, a real tensor or a number."""
        if isinstance(other, ComplexPair):
            return ComplexPair(
                self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real
            )
        return ComplexPair(self.real * other, self.imag * other)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> ComplexPair:
        """The pair of the same index of both parts."""
        return ComplexPair(self.real[index], self.imag[index])

    def __getattr__(self, name: str) -> Any:
        """Attributes of the real part; methods are applied to both parts."""
        attribute = getattr(self.real, name)
        if not callable(attribute):
            return attribute
        return lambda *args, **kwargs: ComplexPair(
            attribute(*args, **kwargs), getattr(self.imag, name)(*args, **kwargs)
        )


def polar(magnitude: Tensor, angle: Tensor) -> ComplexPair:
    """`torch.polar` as a pair; both tensors of one shape."""
    return ComplexPair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def view_as_complex(pairs: Tensor) -> ComplexPair:
    """`torch.view_as_complex` as a pair: the last axis `[..., 2]` has real and imaginary part."""
    return ComplexPair(pairs[..., 0], pairs[..., 1])


def view_as_real(number: ComplexPair) -> Tensor:
    """`torch.view_as_real` of a pair, `[..., 2]`."""
    return torch.stack([number.real, number.imag], dim=-1)
