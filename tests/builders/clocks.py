"""A clock that moves when a test says so, or a little with every look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeClock:
    """Returns `now`; each call moves it by `tick` seconds."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now
