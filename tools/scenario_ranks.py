"""The order in which `llmconv verify --budget` runs scenarios: `python -m tools.scenario_ranks` writes it again.

Every mutant runs through the quick suite as the decode graph of a tiny model, and the scenarios that fail are recorded.
Then scenarios are chosen greedily: the one that catches most mutants that none before it has caught, of equal ones the
one with the fewest tokens. When all are caught, the core is complete, and the rest is ordered in the same way, as if
nothing had been caught yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmconv.export import export
from llmconv.verify import Report
from llmconv.verify.reference.eager import Eager
from llmconv.verify.scenarios.selection import Selection, tokens_of
from tests.builders.mutants.mutants import MUTANTS
from tests.conftest import CONFIGS, save_tiny
from tools.calibrate import mutant_report

TABLE = Path("verify/scenarios/selection.py")
FAMILIES = ("llama", "gemma2", "gpt2", "bloom")
ALWAYS = ("prefill, 33 tokens", "decode chain, 16 steps", "left padding")
"""In the core in any case: a prefill, a decode chain and a padded batch."""

TABLES = '''CORE = (
{core}
)
"""The mandatory scenarios: they catch all of the {mutants} mutants that a scenario on the model's own weights catches.

Tiny models: {families}.
"""

CORE_STREAMED = (  # the same without the scenarios that edit a cache or make one up, which do not run layer by layer
{streamed}
)

RANKS = (
{ranks}
)
"""Name of a scenario, mutants that it catches and none above it does, and mutants that it catches in all.

The mandatory scenarios come first. After them, the first number is counted as if nothing had been caught yet, and again
whenever all are caught.
"""
'''
LAST_LINE = TABLES[-30:]

Caught = Mapping[str, Sequence[str]]
"""By mutant, the scenarios that catch it."""

Rank = tuple[str, int, int]
"""Name, mutants that are new, mutants in all."""


def caught_by(report: Report) -> list[str]:
    """The scenarios that fail on the model's own weights."""
    own = {scenario.name for scenario in Selection().scenarios()}
    failed = dict.fromkeys(check.name for check in report.checks if check.verdict == "fail")
    return [name for name in failed if name in own]


def family_rows(model_type: str, folder: Path) -> tuple[dict[str, list[str]], dict[str, int], list[str]]:
    """By mutant the scenarios that catch it; by scenario its tokens; the names of those that run layer by layer."""
    model_folder = save_tiny(model_type, folder / model_type)
    export(model_folder, prefill=True, incremental=True)
    eager = Eager(model_folder, "float32", keep=True)
    caught = {}
    for mutant in (mutant for mutant in MUTANTS if model_type in mutant.families):
        report = mutant_report(mutant, model_folder, folder / "mutant", eager)
        caught[f"{model_type}: {mutant.name}"] = caught_by(report)
        print(model_type, len(caught_by(report)), mutant.name, flush=True)
    facts = eager.facts()
    tokens = {row.name: tokens_of(chains) for row, chains in Selection().calls(facts)}
    facts = replace(facts, no_edits="none", no_synthetic_past="none")
    return caught, tokens, [row.name for row, _ in Selection().calls(facts)]


def ranked(caught: Caught, tokens: Mapping[str, int]) -> list[list[Rank]]:
    """The scenarios in greedy order, in rounds; each round but the last catches every mutant that can be caught.

    Args:
        caught: scenarios that catch a mutant, by mutant.
        tokens: of every scenario; of equal ones, the one with the fewest comes first.
    """
    rows = list(tokens)
    of = {row: {mutant for mutant, found in caught.items() if row in found} for row in rows}
    every = set().union(*of.values())
    left, rounds = set(every), [list[Rank]()]
    while rows:
        best = max(rows, key=lambda row: (len(of[row] & left), -tokens[row]))
        if not of[best] & left and left != every:
            left = set(every)
            rounds.append([])
            continue
        rounds[-1].append((best, len(of[best] & left), len(of[best])))
        left -= of[best]
        rows.remove(best)
    return rounds


def core_of(caught: Caught, tokens: Mapping[str, int]) -> list[Rank]:
    """The first round, and what is in the core in any case; arguments as for `ranked`."""
    first, *others = ranked(caught, tokens)
    return first + [(name, 0, every) for later in others for name, _, every in later if name in ALWAYS]


def write_table(data: Mapping[str, Any], table: Path) -> None:
    """Replaces the tables in a module by those of the results of families by name, each as `family_rows` returns it."""
    caught: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    streamed: set[str] = set()
    for found, held, names in data.values():
        caught |= found
        tokens |= {name: max(count, tokens.get(name, 0)) for name, count in held.items()}
        streamed |= set(names)
    core = core_of(caught, tokens)
    names = [name for name, _, _ in core]
    rest = ranked(caught, {name: count for name, count in tokens.items() if name not in names})
    every = {name: tokens.get(name, 0) for name in (row.name for row in Selection().scenarios())}
    ranks = [*core, *(rank for one in rest for rank in one)]
    ranks += [(name, 0, 0) for name in every if name not in tokens]
    other = core_of(caught, {name: count for name, count in tokens.items() if name in streamed})
    tables = TABLES.format(
        mutants=sum(map(bool, caught.values())),
        families=", ".join(data),
        core="\n".join(f'    "{name}",' for name in names),
        streamed="\n".join(f'    "{name}",' for name, _, _ in other),
        ranks="\n".join(f'    ("{name}", {new}, {count}),' for name, new, count in ranks),
    )
    before, after = (table.read_text().split(mark)[at] for mark, at in ((TABLES.split("{")[0], 0), (LAST_LINE, -1)))
    table.write_text(before + tables + after)


def main() -> None:
    """Runs the families and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(CONFIGS), help="this family")
    parser.add_argument("--data", type=Path, help="keep the raw results, and use those in it instead of new runs")
    parser.add_argument("--write", type=Path, default=TABLE)
    options = parser.parse_args()
    data = json.loads(options.data.read_text()) if options.data and options.data.is_file() else {}
    families = options.only or FAMILIES
    for model_type in families:
        if model_type not in data:
            with TemporaryDirectory() as name:
                data[model_type] = family_rows(model_type, Path(name))
        if options.data:
            options.data.write_text(json.dumps(data, indent=1))
    write_table({name: data[name] for name in families}, options.write)


if __name__ == "__main__":
    main()
