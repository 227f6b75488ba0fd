"""LimitMargins: how close the values of a model come to its limits; a limit far from all values has no effect.

Limits are the bounds of clamps, and tanh, which is linear for small numbers. They are observed in torch's operators,
whatever the model's code looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

from llmconv.runtime.library_patches import TorchDispatchMode

TANH_LINEAR = 0.05  # up to this input, tanh differs from a straight line by less than a thousandth
HUGE = 1e30  # larger limits are those of the dtype, which no value should reach
aten = torch.ops.aten
# by operator: the kinds of limits, each with the index of its argument
LIMITS = {
    aten.clamp: (("min", 1), ("max", 2)),
    aten.clamp_: (("min", 1), ("max", 2)),
    aten.hardtanh: (("min", 1), ("max", 2)),
    aten.clamp_min: (("min", 1),),
    aten.clamp_max: (("max", 1),),
    aten.clamp_min_: (("min", 1),),
    aten.clamp_max_: (("max", 1),),
    aten.maximum: (("min", 1),),
    aten.minimum: (("max", 1),),
}


class ModelLimit(NamedTuple):
    """One limit of a model."""

    scope: str  # name of the layer that runs; empty outside of layers
    number: int  # index of the operator in its scope, from 1
    kind: str  # `min`, `max` or `tanh`
    limit: float  # the bound, not 0

    @property
    def is_floor(self) -> bool:
        """Whether it is a positive lower bound, which larger weights do not reach."""
        return self.kind == "min" and self.limit > 0


class LimitMargins:
    """How close values came to limits while a model ran: `shares` by limit, the largest value divided by it."""

    def __init__(self) -> None:
        self.shares: dict[ModelLimit, float] = {}
        self._scope, self._number = "", 0

    def begin(self, scope: str = "") -> None:
        """Starts a scope; operators are numbered from here."""
        self._scope, self._number = scope, 0

    def see(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Observes an operator, such as `aten.clamp.default`, before it runs; its first argument is the value."""
        packet = getattr(operator, "overloadpacket", None)
        if packet is not aten.tanh and packet not in LIMITS:
            return
        self._number += 1
        value = args[0]
        if value.is_floating_point() and value.numel() and not value.is_meta:
            for kind, limit in _limits(LIMITS[packet], args, kwargs) if packet in LIMITS else [("tanh", TANH_LINEAR)]:
                self._note(kind, limit, value)

    def _note(self, kind: str, limit: float, value: torch.Tensor) -> None:
        finite = value[torch.isfinite(value)]
        if not finite.numel():
            return
        reached = ModelLimit(self._scope, self._number, kind, limit)
        if kind == "tanh":
            share = float(finite.abs().max()) / limit
        else:
            extreme = float(finite.max() if kind == "max" else finite.min())
            share = limit / max(extreme, 1e-300) if reached.is_floor else extreme / limit
        self.shares[reached] = max(self.shares.get(reached, 0.0), share)


def _limits(
    sides: Sequence[tuple[str, int]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """The kinds and values of the limits of a clamp that are single numbers."""
    for kind, at in sides:
        limit = args[at] if len(args) > at else kwargs.get(kind)
        if isinstance(limit, torch.Tensor):
            limit = limit.item() if limit.numel() == 1 and not limit.is_meta else None
        if limit and isfinite(limit) and abs(limit) < HUGE and not (kind == "max" and limit < 0):
            yield kind, float(limit)


LOW_FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class Float64Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts to float64 where code casts lower (norms, rotary tables, softmax); `margins` observes every operator."""

    def __init__(self, margins: LimitMargins | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._margins = margins or LimitMargins()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in LOW_FLOATS or _fills_beyond_float32(func, args, kwargs):
            kwargs = {**kwargs, "dtype": torch.float64}
        self._margins.see(func, args, kwargs)
        return func(*args, **kwargs)


def _fills_beyond_float32(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a new tensor without a dtype, float32 by default, gets a number of float64 (a mask of XGLM)."""
    if func is not torch.ops.aten.full.default or kwargs.get("dtype") is not None or not isinstance(args[1], float):
        return False
    return torch.finfo(torch.float32).max < abs(args[1]) < float("inf")
