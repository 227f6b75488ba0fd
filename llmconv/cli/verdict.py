"""What `verify` and `export --verify` share: the lines of a report; and the verification of a new export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmconv.errors import LlmconvError, UsageProblem
from llmconv.files.paths import local_only
from llmconv.hub.address import HubAddress
from llmconv.progress import status
from llmconv.stores.address import StoreAddress
from llmconv.verify.results.report import WORDS, Check, clean, lines_of

if TYPE_CHECKING:
    from llmconv.verify import Check, Report

Show = Callable[[list["Check"]], None]


def printer(*, every: bool) -> Show:
    """Prints checks as they are made: a line per finished scenario, or each check; an empty list prints the rest."""
    from llmconv.verify.results.report import lines_of

    scenarios = ScenarioLines()

    def show(checks: list[Check]) -> None:
        for line in lines_of(checks) if every else scenarios.add(checks) if checks else scenarios.close():
            status("")
            click.echo(line)

    return show


def print_report(report: Report, show: Show, *, quiet: bool, where: bool = False) -> None:
    """Prints the end of a report: the last checks and the closing lines.

    Args:
        report: of `verify`.
        show: the printer that got the checks so far.
        quiet: print the line with the verdict alone.
        where: with `quiet`, print the location of a failure, too.
    """
    show([])
    for line in report.closing_lines() if not quiet else report.short_lines() if where else [report.summary()]:
        click.echo(line)


def require_verifiable(output: Path | StoreAddress | HubAddress | None, given: Mapping[str, Any]) -> None:
    """Refuses an export that leaves nothing to verify on this machine, before anything is written.

    Args:
        output: value of `-o`; None for the model's own folder.
        given: options of `export`.

    Raises:
        UsageProblem: the output is not on this machine, or has no graphs or no weights.
    """
    if output is not None and not local_only(output):
        raise UsageProblem(
            f"`--verify` runs the graphs from a local folder, and `{output}` is not on this machine",
            hint="leave out `--verify`, or give a local `-o`, and upload the folder afterwards",
        )
    for name, problem in (("dry_run", "writes no graphs"), ("graphs_only", "writes no weights to run the graphs with")):
        if given[name]:
            raise UsageProblem(f"`--{name.replace('_', '-')}` {problem}", hint="leave it out, or leave out `--verify`")


def verify_export(folder: Path, model: str, given: Mapping[str, Any], show: Show | None) -> Report:
    """Verifies a new export with the quick suite; quantized weights are compared with those of `model`.

    Args:
        folder: that contains the graphs.
        model: that was exported.
        given: options of `export`.
        show: called with checks as they are made.

    Raises:
        LlmconvError: as `verify`; a line on stderr states that the export stays.
    """
    from llmconv.verify import verify
    from llmconv.verify.arguments import CODES

    text = given["calibrate"] if given["kv_cache"] or given["static_activations"] else None
    try:
        return verify(
            folder,
            reference=model if any(folder.glob(CODES)) else None,
            calibrate=None if text == "default" else text,
            trust_remote_code=given["trust_remote_code"],
            on_checks=show,
        )
    except LlmconvError:
        say_it_stays(folder)
        raise


def say_it_stays(folder: Path) -> None:
    """Prints to stderr that an export was kept though it was not found correct."""
    click.echo(f"the export stays in `{folder}`; `llmconv verify {folder}` verifies it again", err=True)


class ScenarioLines:
    """Collects the checks of a scenario until the next one starts."""

    def __init__(self) -> None:
        self._checks: list[Check] = []
        self._graphs: set[str] = set()

    def add(self, checks: Sequence[Check]) -> list[str]:
        """Adds checks and returns the lines of finished scenarios."""
        lines = []
        for check in checks:
            if self._checks and self._checks[0].name != check.name:
                lines += self.close()
            self._checks.append(check)
            self._graphs |= {check.graph} - {""}
        return lines

    def close(self) -> list[str]:
        """The lines of the last scenario."""
        lines, self._checks = lines_of_scenario(self._checks, several_graphs=len(self._graphs) > 1), []
        return lines


def lines_of_scenario(checks: Sequence[Check], *, several_graphs: bool = False) -> list[str]:
    """One line, and one for every group of outputs that failed and every reason for skipped checks.

    Args:
        checks: checks of one scenario.
        several_graphs: whether there are several graphs, so that the only graph of a scenario is named.
    """
    if not checks:
        return []
    failed, skipped = ([check for check in checks if check.verdict == verdict] for verdict in ("fail", "skip"))
    compared = [check for check in checks if check.verdict != "skip"]
    lines = [_line(compared, len(failed), several_graphs=several_graphs)] if compared else []
    return lines + lines_of(failed) + _of_skipped(skipped)


def _line(checks: Sequence[Check], failed: int, *, several_graphs: bool) -> str:
    """`PASSED | left padding | 18 outputs | sigma 1.02 | worst row 1.38 | max abs 7.6e-07`."""
    outputs = [check for check in checks if check.output]
    if not outputs:
        details = dict.fromkeys(check.detail or check.graph for check in checks if check.verdict == "pass")
        parts = [f"{failed} of {len(checks)} differ"] if failed else ["; ".join(details)]
        return _joined("fail" if failed else "pass", checks[0].name, parts)
    parts = [
        f"{failed} of {len(outputs)} outputs differ" if failed else f"{len(outputs)} output{'s' * (len(outputs) > 1)}"
    ]
    graphs = {check.graph for check in outputs}
    parts = [*sorted(graphs), *parts] if several_graphs and len(graphs) == 1 else parts
    sigma, row, most = (max(getattr(check, name) for check in outputs) for name in ("sigma", "row_sigma", "max_abs"))
    parts += [f"sigma {sigma:.2f}", f"worst row {row:.2f}", f"max abs {most:.1e}"] if sigma or most else []
    parts += [outputs[0].detail] if len(outputs) == 1 and not failed and outputs[0].detail else []
    return _joined("fail" if failed else "pass", checks[0].name, parts)


def _of_skipped(checks: Sequence[Check]) -> list[str]:
    """A line for every reason, with the graphs that it applies to."""
    graphs: dict[str, list[str]] = {}
    for check in checks:
        graphs.setdefault(check.detail, []).append(check.graph)
    return [
        _joined("skip", checks[0].name, [", ".join(dict.fromkeys(names)), reason]) for reason, names in graphs.items()
    ]


def _joined(verdict: str, name: str, parts: Sequence[str]) -> str:
    return " | ".join(clean(part) for part in (WORDS[verdict], name, *parts) if part)
