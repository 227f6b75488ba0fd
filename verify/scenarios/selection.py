"""Selection: the scenarios that a verification runs, from the suite or the names that were given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from llmconv.argument_checks import require_least
from llmconv.errors import UsageProblem
from llmconv.verify.scenarios.budget import Budget, Paced, Row, place_of
from llmconv.verify.scenarios.calls import Chain, ModelFacts, drawn
from llmconv.verify.scenarios.table import SCENARIOS, Scenario


@dataclass(frozen=True)
class Selection:
    """The scenarios of a verification.

    Attributes:
        suite: `quick` or `full`.
        only: names of scenarios, of any suite; where given, only these are run.
        repeat: number of runs of each call; all must give the same bits.
        budget: limits the time; None to run all.

    Raises:
        UsageProblem: the suite or a name is unknown, or `repeat` is below 1.
    """

    suite: str = "quick"
    only: Sequence[str] = ()
    repeat: int = 1
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.suite not in {"quick", "full"}:
            raise UsageProblem(f"unknown suite `{self.suite}`", hint="give `quick` or `full`")
        require_least(self.repeat, 1, "repeat")
        names = [scenario.name for scenario in SCENARIOS]
        if unknown := set(self.only).difference(names):
            near = get_close_matches(min(unknown), names, n=3, cutoff=0.3)
            hint = "one of: " + ", ".join(f"`{name}`" for name in near or names)
            raise UsageProblem(f"unknown scenario `{min(unknown)}`", hint=hint)

    def scenarios(self) -> list[Scenario]:
        """The selected rows of the table, whether or not they apply to a model; with a budget by what they found."""
        if self.only:
            return [scenario for scenario in SCENARIOS if scenario.name in self.only]
        rows = [scenario for scenario in SCENARIOS if self.suite == "full" or scenario.suite == "quick"]
        return sorted(rows, key=lambda row: place_of(row.name)) if self.budget else rows

    def paced(self, rows: Iterable[tuple[Row, list[Chain]]], *, reopens: bool = False) -> Paced[Row]:
        """The rows that run now; arguments as for `Paced`."""
        return Paced(rows, self.budget, reopens=reopens)

    def chosen(self, planned: list[tuple[Scenario, list[Chain]]]) -> list[tuple[Scenario, list[Chain]]]:
        """The scenarios whose calls are made, where that is decided before the run; else all of `planned`."""
        names = self.budget.chosen if self.budget else None
        return [one for one in planned if names is None or one[0].name in names]

    def calls(self, facts: ModelFacts) -> list[tuple[Scenario, list[Chain]]]:
        """The scenarios that apply to a model, with their calls."""
        facts = replace(facts, thorough=self.suite == "full")
        built = [(scenario, _driven(scenario, facts)) for scenario in self.scenarios()]
        return [(scenario, chains) for scenario, chains in built if chains]

    def left_out(self, facts: ModelFacts) -> list[tuple[Scenario, str]]:
        """The scenarios that apply to the model and are not run in full, with the reason."""
        facts = replace(facts, thorough=self.suite == "full")
        reasons = [(scenario, scenario.left_out(facts)) for scenario in self.scenarios()]
        return [(scenario, reason) for scenario, reason in reasons if reason]


def _driven(scenario: Scenario, facts: ModelFacts) -> list[Chain]:
    """The calls of a scenario, with values of the extra inputs."""
    rng = np.random.default_rng(scenario.seed + 1)
    return [drawn(chain, facts.extra_inputs, rng) for chain in scenario.build(facts)]
