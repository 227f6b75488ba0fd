"""Inline SVG plots: errors of logits, logits of graph and model, and sigma by position in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

import numpy as np

from llmconv.runtime.cache_names import layer_of
from llmconv.tensors import Array
from llmconv.verify.results.sigma import GATES, LOWEST, PER_DECADE, Evidence

WIDTH, HEIGHT = 440, 240
LEFT, BOTTOM, TOP = 46, 30, 14
ROW_GATE = GATES["float32"].row
CELL = 15
MAP_LEFT, MAP_WIDTH = 70, 900


def error_histogram(evidence: Evidence) -> str:
    """Histogram of the errors of logits; both axes are logarithmic."""
    counts = evidence.histogram
    filled = np.flatnonzero(counts)
    if not len(filled):
        return ""
    first, last = filled[0], filled[-1]
    width = (WIDTH - LEFT - 10) / (last - first + 1)
    top = log10(counts.max() + 1)
    parts = []
    for at in range(first, last + 1):
        height = log10(counts[at] + 1) / top * (HEIGHT - TOP - BOTTOM)
        x, size = LEFT + (at - first) * width, _exponent(at)
        title = f"{counts[at]:,} logits with an error from {10**size:.1e}"
        parts.append(
            f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{max(1.0, width - 1):.1f}" '
            f'height="{height:.1f}" fill="#2563a8"><title>{title}</title></rect>'
        )
        if at % PER_DECADE == 0:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}">1e{int(size)}</text>')
    parts.append(f'<text x="4" y="{TOP + 4}">{counts.max():,}</text>')
    return _svg(WIDTH, HEIGHT, parts)


def _exponent(at: int) -> float:
    return LOWEST + at / PER_DECADE


def logit_scatter(evidence: Evidence) -> str:
    """Scatter plot of the graph's logits over the exact ones; a correct graph gives a line."""
    if not evidence.points:
        return ""
    points = np.array(evidence.points)
    low, high = float(points.min()), float(points.max())
    span = (high - low) or 1.0

    def scale(value: float, start: float, end: float) -> float:
        return start + (value - low) / span * (end - start)

    dots = (
        f'<circle cx="{scale(truth, LEFT, WIDTH - 10):.1f}" cy="{scale(found, HEIGHT - BOTTOM, TOP):.1f}" r="1.6" '
        f'fill="{"#2563a8" if abs(found - truth) < 0.01 * span else "#c0392b"}"/>'
        for truth, found in points
    )
    line = f'<line x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - 10}" y2="{TOP}" stroke="#bbb"/>'
    labels = (
        f'<text x="{LEFT}" y="{HEIGHT - 12}">{low:.3g}</text>',
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 12}" text-anchor="end">{high:.3g} eager</text>',
        f'<text x="4" y="{TOP + 4}">graph</text>',
    )
    return _svg(WIDTH, HEIGHT, [line, *dots, *labels])


def position_map(evidence: Evidence) -> str:
    """Map of the largest sigma by layer (the worse of its outputs) and position in the sequence."""
    rows = _by_layer(evidence)
    length = max((int(np.flatnonzero(row)[-1]) + 1 for row in rows.values() if row.any()), default=0)
    if not length:
        return ""
    width = (MAP_WIDTH - MAP_LEFT) / length
    parts = []
    for at, (label, row) in enumerate(rows.items()):
        y = TOP + at * CELL
        parts.append(f'<text x="{MAP_LEFT - 6}" y="{y + CELL - 4}" text-anchor="end">{escape(label)}</text>')
        parts += [_cell(label, position, sigma, width, y) for position, sigma in enumerate(row[:length]) if sigma]
    y = TOP + len(rows) * CELL + 14
    parts.append(f'<text x="{MAP_LEFT}" y="{y}">position 0</text>')
    parts.append(f'<text x="{MAP_WIDTH}" y="{y}" text-anchor="end">{length - 1}</text>')
    return _svg(MAP_WIDTH, y + 6, parts)


def _by_layer(evidence: Evidence) -> dict[str, Array]:
    """Sigma by position for each layer, in order, then for the outputs without a layer."""
    rows: dict[str, Array] = {}
    last = 1 << 30
    for output in sorted(evidence.positions, key=lambda name: last if layer_of(name) is None else layer_of(name) or 0):
        layer = layer_of(output)
        label = output if layer is None else f"layer {layer}"
        rows[label] = np.maximum(rows.get(label, 0.0), evidence.positions[output])
    return rows


def _cell(label: str, position: int, sigma: float, width: float, y: int) -> str:
    if sigma <= ROW_GATE:
        fill = f"hsl(145 45% {88 - 36 * sigma / ROW_GATE:.0f}%)"
    else:
        fill = f"hsl(4 75% {58 - 26 * min(1.0, log10(sigma) / 5):.0f}%)"
    return (
        f'<rect x="{MAP_LEFT + position * width:.1f}" y="{y}" width="{max(0.8, width - 0.5):.1f}" height="{CELL - 1}" '
        f'fill="{fill}"><title>{escape(label)}, position {position}: sigma {sigma:.2f}</title></rect>'
    )


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
