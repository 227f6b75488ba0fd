"""Plots the result of a benchmark with matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.bench.measurement import BenchResult, Measurement
from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import Written
from llmconv.files.safe_folder import replace_file

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
        _write(result, path)


def _write(result: BenchResult, path: Path) -> None:
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
