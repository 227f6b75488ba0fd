"""What a budget of time decides about besides scenarios, and the skipped checks of what it left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import SCALED_SCENARIOS, WeightScaling, scalings
from llmconv.verify.results.report import Check, Checks
from llmconv.verify.scenarios.budget import Budget, Named
from llmconv.verify.scenarios.calls import Chain
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario


@dataclass(frozen=True)
class OtherSettings:
    """A scenario with other settings of onnxruntime.

    Attributes:
        scenario: the scenario.
        optimization: level of graph optimization.
        threads: number of threads.
    """

    scenario: Scenario
    optimization: str
    threads: int

    @property
    def name(self) -> str:
        """As printed."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.scenario.name}, optimization {self.optimization}, {threads}"


def scaled_rows(eager: Eager, selection: Selection) -> Iterator[tuple[WeightScaling, list[Chain]]]:
    """The scalings, each with the calls that are made with it; without a budget, which counts them, with none.

    Args:
        eager: the reference; later scalings depend on the limits that it reached.
        selection: of scenarios.
    """
    few = replace(selection, only=SCALED_SCENARIOS, budget=None)
    planned = few.calls(eager.facts()) if selection.budget else []
    chains = [chain for _, chains in planned for chain in chains]
    return ((scaling, chains) for scaling in scalings(eager))


def not_run(left: Iterable[Named], budget: Budget | None, graphs: Sequence[str]) -> Checks:
    """Skipped checks of each row for which the budget had no time, one for every graph.

    Args:
        left: the rows.
        budget: which had no time for them; None if there are none.
        graphs: names of the graphs.
    """
    reason = budget.reason if budget else ""
    for row in left:
        yield [Check(row.name, name, "logits", verdict="skip", detail=reason) for name in graphs]
