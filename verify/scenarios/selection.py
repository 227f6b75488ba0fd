"""Budget: which scenarios run when the time of a verification is limited, and what did not run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf
from typing import Generic, Protocol, TypeVar

import numpy as np

from llmconv.argument_checks import require_least
from llmconv.errors import UsageProblem
from llmconv.progress import status
from llmconv.verify.scenarios.calls import Chain, ModelFacts, drawn
from llmconv.verify.scenarios.table import SCENARIOS, Scenario

CORE = (
    "garbage under the mask",
    "chunked prefill, pieces of 1 to 48 tokens",
    "pasts of 30 to 1,022 tokens",
    "prefill, 33 tokens",
    "left padding",
    "decode chain, 16 steps",
)
"""The mandatory scenarios: they catch all of the 144 mutants that a scenario on the model's own weights catches.

Tiny models: llama, gemma2, gpt2, bloom.
"""

CORE_STREAMED = (  # the same without the scenarios that edit a cache or make one up, which do not run layer by layer
    "right padding",
    "chunked prefill, pieces of 1 to 48 tokens",
    "left padding",
    "prefill, 33 tokens",
    "decode chain, 16 steps",
)

RANKS = (
    ("garbage under the mask", 136, 136),
    ("chunked prefill, pieces of 1 to 48 tokens", 7, 131),
    ("pasts of 30 to 1,022 tokens", 1, 129),
    ("prefill, 33 tokens", 0, 123),
    ("left padding", 0, 133),
    ("decode chain, 16 steps", 0, 125),
    ("right padding", 134, 134),
    ("positions over the whole context", 5, 108),
    ("window crossed behind a made-up past", 1, 43),
    ("first and last token", 1, 120),
    ("rows exchanged", 134, 134),
    ("end of the context", 3, 104),
    ("sliding window crossed", 1, 43),
    ("a row of padding only", 133, 133),
    ("middle of the context", 3, 104),
    ("prefill, 1 token", 1, 76),
    ("holes in the mask", 133, 133),
    ("positions with gaps", 3, 106),
    ("prefill, 2 tokens", 1, 118),
    ("batch of 6", 133, 133),
    ("one-token prompt", 1, 114),
    ("equal rows of repeated tokens", 125, 125),
    ("second turn", 124, 124),
    ("tokens taken back", 124, 124),
    ("batch of 3", 124, 124),
    ("prefill, 7 tokens", 117, 117),
    ("prefill, 3 tokens", 116, 116),
    ("beyond the original context", 0, 0),
    ("first and last values of extra inputs", 0, 0),
)
"""Name of a scenario, mutants that it catches and none above it does, and mutants that it catches in all.

