"""Budget: which scenarios run when the time of a verification is limited, and what did not run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from llmconv.errors import UsageProblem
from llmconv.verify.scenarios.calls import Chain
from llmconv.verify.scenarios.ranks import CORE, CORE_STREAMED, RANKS

Clock = Callable[[], float]
"""Seconds from any fixed moment."""

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
SYNTAX = "give a time above zero, such as `60s`, `5m` or `1h`; a number without a unit is seconds"

SCALED = "scaled weights"
"""All scalings, where they are chosen before the run."""

_PLACES = {name: place for place, (name, *_) in enumerate(RANKS)}


class Named(Protocol):
    """A scenario, a scaling of the weights, or anything else that is a row of the order."""

    @property
    def name(self) -> str:
        """As printed."""


def parse_budget(text: str) -> float:
    """Seconds of a time such as `60s`, `1.5h` or `90`.

    Raises:
        UsageProblem: not a time, or not above zero.
    """
    match = re.fullmatch(r"([0-9]{1,300}(?:\.[0-9]{1,300})?)\s*([smh]?)", text.strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < seconds < inf:
        raise UsageProblem(f"invalid budget `{text[:40]}`", hint=SYNTAX)
    return seconds


def place_of(name: str) -> int:
    """The place of a scenario in the order by what it found; those without a rank come last."""
    return _PLACES.get(name, len(_PLACES))


@dataclass(eq=False)
class Budget:
    """The time of one verification, and how it was used.

    Attributes:
        seconds: from the beginning of the verification; the mandatory scenarios may take longer.
        clock: returns the time in seconds.
        core: names of the mandatory scenarios, which run whatever the time.
        started: time of the beginning.
        opening: seconds until the first scenario began; None before that.
        ran: name and seconds of each row that ran, in order.
        left: names of the rows that did not run, in order.
        core_seconds: seconds from the beginning to the end of the last mandatory scenario.
        chosen: the names that were chosen before the run; None where each is decided when its turn comes.
    """

    seconds: float
    clock: Clock = time.monotonic
    core: frozenset[str] = frozenset(CORE)
    started: float = field(init=False)
    opening: float | None = None
    ran: list[tuple[str, float]] = field(default_factory=list)
    left: dict[str, None] = field(default_factory=dict)
    core_seconds: float = 0.0
    chosen: frozenset[str] | None = None
    _tokens: int = 0
    _measured: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()

    @classmethod
    def of(cls, seconds: float | None, only: Sequence[str] = (), clock: Clock = time.monotonic) -> Budget | None:
        """The budget of a call of `verify`; None without one.

        Args:
            seconds: as given.
            only: names of selected scenarios.
            clock: returns the time in seconds.

        Raises:
            UsageProblem: the time is not a finite number above zero, or scenarios are selected.
        """
        if seconds is None:
            return None
        if not 0 < seconds < inf:
            raise UsageProblem(f"`budget` is {seconds}", hint="give a finite number of seconds above zero")
        if only:
            hint = "leave out one of them: selected scenarios always run"
            raise UsageProblem("`--budget` excludes `--scenario`", hint=hint)
        return cls(seconds, clock)

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.started

    @property
    def reason(self) -> str:
        """Why a row did not run."""
        if self.chosen is not None:
            return f"not run: by estimate, the budget of {self.seconds:g} s has no room for it"
        return f"not run: the budget of {self.seconds:g} s was used"

    def admits(self, name: str, tokens: int, *, reopens: bool = False) -> bool:
        """Whether a row runs now.

        Args:
            name: of the row.
            tokens: of its calls.
            reopens: the row opens model and graphs again.
        """
        if self.chosen is not None:
            return (SCALED if reopens else name) in self.chosen
        if name in self.core:
            return True
        rate = self._measured / self._tokens if self._tokens else 0.0
        estimate = tokens * rate + (self.opening or 0.0) * reopens
        return self.used + estimate < self.seconds

    def record(self, name: str, tokens: int, seconds: float, *, reopens: bool = False) -> None:
        """Adds a row that ran; `seconds` is its duration, the others are as in `admits`."""
        self.ran.append((name, round(seconds, 3)))
        if not reopens:
            self._tokens += tokens
            self._measured += seconds
        if name in self.core:
            self.core_seconds = self.used

    def choose(self, planned: Sequence[tuple[Named, Sequence[Chain]]], seconds: float) -> None:
        """Decides before the run, for calls that run all at once; repeated calls change nothing.

        Scenarios divide the estimate by their tokens. Scaled weights are counted as the two passes over the weights of
        three that they are, although their calls are few, so the sum is rather too large.

        Args:
            planned: the scenarios in order.
            seconds: estimate for all of them and for scaled weights.
        """
        if self.chosen is not None:
            return
        self.core = frozenset(CORE if {row.name for row, _ in planned} >= set(CORE) else CORE_STREAMED)
        every = sum(tokens_of(chains) for _, chains in planned) or 1
        costs = {row.name: seconds * tokens_of(chains) / every for row, chains in planned} | {SCALED: seconds * 2 / 3}
        expected = self.used + sum(cost for name, cost in costs.items() if name in self.core)
        chosen = set(self.core)
        for name, cost in costs.items():
            if name not in chosen and expected + cost < self.seconds:
                chosen.add(name)
                expected += cost
        self.chosen = frozenset(chosen)


def tokens_of(chains: Iterable[Chain]) -> int:
    """Number of new tokens of all calls."""
    return sum(call.input_ids.size for chain in chains for call in chain)
