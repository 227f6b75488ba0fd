"""The figures of `bench` by batch size, prompt length and candidate, as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.safe_folder import replace_file


@dataclass
class Measurement:
    """One candidate at one batch size and length, with one figure per round.

    Attributes:
        candidate: its name.
        batch: number of prompts.
        length: tokens of each prompt.
        first: seconds to the first token.
        step: seconds per step after the first token; a step gives one token of every prompt.
        peak: largest resident set of its process, in bytes.
        differs: row and index of the earliest new token that differs from the first candidate's; None if none does.
        error: why there are no figures; empty if there are.
    """

    candidate: str
    batch: int
    length: int
    first: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    peak: int = 0
    differs: tuple[int, int] | None = None
    error: str = ""

    def take(self, answer: dict[str, Any]) -> None:
        """Adds the answer of a worker."""
        times = answer["times"]
        self.first.append(times[0])
        if len(times) > 1:
            self.step.append((times[-1] - times[0]) / (len(times) - 1))
        self.peak = max(self.peak, answer["peak"])

    @property
    def prefill(self) -> list[float]:
        """Prompt tokens per second until the first new token, for every round."""
        return [self.batch * self.length / seconds for seconds in self.first]

    @property
    def decode(self) -> list[float]:
        """New tokens per second after the first, over all rows, for every round."""
        return [self.batch / seconds for seconds in self.step]

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON and CSV: median, minimum and maximum."""
        return {
            "candidate": self.candidate,
            "batch_size": self.batch,
            "length": self.length,
            **_summary("prefill_tokens_per_second", self.prefill),
            **_summary("decode_tokens_per_second", self.decode),
            **_summary("time_to_first_token", self.first),
            **_summary("seconds_per_step", self.step),
            "peak_bytes": self.peak,
            "differs_from_token": self.differs[1] if self.differs else None,
            "error": self.error,
        }


