"""Mutants of one layer of 24, drawn at random: the share that `verify --method induction` finds, and in which layer.

`python -m benchmarks.one_layer_mutants llama gpt2` runs some of the families.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.measure import Target, report
from tests.builders.mutants.one_layer_runs import DEPTH, EQUIVALENT, SIZES, Outcome, deep_model, outcomes


@dataclass
class Family:
    """All mutants of one family.

    Attributes:
        model_type: of the model.
        outcomes: of the mutants that have a place in a layer.
        without: names of those that have none.
    """

    model_type: str
    outcomes: list[Outcome] = field(default_factory=list)
    without: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[Outcome]:
        """Those that were not found, or elsewhere."""
        return [one for one in self.outcomes if not one.placed]

    def row(self) -> str:
        """A row of the table."""
        caught, placed = (sum(getattr(one, key) for one in self.outcomes) for key in ("caught", "placed"))
        missed = "; ".join(_missed(one) for one in self.missed) or "none"
        return f"| {self.model_type} | {len(self.outcomes)} | {caught} | {placed} | {missed} |"


def _missed(one: Outcome) -> str:
    found = f"placed in {one.found if one.found is not None else 'no layer'}" if one.caught else one.verdict
    return f"{one.name} (layer {one.layer}: {found})"


def family_runs(model_type: str, folder: Path) -> Family:
    """All mutants of a family."""
    family = Family(model_type)
    model = deep_model(model_type, folder / model_type)
    for found in outcomes(model_type, model, folder / "mutant"):
        if isinstance(found, str):
            family.without.append(found)
        else:
            family.outcomes.append(found)
            print(model_type, found, file=sys.stderr, flush=True)
    print(family.row(), "without a place:", family.without, file=sys.stderr, flush=True)
    return family


def body(families: Sequence[Family]) -> str:
    """The table."""
    nowhere = sorted(set.intersection(*(set(family.without) for family in families)))
    excluded = [f"- {family}, {name}: {why}" for (family, name), why in EQUIVALENT.items()]
    return "\n".join(
        [
            f"Every mutant of `tests/builders/mutants` that has a place in one layer, in one of {DEPTH} layers that is",
            "drawn at random; the file is accepted as changed, so that its checksum finds nothing. It is caught if the",
            "verdict is `fail`, and placed if `where.layer` is the layer.",
            "",
            "| family | mutants | caught | placed | not caught or not placed |",
            "| --- | --- | --- | --- | --- |",
            *(family.row() for family in families),
            "",
            f"Without a place in a layer of any family: {', '.join(nowhere) or 'none'}.",
            *(["", "Left out, because they compute the same function:", "", *excluded] if excluded else []),
        ]
    )


def main() -> int:
    """Runs the families, prints the table, and returns 1 if a target is missed."""
    torch.set_num_threads(1)
    chosen = [name for name in SIZES if name in sys.argv] or list(SIZES)
    families = []
    for model_type in chosen:
        with TemporaryDirectory() as name:
            families.append(family_runs(model_type, Path(name)))
    found = [one for family in families for one in family.outcomes]
    caught, placed = (100 * sum(getattr(one, key) for one in found) / len(found) for key in ("caught", "placed"))
    targets = [
        Target("mutants of one layer that are caught, %", caught, 100, at_least=True),
        Target("mutants of one layer that are placed in it, %", placed, 95, at_least=True),
    ]
    return report("one_layer_mutants", "mutants of one layer", body(families), targets)


if __name__ == "__main__":
    sys.exit(main())