The mandatory scenarios come first. After them, the first number is counted as if nothing had been caught yet, and again
whenever all are caught.
"""


Clock = Callable[[], float]  # seconds from any fixed moment

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
SYNTAX = "give a time above zero, such as `60s`, `5m` or `1h`; a number without a unit is seconds"
SCALED = "scaled weights"  # all scalings, where they are chosen before the run

_PLACES = {name: place for place, (name, *_) in enumerate(RANKS)}


class Named(Protocol):
    """A scenario, a scaling of the weights, or anything else that is a row of the order."""

    @property
    def name(self) -> str:
        """As printed."""


def parse_budget(text: str) -> float:
    """Seconds of a time such as `60s`, `1.5h` or `90`; UsageProblem if it is not a time above zero."""
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
    """The time of one verification, and how it was used."""

    seconds: float  # from the beginning of the verification; the mandatory scenarios may take longer
    clock: Clock = time.monotonic  # returns the time in seconds
    core: frozenset[str] = frozenset(CORE)  # names of the mandatory scenarios, which run whatever the time
    started: float = field(init=False)
    opening: float | None = None  # seconds until the first scenario began; None before that
    ran: list[tuple[str, float]] = field(default_factory=list)  # name and seconds of each row that ran, in order
    left: dict[str, None] = field(default_factory=dict)  # names of the rows that did not run, in order
    core_seconds: float = 0.0  # seconds from the beginning to the end of the last mandatory scenario
    # the names that were chosen before the run; None where each is decided when its turn comes
    chosen: frozenset[str] | None = None
    _tokens: int = 0
    _measured: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()

    @classmethod
    def of(cls, seconds: float | None, only: Sequence[str] = (), clock: Clock = time.monotonic) -> Budget | None:
        """The budget of `verify`; None without one. UsageProblem for an invalid time, or selected scenarios."""
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
        return self.clock() - self.started

    @property
    def reason(self) -> str:
        if self.chosen is not None:
            return f"not run: by estimate, the budget of {self.seconds:g} s has no room for it"
        return f"not run: the budget of {self.seconds:g} s was used"

    def admits(self, name: str, tokens: int, *, reopens: bool = False) -> bool:
        """Whether a row with calls of this many tokens runs now; `reopens` opens model and graphs again."""
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

        Scenarios, in order, share the estimate in seconds by their tokens. Scaled weights count as two thirds of it
        (two of three passes over the weights), although their calls are few, so the sum is rather too large.
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
    return sum(call.input_ids.size for chain in chains for call in chain)


Row = TypeVar("Row", bound=Named)


class Paced(Generic[Row]):
    """Iterates over the rows (all without a budget) that run now, and measures each until the next one is asked for.

    If `reopens`, each row opens model and graphs again. After the iteration, `left` has the rows that did not run.
    """

    def __init__(
        self, rows: Iterable[tuple[Row, list[Chain]]], budget: Budget | None, *, reopens: bool = False
    ) -> None:
        self._rows, self._budget, self._reopens = rows, budget, reopens
        self.left: list[Row] = []

    def __iter__(self) -> Iterator[tuple[Row, list[Chain]]]:
        budget = self._budget
        if budget is None:
            yield from self._shown()
            return
        if budget.opening is None:
            budget.opening = budget.used
        for row, chains in self._rows:
            tokens = tokens_of(chains)
            if not budget.admits(row.name, tokens, reopens=self._reopens):
                self.left.append(row)
                budget.left[row.name] = None
                continue
            begin = budget.clock()
            yield row, chains
            budget.record(row.name, tokens, budget.clock() - begin, reopens=self._reopens)

    def _shown(self) -> Iterator[tuple[Row, list[Chain]]]:
        """All rows; a terminal shows the number of each, and the time that the others will take by their tokens."""
        rows = self._rows
        sizes = [tokens_of(chains) for _, chains in rows] if isinstance(rows, list) else []
        begin = time.monotonic()
        for number, (row, chains) in enumerate(rows):
            of, done = f" {number + 1} of {len(sizes)}" if sizes else "", sum(sizes[:number])
            left = (time.monotonic() - begin) / done * sum(sizes[number:]) if done else 0.0
            status(f"scenario{of}: {row.name}" + (f", about {left:.0f} s left" if left >= 1 else ""))
            yield row, chains
        status("")


@dataclass(frozen=True)
class Selection:
    """The scenarios of a verification. Raises UsageProblem: the suite or a name is unknown, or `repeat` is below 1."""

    suite: str = "quick"  # `quick` or `full`
    only: Sequence[str] = ()  # names of scenarios, of any suite; where given, only these are run
    repeat: int = 1  # number of runs of each call; all must give the same bits
    budget: Budget | None = None  # limits the time; None to run all

    def __post_init__(self) -> None:
        if self.suite not in {"quick", "full"}:
            raise UsageProblem(f"unknown suite `{self.suite}`", hint="give `quick` or `full`")
        require_least(self.repeat, 1, "repeat")
        names = [scenario.name for scenario in SCENARIOS]
        if unknown := set(self.only).difference(names):
            near = get_close_matches(min(unknown), names, n=3, cutoff=0.3)
            similar = "similar: " + ", ".join(f"`{name}`" for name in near) if near else "one is `left padding`"
            hint = f"{similar}; docs/verification-scenarios.md lists all"
            raise UsageProblem(f"unknown scenario `{min(unknown)}`", hint=hint)

    def scenarios(self) -> list[Scenario]:
        """The selected rows of the table, whether or not they apply to a model; with a budget by what they found."""
        if self.only:
            return [scenario for scenario in SCENARIOS if scenario.name in self.only]
        rows = [scenario for scenario in SCENARIOS if self.suite == "full" or scenario.suite == "quick"]
        return sorted(rows, key=lambda row: place_of(row.name)) if self.budget else rows

    def paced(self, rows: Iterable[tuple[Row, list[Chain]]], *, reopens: bool = False) -> Paced[Row]:
        return Paced(rows, self.budget, reopens=reopens)

    def chosen(self, planned: list[tuple[Scenario, list[Chain]]]) -> list[tuple[Scenario, list[Chain]]]:
        """The scenarios whose calls are made, where that is decided before the run; else all of `planned`."""
        names = self.budget.chosen if self.budget else None
        return [one for one in planned if names is None or one[0].name in names]

    def calls(self, facts: ModelFacts) -> list[tuple[Scenario, list[Chain]]]:
        facts = replace(facts, thorough=self.suite == "full")
        built = [(scenario, _driven(scenario, facts)) for scenario in self.scenarios()]
        return [(scenario, chains) for scenario, chains in built if chains]

    def left_out(self, facts: ModelFacts) -> list[tuple[Scenario, str]]:
        """The scenarios that apply to the model and are not run in full, with the reason."""
        facts = replace(facts, thorough=self.suite == "full")
        reasons = [(scenario, scenario.left_out(facts)) for scenario in self.scenarios()]
        return [(scenario, reason) for scenario, reason in reasons if reason]


def _driven(scenario: Scenario, facts: ModelFacts) -> list[Chain]:
    rng = np.random.default_rng(scenario.seed + 1)
    return [drawn(chain, facts.extra_inputs, rng) for chain in scenario.build(facts)]
