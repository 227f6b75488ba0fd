"""The result of a benchmark as a table for the terminal and as CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from llmconv.argument_checks import checked
from llmconv.bench.measurement import BenchResult, Measurement
from llmconv.files.paths import Written
from llmconv.files.safe_folder import replace_file

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
    """A line for each measurement with different tokens."""
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