@dataclass(frozen=True)
class BenchResult:
    """All measurements, by batch size, then length, then candidate.

    Attributes:
        candidates: names; the others are compared with the first.
        versions: candidate to package to version.
        cells: the measurements.
        new: number of new tokens after each prompt.
        repeat: number of rounds.
        threads: threads of each candidate.
    """

    candidates: list[str]
    versions: dict[str, dict[str, str]]
    cells: list[Measurement]
    new: int
    repeat: int
    threads: int

    def __repr__(self) -> str:
        names, tokens = ", ".join(self.candidates), "same tokens" if self.agrees else "different tokens"
        return f"<BenchResult of {names}: {len(self.cells)} measurements, {tokens}>"

    @property
    def agrees(self) -> bool:
        """Whether all candidates that ran gave the same tokens."""
        return not any(cell.differs for cell in self.cells)

    def cell(self, candidate: str, batch: int, length: int) -> Measurement:
        """The measurement of a candidate at a batch size and length."""
        place = candidate, batch, length
        return next(cell for cell in self.cells if (cell.candidate, cell.batch, cell.length) == place)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "new_tokens": self.new,
            "repeat": self.repeat,
            "threads": self.threads,
            "versions": self.versions,
            "same_tokens": self.agrees,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Row and index of the earliest token that differs; None if all are the same."""
    places = [
        (at, row)
        for row, (a, b) in enumerate(zip(expected, found, strict=True))
        for at in range(max(len(a), len(b)))
        if at >= min(len(a), len(b)) or a[at] != b[at]
    ]
    return (min(places)[1], min(places)[0]) if places else None


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    figures = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return dict(zip((name, f"{name}_min", f"{name}_max"), figures, strict=True))


HEAD = ("batch", "length", "candidate", "prompt tokens/s", "new tokens/s", "times first's", "peak MB", "tokens")


def table(result: BenchResult) -> str:
    """Medians, with minimum and maximum in brackets; `times first's` compares new tokens per second."""
    rows = [HEAD, *(_row(result, cell) for cell in result.cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    versions = [f"{name}: {', '.join(f'{p} {v}' for p, v in found.items())}" for name, found in result.versions.items()]
    numbers = (result.new, "new token"), (result.threads, "thread"), (result.repeat, "round")
    new, threads, rounds = (f"{count} {noun}{'s' * (count != 1)}" for count, noun in numbers)
    setting = f"{new}, greedy, {threads}, {rounds} in turn"
    return "\n".join([*lines, "", f"{setting}; median (min-max)", *versions, *_differences(result)])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text.ljust(width) if HEAD[at] in ("candidate", "tokens") else text.rjust(width)
        for at, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _row(result: BenchResult, cell: Measurement) -> tuple[str, ...]:
    place = str(cell.batch), str(cell.length), cell.candidate
    if cell.error:
        return (*place, "-", "-", "-", "-", f"failed: {cell.error}")
    first = result.cell(result.candidates[0], cell.batch, cell.length)
    ratio = f"{statistics.median(cell.decode) / statistics.median(first.decode):.2f}" if first.decode else "-"
    tokens = "same" if cell.differs is None else f"differ from {cell.differs[1]} on"
    return (*place, _figures(cell.prefill), _figures(cell.decode), ratio, f"{cell.peak / 1e6:.0f}", tokens)


def _figures(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else "-"


def _differences(result: BenchResult) -> list[str]:
    return [
        f"DIFFERENT TOKENS: {cell.candidate} at batch {cell.batch}, length {cell.length}: "
        f"row {cell.differs[0]} differs from {result.candidates[0]}'s from new token {cell.differs[1]} on"
        for cell in result.cells
        if cell.differs
    ]


@checked
def write_csv(result: BenchResult, path: Written) -> None:
    """Writes one line per measurement, with the versions of the packages."""
    rows = [
        {**cell.as_dict(), "versions": " ".join(f"{p}={v}" for p, v in result.versions[cell.candidate].items())}
        for cell in result.cells
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    replace_file(Path(path), text.getvalue().encode())


SUFFIXES = (".png", ".svg", ".pdf")
PANELS = (("prefill", "prompt tokens/s"), ("decode", "new tokens/s"))


@checked
def require_plotting(path: Written) -> None:
    """Raises InputRefused or UsageProblem, before any measurement, if matplotlib or the suffix is not supported."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageProblem(f"`{path}` is not a supported picture format", hint=f"end the name in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputRefused("`--plot` needs matplotlib", hint="`pip install matplotlib`, or `--csv FILE`")


@checked
def write_plot(result: BenchResult, path: Written) -> None:
    """Plots tokens per second over prompt length, one row per batch size; bars show minimum and maximum."""
    path = Path(path)
    require_plotting(path)
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # it has read a `matplotlibrc` of the current folder, which may start TeX
        figure_module = importlib.import_module("matplotlib.figure")
        batches = sorted({cell.batch for cell in result.cells})
        figure = figure_module.Figure(figsize=(11, 4 * len(batches)), layout="constrained")
        panels = figure.subplots(len(batches), len(PANELS), squeeze=False)
        for row, batch in zip(panels, batches, strict=True):
            for axes, (kind, label) in zip(row, PANELS, strict=True):
                _draw(axes, [cell for cell in result.cells if cell.batch == batch], result.candidates, kind)
                axes.set(title=f"batch size {batch}", xlabel="tokens of the prompt", ylabel=label)
        panels[0][0].legend(fontsize="small")
        replace_file(path, lambda file: figure.savefig(file, dpi=150, format=path.suffix[1:].lower()))


def _draw(axes: Any, cells: Sequence[Measurement], candidates: Sequence[str], kind: str) -> None:
    lengths = sorted({cell.length for cell in cells})
    for name in candidates:
        curve = [(cell.length, getattr(cell, kind)) for cell in cells if cell.candidate == name and getattr(cell, kind)]
        middles = [statistics.median(values) for _, values in curve]
        spread = [
            [middle - min(values) for middle, (_, values) in zip(middles, curve, strict=True)],
            [max(values) - middle for middle, (_, values) in zip(middles, curve, strict=True)],
        ]
        axes.errorbar([length for length, _ in curve], middles, yerr=spread, marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
