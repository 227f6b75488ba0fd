"""Reach: how near a model comes to its own limits; what stays far below one computes the same without it.

Limits are those of clamps and of tanh, which is a straight line for small numbers. They are seen where torch computes
them, whatever the model's code looks like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

BENDS = 0.05
"""Of tanh: there it differs from a straight line by less than a thousandth."""
HUGE = 1e30
"""Limits beyond it are those of the type, which no weight should reach."""

aten = torch.ops.aten
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
"""By operator: which sides it limits, and the place of the limit among its arguments."""


class Place(NamedTuple):
    """One limit.

    Attributes:
        scope: the part of the model that is run, empty for all of it.
        number: of the operator in its scope.
        kind: `min`, `max` or `tanh`.
        limit: a number, not 0.
    """

    scope: str
    number: int
    kind: str
    limit: float

    @property
    def is_floor(self) -> bool:
        """Whether it keeps small numbers from becoming smaller: no larger weights reach it."""
        return self.kind == "min" and self.limit > 0


class Reach:
    """What was seen while a model ran.

    Attributes:
        shares: by limit, the largest share of it that was reached; 1 and more where it changed something.
    """

    def __init__(self) -> None:
        self.shares: dict[Place, float] = {}
        self._scope, self._number = "", 0

    def begin(self, scope: str = "") -> None:
        """Operators are counted from here."""
        self._scope, self._number = scope, 0

    def see(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called for every operator before it runs."""
        packet = getattr(operator, "overloadpacket", None)
        if packet is aten.tanh:
            limits: Iterable[tuple[str, float]] = [("tanh", BENDS)]
        elif packet in LIMITS:
            limits = _limits(LIMITS[packet], args, kwargs)
        else:
            return
        self._number += 1
        value = args[0]
        if value.is_floating_point() and value.numel() and not value.is_meta:
            for kind, limit in limits:
                self._note(kind, limit, value)

    def _note(self, kind: str, limit: float, value: torch.Tensor) -> None:
        finite = value[torch.isfinite(value)]
        if not finite.numel():
            return
        if kind == "tanh":
            share = float(finite.abs().max()) / limit
        else:
            extreme = float(finite.max() if kind == "max" else finite.min())
            is_floor = kind == "min" and limit > 0
            share = limit / max(extreme, 1e-300) if is_floor else extreme / limit
        place = Place(self._scope, self._number, kind, limit)
        self.shares[place] = max(self.shares.get(place, 0.0), share)


def _limits(
    sides: Sequence[tuple[str, int]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """The sides of a clamp that are limited by one number which matters."""
    for kind, at in sides:
        limit = args[at] if len(args) > at else kwargs.get(kind)
        if isinstance(limit, torch.Tensor):
            limit = limit.item() if limit.numel() == 1 and not limit.is_meta else None
        if limit and isfinite(limit) and abs(limit) < HUGE and not (kind == "max" and limit < 0):
            yield kind, float(limit)
