"""docs/calibration.md and its plot, from the data of `tools/calibrate.py`."""

from __future__ import annotations

from html import escape
from math import log10
from typing import Any

from llmconv.verify.sigma import GATES
from tools.other_checks import RULES

GATE = GATES["float32"]
WIDTH, LEFT, ROW = 900, 120, 34
LOWEST, HIGHEST = -1.0, 7.0
"""Powers of ten of sigma that the plot spans."""

HEAD = """# Calibration of the verdict

Written by `make mutants` (`tools/calibrate.py`; data: [calibration.json](calibration.json)). Tiny models of four layers
and width 64, onnxruntime {onnxruntime}, torch {torch}, transformers {transformers}. A clean run is one draw of the
weights (sizes × 0.5, 1, 2; onnxruntime's optimization all, basic, off; 1 and 2 threads) on all quick scenarios. A
mutant is one small fault in the graph ([mutants.py](../tests/builders/mutants/mutants.py)).

![sigma of clean runs and of mutants](calibration.svg)

{summary}
"""


def render_page(data: dict[str, Any]) -> str:
    """The page."""
    families = data["families"]
    clean = [run for family in families for run in family["clean"]]
    mutants = [run for family in families for run in family["mutants"]]
    right = sum(run["right_place"] for run in mutants)
    summary = (
        f"{len(clean)} clean runs, {_count(clean, 'pass', negate=True)} of them not passed; {len(mutants)} mutants, "
        f"{_count(mutants, 'fail')} caught, {right} of them bracketed at\n"
        "the right layer: its own keys or values differ first, or the next one's, or, late in the last one, the\n"
        f"logits. The gates are {GATE.aggregate:g} over an output and {GATE.row:g} in its worst row."
    )
    head = HEAD.format(**data["versions"], summary=summary)
    return "\n".join([head, *_families(families), "", *_others(clean, mutants), "", *_missed(families)]) + "\n"


def _count(runs: list[dict[str, Any]], verdict: str, negate: bool = False) -> int:
    return sum((run["verdict"] == verdict) != negate for run in runs)


def _families(families: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| family | clean runs | false alarms | largest sigma | worst row | mutants | caught | right layer "
        "| smallest sigma |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family in families:
        clean, mutants = family["clean"], family["mutants"]
        faults = [(run["sigma"], run["name"]) for run in mutants if "low bit" not in run["name"]]
        sigma, row = (max((run[key] for run in clean), default=0.0) for key in ("sigma", "row_sigma"))
        cells = [family["model_type"], len(clean), _count(clean, "pass", negate=True), f"{sigma:.2f}", f"{row:.2f}"]
        cells += [len(mutants), _count(mutants, "fail"), sum(run["right_place"] for run in mutants)]
        smallest = min((fault for fault in faults if fault[0]), default=(0.0, ""))
        lines.append(f"| {' | '.join(map(str, cells))} | {smallest[0]:.0f} ({smallest[1]}) |")
    return lines


def _others(clean: list[dict[str, Any]], mutants: list[dict[str, Any]]) -> list[str]:
    """Kill rates and false alarms of other tools' rules on the same graphs."""
    lines = [
        "## The same mutants, checked as other tools check",
        "",
        "Each rule with its own inputs and tolerance, written down once more in",
        "[other_checks.py](../tools/other_checks.py), applied to the same graphs in float32; no tool itself was run.",
        "",
        "| check | mutants caught | of clean graphs failed |",
        "|---|---|---|",
        _rate(
            "`llmconv verify`", [run["verdict"] == "fail" for run in mutants], [r["verdict"] != "pass" for r in clean]
        ),
    ]
    for rule in RULES:
        caught = [rule.name in run["others"] for run in mutants]
        alarms = [rule.name in run["alarms"] for run in clean]
        lines.append(_rate(rule.name, caught, alarms))
    return lines


def _rate(name: str, caught: list[bool], alarms: list[bool]) -> str:
    shares = (f"{sum(of)} of {len(of)} ({100 * sum(of) / max(1, len(of)):.0f} %)" for of in (caught, alarms))
    return f"| {name} | {' | '.join(shares)} |"


def _missed(families: list[dict[str, Any]]) -> list[str]:
    """Mutants by how many of the other rules catch them, the fewest first."""
    rows: dict[str, list[int]] = {}
    for family in families:
        for run in family["mutants"]:
            rows.setdefault(run["name"], []).append(len(run["others"]))
    head = f"| mutant | families | rules that catch it, of {len(RULES)} |"
    lines = ["## Mutants that other checks miss most", "", head, "|---|---|---|"]
    ordered = sorted(rows.items(), key=lambda row: (sum(row[1]) / len(row[1]), row[0]))
    return lines + [f"| {name} | {len(found)} | {sum(found) / len(found):.1f} |" for name, found in ordered[:20]]


def render_plot(data: dict[str, Any]) -> str:
    """Sigma of every run on a logarithmic axis, a row per family: clean ones green, mutants red, the gate dashed."""
    families = data["families"]
    height = 40 + ROW * len(families) + 24
    parts = [scale(height, {"": GATE.aggregate}, "sigma: clean runs (green), mutants (red)")]
    for at, family in enumerate(families):
        y = 40 + at * ROW
        parts.append(f'<text x="{LEFT - 10}" y="{y + 12}" text-anchor="end">{escape(family["model_type"])}</text>')
        parts += [dot(run["sigma"], y + 4, "#2e8b57", "clean") for run in family["clean"]]
        parts += [dot(run["sigma"], y + 14, "#c0392b", run["name"]) for run in family["mutants"] if run["sigma"]]
    return svg(WIDTH, height, parts)


def svg(width: int, height: int, parts: list[str]) -> str:
    """An SVG with a white background."""
    style = "<style>text { font: 12px sans-serif; fill: #1c2430; }</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{style}{"".join(parts)}</svg>\n'
    )


def _x(sigma: float) -> float:
    share = (log10(max(sigma, 10**LOWEST)) - LOWEST) / (HIGHEST - LOWEST)
    return LEFT + min(1.0, share) * (WIDTH - LEFT - 20)


def dot(sigma: float, y: int, color: str, title: str, *, ring: bool = False) -> str:
    """One run."""
    label = f"<title>{escape(title)}: {sigma:.2f}</title>"
    look = f'fill="none" stroke="{color}"' if ring else f'fill="{color}"'
    return f'<circle cx="{_x(sigma):.1f}" cy="{y}" r="3" {look} opacity="0.6">{label}</circle>'


def scale(height: int, gates: dict[str, float], legend: str) -> str:
    """Powers of ten, a dashed line for every gate (by what it is of), and a legend."""
    marks = "".join(
        f'<line x1="{_x(10**power):.1f}" x2="{_x(10**power):.1f}" y1="28" y2="{height - 20}" stroke="#ddd"/>'
        f'<text x="{_x(10**power):.1f}" y="{height - 6}" text-anchor="middle">1e{power}</text>'
        for power in range(int(LOWEST), int(HIGHEST) + 1)
    )
    lines = "".join(
        f'<line x1="{_x(gate):.1f}" x2="{_x(gate):.1f}" y1="20" y2="{height - 20}" stroke="#c0392b" '
        f'stroke-dasharray="5 4"/>'
        for gate in gates.values()
    )
    labels = ", ".join(f"{name} {gate:g}".strip() for name, gate in gates.items())
    texts = (
        f'<text x="{_x(max(gates.values())) + 6:.1f}" y="26">gate {labels}</text>'
        f'<text x="{LEFT}" y="14">{escape(legend)}</text>'
    )
    return marks + lines + texts
