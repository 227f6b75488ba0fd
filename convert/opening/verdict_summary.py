"""The recorded verdict of a folder of graphs, and whether it still is about the files in the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.convert.opening.exported_graphs import GraphSummary
from llmconv.errors import MalformedInput
from llmconv.output.manifest import read_manifest
from llmconv.output.recorded_verdict import RecordedVerdict, parse_verdict

SHOWN = ("llmconv", "onnxruntime")
"""Libraries whose versions the table shows."""


@dataclass(frozen=True)
class VerdictSummary:
    """The verdict of the last `llmconv verify` in the manifest.

    Attributes:
        recorded: the verdict; None if it is malformed.
        changed: names of judged files that have changed since, or are missing.
        unjudged: names of graph files that the manifest lists, and that the run did not judge.
        problem: why it cannot be read; empty if it can.
    """

    recorded: RecordedVerdict | None
    changed: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    problem: str = ""

    @property
    def lines(self) -> list[str]:
        """The verdict, or first why it is out of date."""
        if self.recorded is None:
            return [f"unreadable: {self.problem}"]
        stale = [f"{', '.join(self.changed)} changed since"] if self.changed else []
        stale += [f"{', '.join(self.unjudged)} not verified"] if self.unjudged else []
        line = _line(self.recorded)
        return [f"out of date: {'; '.join(stale)}", f"before: {line}"] if stale else [line]

    def fields(self) -> dict[str, Any]:
        """Fields of `inspect --json`."""
        if self.recorded is None:
            return {"unreadable": self.problem}
        stale = {"out_of_date": bool(self.changed or self.unjudged)}
        return {**self.recorded.as_dict(), **stale, "changed": list(self.changed), "unjudged": list(self.unjudged)}


def verdict_in(folder: Path, graphs: Sequence[GraphSummary]) -> VerdictSummary | None:
    """The verdict that the manifest of a folder records; None if there is none.

    Graph files are read in full; of weight files only the size and the header are compared.

    Args:
        folder: of the graphs.
        graphs: those in its manifest.

    Raises:
        MalformedInput: the manifest is invalid.
    """
    content = read_manifest(folder).verified
    if content is None:
        return None
    try:
        recorded = parse_verdict(content)
    except MalformedInput as problem:
        return VerdictSummary(None, problem=problem.message)
    listed = {name for graph in graphs for name in graph.files}
    unjudged = sorted(listed - recorded.graphs.keys())
    return VerdictSummary(recorded, tuple(recorded.changed_files(folder)), tuple(unjudged))


def _line(recorded: RecordedVerdict) -> str:
    """Everything in one line, such as `pass, method whole, suite quick, 415 checks, llmconv 0.1.0`."""
    passed, failed, skipped = (recorded.checks[name] for name in ("passed", "failed", "skipped"))
    count = f"{failed:,} of {passed + failed:,} checks differ" if failed else f"{passed:,} checks"
    return ", ".join(
        [
            recorded.verdict,
            f"method {recorded.method}",
            f"suite {recorded.suite}",
            *([f"{len(recorded.only):,} selected scenario{'s' * (len(recorded.only) != 1)}"] if recorded.only else []),
            count,
            *([f"{skipped:,} skipped"] if skipped else []),
            *(f"{name} {recorded.versions[name]}" for name in SHOWN if name in recorded.versions),
        ]
    )
