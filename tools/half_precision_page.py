"""The half-precision part of docs/calibration.md and its plot, from the data of `tools/half_precision_runs.py`."""

from __future__ import annotations

from html import escape
from typing import Any

from llmconv.verify.sigma import GATES
from tests.builders.mutants.mutants import VOID_IN
from tools.calibration_page import LEFT, ROW, WIDTH, dot, scale, svg

Runs = list[dict[str, Any]]

HEAD = """## In half precision

A graph in float16 or bfloat16 is judged twice: as it is, against the noise of the model in that precision, and as a
float32 copy with the same weights, against the noise and the gates of float32. `as it is` includes a few scenarios with
every value rounded; bfloat16 is computed that way altogether. The graphs are float32 exports converted to half
precision, norms and rotary angles excepted, as transformers computes them
([half_precision.py](../tests/builders/half_precision.py)); weights are as they were made, then drawn as above,
and rounded; each draw runs at onnxruntime's optimization all, basic and off
(on one thread; mostly with the same figures).

The gate of an output is 1.5 times the largest sigma of a clean run, rounded up; that of a row 2.4 times the largest, as
in float32: in a genuine model rows scatter more than in these. onnxruntime's CPU computes most float16 nodes in
float32, which is why sigma there is near one and below.

![sigma in half precision](calibration-half.svg)
"""


def half_lines(halves: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A table by precision, and the mutants that half precision hides."""
    lines = [HEAD]
    for dtype, families in halves.items():
        lines += [
            f"### {dtype}",
            "",
            _summary(dtype, families),
            "",
            *_table(dtype, families),
            "",
            *_hidden(dtype, families),
        ]
    return lines


def _summary(dtype: str, families: list[dict[str, Any]]) -> str:
    clean, mutants = _all(families, "clean"), _all(families, "mutants")
    gates = GATES[dtype]
    false = sum(not _passes(run, dtype) for run in clean)
    sides = [sum(side(run, dtype) for run in mutants) for side in (_half_fails, _wide_fails, _fails)]
    void = "; ".join(sorted(VOID_IN[dtype]))
    return (
        f"{len(clean)} clean runs, {false} of them not passed; {len(mutants)} mutants, {sides[2]} caught: {sides[0]} "
        f"by the graph as it is, {sides[1]} by its float32 copy, the rest by the weight audit. The gates are "
        f"{gates.aggregate:g} over an output and {gates.row:g} in its worst row. Left out are mutants that are no "
        f"fault in {dtype}: {void}."
    )


def _all(families: list[dict[str, Any]], key: str) -> Runs:
    return [run for family in families for run in family[key]]


def _passes(run: dict[str, Any], dtype: str) -> bool:
    """Whether a clean run passed, and is within the gates as they are now, on both sides."""
    half, wide = GATES[dtype], GATES["float32"]
    within = run["verdict"] == "pass" and run["sigma"] <= half.aggregate and run["row_sigma"] <= half.row
    return bool(within and run["wide_sigma"] <= wide.aggregate and run["wide_row_sigma"] <= wide.row)


def _half_fails(run: dict[str, Any], dtype: str) -> bool:
    gates = GATES[dtype]
    return bool(run["plain"] or run["sigma"] > gates.aggregate or run["row_sigma"] > gates.row)


def _wide_fails(run: dict[str, Any], dtype: str) -> bool:
    return "float32" in run["caught_by"]


def _fails(run: dict[str, Any], dtype: str) -> bool:
    return _half_fails(run, dtype) or bool({"float32", "audit"} & set(run["caught_by"]))


def _table(dtype: str, families: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| family | clean runs | false alarms | largest sigma | worst row | of the copy | worst row | mutants | caught "
        "| as it is | by the copy | right layer |",
        "|" + "---|" * 12,
    ]
    for family in families:
        clean, mutants = family["clean"], family["mutants"]
        largest = [max((run[key] for run in clean), default=0.0) for key in SIGMAS]
        cells = [family["model_type"], len(clean), sum(not _passes(run, dtype) for run in clean)]
        cells += [f"{value:.2f}" for value in largest]
        cells += [len(mutants)] + [
            sum(side(run, dtype) for run in mutants) for side in (_fails, _half_fails, _wide_fails)
        ]
        cells += [sum(run["right_place"] for run in mutants)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


SIGMAS = ("sigma", "row_sigma", "wide_sigma", "wide_row_sigma")


def _hidden(dtype: str, families: list[dict[str, Any]]) -> list[str]:
    """Mutants that pass as they are, with their sigma there and in the copy."""
    rows: dict[str, Runs] = {}
    for run in _all(families, "mutants"):
        rows.setdefault(run["name"], []).append(run)
    hidden = {name: [run for run in runs if not _half_fails(run, dtype)] for name, runs in rows.items()}
    head = [
        f"Faults that {dtype} hides, at least in some family:",
        "",
        "| mutant | hidden in | sigma as it is | sigma of the copy | caught by |",
        "|---|---|---|---|---|",
    ]
    lines = []
    for name, runs in sorted(hidden.items(), key=lambda item: max((r["sigma"] for r in item[1]), default=0.0)):
        if runs:
            half = max(run["sigma"] for run in runs)
            wide = min(run["wide_sigma"] for run in runs)
            by = sorted({side for run in runs for side in run["caught_by"]} - {"half"})
            families_said = f"{len(runs)} of {len(rows[name])} families"
            lines.append(f"| {name} | {families_said} | {half:.2f} | {wide:,.0f} | {', '.join(by) or 'nothing'} |")
    return [*head, *lines, ""]


def render_half_plot(halves: dict[str, list[dict[str, Any]]]) -> str:
    """Sigma as it is, two rows per family: clean runs green; mutants red, hidden ones also in the copy, as rings."""
    rows = [(dtype, family) for dtype, families in halves.items() for family in families]
    height = 40 + ROW * len(rows) + 24
    gates = {dtype: GATES[dtype].aggregate for dtype in halves}
    parts = [scale(height, gates, "sigma: clean runs (green), mutants as they are (red) and as float32 copies (rings)")]
    for at, (dtype, family) in enumerate(rows):
        y = 40 + at * ROW
        label = escape(f"{family['model_type']}, {dtype}")
        parts.append(f'<text x="{LEFT - 10}" y="{y + 12}" text-anchor="end" font-size="10">{label}</text>')
        parts += [dot(run["sigma"], y + 4, "#2e8b57", "clean") for run in family["clean"]]
        for run in family["mutants"]:
            parts.append(dot(run["sigma"], y + 14, "#c0392b", run["name"]))
            parts.append(dot(run["wide_sigma"], y + 22, "#c0392b", f"{run['name']}, float32 copy", ring=True))
    return svg(WIDTH, height, parts)
