"""Complex numbers as two real tensors while a model is traced: ONNX has none.

Some families rotate positions by complex multiplication (`torch.polar`, `view_as_complex`, `view_as_real`). Between
these three functions a pair behaves as the complex tensor would, as far as a rotation needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ComplexPair:
    """Real and imaginary part, of one shape."""

    real: Tensor
    imag: Tensor

    def __mul__(self, other: Any) -> ComplexPair:
        """Product with another pair, or with a real tensor or number."""
        if isinstance(other, ComplexPair):
            return ComplexPair(
                self.real * other.real - self.imag * other.imag, self.real * other.imag + self.imag * other.real
            )
        return ComplexPair(self.real * other, self.imag * other)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> ComplexPair:
        """The same part of both."""
        return ComplexPair(self.real[index], self.imag[index])

    def __getattr__(self, name: str) -> Any:
        """Attributes of the real part; a method is applied to both parts."""
        attribute = getattr(self.real, name)
        if not callable(attribute):
            return attribute
        return lambda *args, **kwargs: ComplexPair(
            attribute(*args, **kwargs), getattr(self.imag, name)(*args, **kwargs)
        )


def _polar(magnitude: Tensor, angle: Tensor) -> ComplexPair:
    return ComplexPair(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def _view_as_complex(pairs: Tensor) -> ComplexPair:
    return ComplexPair(pairs[..., 0], pairs[..., 1])


def _view_as_real(number: ComplexPair) -> Tensor:
    return torch.stack([number.real, number.imag], dim=-1)


@contextmanager
def complex_as_pairs() -> Iterator[None]:
    """`torch.polar`, `view_as_complex` and `view_as_real` make and take pairs inside."""
    own: dict[str, Callable[..., Any]] = {
        "polar": _polar,
        "view_as_complex": _view_as_complex,
        "view_as_real": _view_as_real,
    }
    theirs = {name: getattr(torch, name) for name in own}
    try:
        for name, function in own.items():
            setattr(torch, name, function)
        yield
    finally:
        for name, function in theirs.items():
            setattr(torch, name, function)
