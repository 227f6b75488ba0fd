"""Inline SVG plots: sigma by scenario and layer as a heat map, and by layer as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from llmconv.runtime.cache_names import layer_of
from llmconv.verify.results.report import Check, clean
from llmconv.verify.results.sigma import GATES

GATE = GATES["float32"].aggregate
LEFT, TOP, ROW = 310, 26, 18
WIDTH = 900
LABEL_WIDTH = 36
LAST_WIDTH = 48.0
"""Minimum width of the last column, whose label is a word."""
LABEL = 48
"""Maximum number of shown characters of a scenario's name."""
CURVE_HEIGHT = 180
CURVE_LEFT = 50


def heat_map(checks: Sequence[Check]) -> str:
    """Heat map with one row per scenario, one column per layer (the worse of key and value) and one for the logits."""
    outputs = [check for check in checks if check.output and check.verdict != "skip"]
    names = list(dict.fromkeys(check.name for check in outputs))
    columns = layer_count(outputs) + 1
    width = min(56.0, (WIDTH - LEFT - LAST_WIDTH) / max(1, columns - 1))
    worst: dict[tuple[str, int], Check] = {}
    for check in outputs:
        layer = layer_of(check.output)
        key = (check.name, columns - 1 if layer is None else layer)
        worst[key] = max(worst.get(key, check), check, key=lambda item: (item.verdict == "fail", item.sigma))
    parts = [_column_labels(columns, width)]
    for row, name in enumerate(names):
        y = TOP + row * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(clean(name, LABEL))}</text>')
        cells = [(column, worst[name, column]) for column in range(columns) if (name, column) in worst]
        sizes = {columns - 1: max(width, LAST_WIDTH)}
        parts += [_cell(check, LEFT + column * width, y, sizes.get(column, width)) for column, check in cells]
    return _svg(TOP + len(names) * ROW + 6, parts)


def _column_labels(columns: int, width: float) -> str:
    every = max(1, int(30 / width))
    labels = [(str(layer), LEFT + (layer + 0.5) * width) for layer in range(0, columns - 1, every)]
    labels.append(("logits", LEFT + (columns - 1) * width + max(width, LAST_WIDTH) / 2))
    return "".join(f'<text x="{x:.1f}" y="16" text-anchor="middle">{text}</text>' for text, x in labels)


def _cell(check: Check, x: float, y: int, width: float) -> str:
    title = escape(f"{clean(check.name)}, {clean(check.output)}: sigma {check.sigma:.2f}, {check.verdict}")
    ink = "#fff" if check.verdict == "fail" else "#1c2430"
    figure = (
        f"{check.sigma:.2f}"
        if check.sigma < 100
        else f"{check.sigma:.0f}"
        if check.sigma < 1e5
        else f"{check.sigma:.0e}"
    )
    label = f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle" fill="{ink}">{figure}</text>'
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, width - 1):.1f}" height="{ROW - 1}" fill="{color(check)}">'
        f"<title>{title}</title></rect>{label if width >= LABEL_WIDTH else ''}"
    )


def color(check: Check) -> str:
    """CSS color of a check: green if passed, paler for less noise; red if failed, darker for larger errors."""
    if check.verdict == "fail":
        depth = min(1.0, log10(max(check.sigma, 1.0)) / 5)
        return f"hsl(4 75% {58 - 26 * depth:.0f}%)"
    return f"hsl(145 45% {86 - 36 * min(1.0, check.sigma / GATE):.0f}%)"


def depth_curve(checks: Sequence[Check]) -> str:
    """Curve of the largest sigma of each layer's keys and values over all scenarios, logarithmic, with the limit."""
    layers = layer_count(checks)
    if not layers:
        return ""
    series = {part: [0.0] * layers for part in ("key", "value")}
    for check in checks:
        layer = layer_of(check.output)
        if layer is not None:
            line = series[check.output.rsplit(".", 1)[1]]
            line[layer] = max(line[layer], check.sigma)
    top = max(10.0, *(max(line) for line in series.values()))
    parts = [_axis(top)]
    for part, style in (("key", "#2563a8"), ("value", "#b3681d")):
        points = " ".join(f"{_x(layer, layers):.1f},{_y(sigma, top):.1f}" for layer, sigma in enumerate(series[part]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{style}" stroke-width="2"/>')
        label_x = WIDTH - (120 if part == "key" else 70)
        parts.append(f'<text x="{label_x}" y="14" fill="{style}">{part}s</text>')
    parts.append(f'<text x="{CURVE_LEFT}" y="{CURVE_HEIGHT + 18}">layer 0</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{CURVE_HEIGHT + 18}" text-anchor="end">layer {layers - 1}</text>')
    return _svg(CURVE_HEIGHT + 24, parts)


def _axis(top: float) -> str:
    marks = [10.0**power for power in range(-1, 1 + int(log10(top)))]
    lines = [
        f'<line x1="{CURVE_LEFT}" x2="{WIDTH}" y1="{_y(mark, top):.1f}" y2="{_y(mark, top):.1f}" stroke="#ddd"/>'
        f'<text x="{CURVE_LEFT - 6}" y="{_y(mark, top) + 4:.1f}" text-anchor="end">{mark:g}</text>'
        for mark in marks
    ]
    y = _y(GATE, top)
    gate = f'<line x1="{CURVE_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-dasharray="5 4"/>'
    return "".join(lines) + gate + f'<text x="{CURVE_LEFT + 6}" y="{y - 4:.1f}" fill="#c0392b">limit {GATE:g}</text>'


def _x(layer: int, layers: int) -> float:
    return CURVE_LEFT + 10 + (WIDTH - CURVE_LEFT - 20) * layer / max(1, layers - 1)


def _y(sigma: float, top: float) -> float:
    """Vertical coordinate: 0.1 at the bottom, `top` near the upper edge."""
    share = (log10(max(sigma, 0.1)) + 1) / (log10(top) + 1)
    return CURVE_HEIGHT - share * (CURVE_HEIGHT - 24)


def layer_count(checks: Sequence[Check]) -> int:
    """Number of layers in the names of outputs."""
    return 1 + max((layer for check in checks if (layer := layer_of(check.output)) is not None), default=-1)


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
