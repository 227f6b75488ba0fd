"""report.html: verdict, location of a fault, plots and tables in one escaped file without network access."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from html import escape
from math import log10

import numpy as np

from llmconv.runtime.extra_inputs import layer_of
from llmconv.tensors import Array
from llmconv.verify.results import LINE_LIMIT, NAME_LIMIT, SUMMARY_LIMIT, Check, Report, UnmatchedNode, clean
from llmconv.verify.sigma import GATES, LOWEST, PER_DECADE, SCALE, Evidence, sigma_text

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.banner { border-radius: 8px; padding: 1rem 1.2rem; border-left: 8px solid; }
.banner.pass { background: #e9f7ee; border-color: #2e8b57; }
.banner.fail { background: #fdecea; border-color: #c0392b; }
.banner.inconclusive { background: #fff6df; border-color: #c48a00; }
.where { font-weight: 600; margin: .6rem 0 0; } .small { color: #5a6472; font-size: .88rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.verdict { font-weight: 600; } tr.fail td.verdict { color: #c0392b; } tr.pass td.verdict { color: #2e8b57; }
tr.skip td.verdict { color: #8a6d00; } svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; } .pair > div { flex: 1 1 320px; min-width: 0; }
.wide { overflow-x: auto; } .wide > svg { min-width: 720px; }
@media (max-width: 640px) { .extra { display: none; } th, td { padding: .25rem .35rem; font-size: .8rem; } }
code { background: #f2f4f7; padding: .1rem .3rem; border-radius: 4px; overflow-wrap: anywhere; }
"""
WORDS = {
    "pass": "The graphs equal the eager model",
    "quantized": "The graphs equal the eager model with their quantized weights",
    "fail": "The graphs did not pass",
    "inconclusive": "Nothing was compared",
}
ROWS = 500
FIRST = 8
NUMBERS = ("step", "sigma", "worst row", "max abs")
ALONG = "Largest sigma over all scenarios, including scaled weights, by layer and position in the sequence:"
EXPLAIN = '<p class="small">One row per scenario, graph and kind of output, with the worst of its outputs.</p>'


def render_html(report: Report, date: str) -> str:
    """The HTML page; `date` is in the format of `files.today`."""
    title = f"{report.verdict.upper()}: {report.folder}"
    body = [_banner(report, date), *_statements(report), *_failures(report), *_quantization(report)]
    graphs = dict.fromkeys(check.graph for check in report.shown() if check.output)
    failed = {check.graph for check in report.checks if check.verdict == "fail"}
    for graph in sorted(graphs, key=lambda graph: graph not in failed):
        names = " = ".join([graph, *(name for name, first in report.copies.items() if first == graph)])
        body += _graph(names, [check for check in report.checks if check.graph == graph], report.method)
        body += _error_distribution(report.evidence[graph]) if graph in report.evidence else []
        body += _unmatched(report.unmatched.get(graph, []))
    body += ["<h2>All checks</h2>", EXPLAIN, _table(report.highlights()), _about(report)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(clean(title))}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _banner(report: Report, date: str) -> str:
    where = f'<p class="where">{_text(report.where.text, LINE_LIMIT)}</p>' if report.where else ""
    notes = "".join(f'<p class="small">{_text(note, LINE_LIMIT)}</p>' for note in [*report.copy_lines(), *report.notes])
    words = WORDS["quantized" if report.quantization and report.verdict == "pass" else report.verdict]
    day, _, clock = date.removesuffix("Z").partition("T")
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return (
        f'<div class="banner {report.verdict}"><h1>{report.verdict.upper()}: {_text(report.folder)}</h1>'
        f"<div>{words}: <code>{_text(report.folder)}</code> against "
        f"<code>{_text(report.reference)}</code>, "
        f"suite {_text(report.suite)}, {_text(day)} {_text(clock)} UTC</div>{where}"
        f'<p class="small">{_text(report.summary(), SUMMARY_LIMIT)}</p>{notes}'
        f'<p class="small">{_text(versions, LINE_LIMIT)}; {_text(_machine())}</p></div>'
    )


def _statements(report: Report) -> list[str]:
    if not report.statements:
        return []
    rows = "".join(
        f'<tr class="{"pass" if one.shown else "skip"}"><td class="verdict">{one.word}</td><td>{_text(one.name)}</td>'
        f"<td>{_text(one.text, LINE_LIMIT)}</td></tr>"
        for one in report.statements
    )
    return ["<h2>What was shown</h2>", _wide(f"<table><tr><th></th><th>part</th><th>statement</th></tr>{rows}</table>")]


def _failures(report: Report) -> list[str]:
    failed = [check for check in report.highlights() if check.verdict == "fail"]
    more = f'<p class="small">and {len(failed) - FIRST} more groups of outputs, see below</p>' if failed[FIRST:] else ""
    return ["<h2>First differences</h2>", _table(failed[:FIRST]), more] if failed else []


def _quantization(report: Report) -> list[str]:
    section = report.quantization
    if section is None:
        return []
    lines = "".join(f"<p>{_text(line, LINE_LIMIT)}</p>" for line in section.lines())
    head = '<tr><th>tensor</th><th>graph</th><th>format</th><th class="number">relative error</th></tr>'
    rows = "".join(
        f"<tr><td>{_text(one['tensor'])}</td><td>{_text(one['graph'])}</td><td>{_text(one['stored'])}</td>"
        f'<td class="number">{one["relative_error"]:.2e}</td></tr>'
        for one in section.weights[:ROWS]
    )
    table = f"{_wide(f'<table>{head}{rows}</table>')}{_more(section.weights)}"
    details = f"<details><summary>All matrices</summary>{table}</details>" if rows else ""
    return [f"<h2>Loss of accuracy by quantization</h2>{lines}{details}"]


def _more(rows: Sequence[object]) -> str:
    """How many rows a table leaves out."""
    return f'<p class="small">and {len(rows) - ROWS} more in report.json</p>' if rows[ROWS:] else ""


def _graph(graph: str, checks: Sequence[Check], method: str) -> list[str]:
    curve = depth_curve(checks)
    why_empty = " Without a color: layers that are alike a layer of another column, and ran by themselves." * (
        method == "induction"
    )
    return [
        f"<h2>{_text(graph)}: sigma by scenario and layer</h2>",
        '<p class="small">Columns are layers (the worse of key and value) and the logits. Green is within the limit, '
        f"red exceeds it; hover for values.{why_empty}</p>",
        _wide(heat_map(checks)),
        f'<p class="small">Largest sigma over all scenarios, by layer:</p>{_wide(curve)}' if curve else "",
    ]


def _error_distribution(evidence: Evidence) -> list[str]:
    """Plots of errors by logits and positions, and the changed most likely tokens."""
    plots = [
        ("Histogram of the errors of logits", error_histogram(evidence)),
        ("Logits of the graph over those of the eager model", logit_scatter(evidence)),
    ]
    pairs = "".join(f'<div><p class="small">{title}:</p>{svg}</div>' for title, svg in plots if svg)
    along = position_map(evidence)
    return [
        f'<p class="small">{ALONG}</p>{_wide(along)}' if along else "",
        f'<div class="pair">{pairs}</div>' if pairs else "",
        _flips(evidence),
    ]


def _unmatched(nodes: Sequence[UnmatchedNode]) -> list[str]:
    if not nodes:
        return []
    rows = "".join(
        f"<tr><td>{_text(one.node)}</td><td>{_text(one.operator)}</td><td>{_text(one.scope)}</td></tr>"
        for one in nodes[:ROWS]
    )
    table = f"<table><tr><th>node</th><th>operator</th><th>module</th></tr>{rows}</table>"
    title = f"{len(nodes)} nodes compute values that the model does not: other code of the exporter, or a fault"
    return [f"<details><summary>{title}</summary>{_wide(table)}{_more(nodes)}</details>"]


def _flips(evidence: Evidence) -> str:
    if not evidence.rows:
        return ""
    if not evidence.flips:
        return f'<p class="small">Most likely tokens: the same in all {evidence.rows} rows.</p>'
    head = "<tr><th>scenario</th><th>row</th>" + "".join(
        f'<th class="number">{name}</th>' for name in ("margin in the eager model", "maximum explained by rounding")
    )
    rows = "".join(
        f'<tr class="{"pass" if flip.margin <= flip.noise else "fail"}"><td>{_text(flip.scenario)}</td>'
        f"<td>sequence {flip.row[0]}, token {flip.row[1]}</td>"
        f'<td class="number">{flip.margin:.2e}</td><td class="number">{flip.noise:.2e}</td></tr>'
        for flip in evidence.flips[:FIRST]
    )
    text = f"Most likely tokens that differ: {evidence.flipped} of {evidence.rows} rows, the first ones:"
    return f'<p class="small">{text}</p>{_wide(f"<table>{head}</tr>{rows}</table>")}'


def _table(checks: Sequence[Check]) -> str:
    head = "<tr><th>verdict</th><th>scenario</th><th>graph</th><th>output</th>"
    head += "".join(f'<th class="{_column(name)}">{name}</th>' for name in NUMBERS)
    table = f"<table>{head}<th>detail</th></tr>{''.join(_row(check) for check in checks[:ROWS])}</table>"
    return f"{_wide(table)}{_more(checks)}"


def _column(name: str) -> str:
    """CSS classes of a column of numbers; some columns are hidden on narrow pages."""
    return "number" if "sigma" in name or "row" in name else "number extra"


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>'


def _row(check: Check) -> str:
    numbers = (str(check.step), sigma_text(check.sigma), sigma_text(check.row_sigma), f"{check.max_abs:.1e}")
    numbers = numbers if check.is_measured else ("",) * 4
    cells = "".join(f"<td>{_text(text)}</td>" for text in (check.name, check.graph, check.output))
    pairs = zip(NUMBERS, numbers, strict=True)
    cells += "".join(f'<td class="{_column(name)}">{number}</td>' for name, number in pairs)
    cells += f"<td>{_text(check.detail)}</td>"
    return f'<tr class="{check.verdict}"><td class="verdict">{check.verdict}</td>{cells}</tr>'


def _about(report: Report) -> str:
    gates = GATES["float32"]
    seeds = report.settings.get("seeds", {})
    shown = {name: value for name, value in report.settings.items() if name not in {"gates", "seeds"}}
    if shown.get("threads") == 0:
        shown["threads"] = "one per core"
    settings = ", ".join(f"{name}: {value}" for name, value in shown.items())
    settings += f"; {len(seeds)} scenarios, seeds in report.json" if seeds else ""
    return (
        "<h2>How to read this</h2><p>sigma = RMS(graph − eager in float64) / RMS(eager in the graph's dtype − eager in "
        f"float64): the error of the graph in units of the model's own rounding noise. {SCALE} A graph in float32 "
        f"passes up to {gates.aggregate:g} over an output and up to {gates.row:g} in its worst row.</p>"
        f'<p class="small">{_text(settings)}</p>'
    )


def _machine() -> str:
    count = os.cpu_count() or 1
    return f"{platform.system()}, {platform.machine()}, {count} core{'s' * (count > 1)}"


def _text(text: str, limit: int = NAME_LIMIT) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(clean(text, limit)))


GATE = GATES["float32"].aggregate
LEFT, TOP, ROW = 310, 26, 18
WIDTH = 900
LABEL_WIDTH = 36
LAST_WIDTH = 48.0  # minimum width of the last column, whose label is a word
LABEL = 48  # maximum number of shown characters of a scenario's name
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
    title = escape(f"{clean(check.name)}, {clean(check.output)}: sigma {sigma_text(check.sigma)}, {check.verdict}")
    ink = "#fff" if check.verdict == "fail" else "#1c2430"
    form = ".2f" if check.sigma < 100 else ".0f" if check.sigma < 1e5 else ".0e"
    figure = f"{check.sigma:{form}}"
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
    columns = [CURVE_LEFT + 10 + (WIDTH - CURVE_LEFT - 20) * layer / max(1, layers - 1) for layer in range(layers)]
    parts = [_axis(top)]
    for part, style in (("key", "#2563a8"), ("value", "#b3681d")):
        points = " ".join(f"{x:.1f},{_y(sigma, top):.1f}" for x, sigma in zip(columns, series[part], strict=True))
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


def _y(sigma: float, top: float) -> float:
    """Vertical coordinate: 0.1 at the bottom, `top` near the upper edge."""
    share = (log10(max(sigma, 0.1)) + 1) / (log10(top) + 1)
    return CURVE_HEIGHT - share * (CURVE_HEIGHT - 24)


def layer_count(checks: Sequence[Check]) -> int:
    return 1 + max((layer for check in checks if (layer := layer_of(check.output)) is not None), default=-1)


def _svg(height: float, parts: Sequence[str], width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{"".join(parts)}</svg>'


PLOT_WIDTH, HEIGHT = 440, 240
PLOT_LEFT, BOTTOM, PLOT_TOP = 46, 30, 14
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
    width = (PLOT_WIDTH - PLOT_LEFT - 10) / (last - first + 1)
    top = log10(counts.max() + 1)
    parts = []
    for at in range(first, last + 1):
        height = log10(counts[at] + 1) / top * (HEIGHT - PLOT_TOP - BOTTOM)
        x, size = PLOT_LEFT + (at - first) * width, LOWEST + at / PER_DECADE
        title = f"{counts[at]:,} logits with an error from {10**size:.1e}"
        parts.append(
            f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{max(1.0, width - 1):.1f}" '
            f'height="{height:.1f}" fill="#2563a8"><title>{title}</title></rect>'
        )
        if at % PER_DECADE == 0:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}">1e{int(size)}</text>')
    parts.append(f'<text x="4" y="{PLOT_TOP + 4}">{counts.max():,}</text>')
    return _svg(HEIGHT, parts, PLOT_WIDTH)


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
        f'<circle cx="{scale(truth, PLOT_LEFT, PLOT_WIDTH - 10):.1f}" '
        f'cy="{scale(found, HEIGHT - BOTTOM, PLOT_TOP):.1f}" r="1.6" '
        f'fill="{"#2563a8" if abs(found - truth) < 0.01 * span else "#c0392b"}"/>'
        for truth, found in points
    )
    line = f'<line x1="{PLOT_LEFT}" y1="{HEIGHT - BOTTOM}" x2="{PLOT_WIDTH - 10}" y2="{PLOT_TOP}" stroke="#bbb"/>'
    labels = (
        f'<text x="{PLOT_LEFT}" y="{HEIGHT - 12}">{low:.3g}</text>',
        f'<text x="{PLOT_WIDTH - 10}" y="{HEIGHT - 12}" text-anchor="end">{high:.3g} eager</text>',
        f'<text x="4" y="{PLOT_TOP + 4}">graph</text>',
    )
    return _svg(HEIGHT, [line, *dots, *labels], PLOT_WIDTH)


def position_map(evidence: Evidence) -> str:
    """Map of the largest sigma by layer (the worse of its outputs) and position in the sequence."""
    rows = _by_layer(evidence)
    length = max((int(np.flatnonzero(row)[-1]) + 1 for row in rows.values() if row.any()), default=0)
    if not length:
        return ""
    width = (MAP_WIDTH - MAP_LEFT) / length
    parts = []
    for at, (label, row) in enumerate(rows.items()):
        y = PLOT_TOP + at * CELL
        parts.append(f'<text x="{MAP_LEFT - 6}" y="{y + CELL - 4}" text-anchor="end">{escape(label)}</text>')
        parts += [_heat_cell(label, position, sigma, width, y) for position, sigma in enumerate(row[:length]) if sigma]
    y = PLOT_TOP + len(rows) * CELL + 14
    parts.append(f'<text x="{MAP_LEFT}" y="{y}">position 0</text>')
    parts.append(f'<text x="{MAP_WIDTH}" y="{y}" text-anchor="end">{length - 1}</text>')
    return _svg(y + 6, parts, MAP_WIDTH)


def _by_layer(evidence: Evidence) -> dict[str, Array]:
    """Sigma by position for each layer, in order, then for the outputs without a layer."""
    rows: dict[str, Array] = {}
    last = 1 << 30
    for output in sorted(evidence.positions, key=lambda name: last if layer_of(name) is None else layer_of(name) or 0):
        layer = layer_of(output)
        label = output if layer is None else f"layer {layer}"
        rows[label] = np.maximum(rows.get(label, 0.0), evidence.positions[output])
    return rows


def _heat_cell(label: str, position: int, sigma: float, width: float, y: int) -> str:
    if sigma <= ROW_GATE:
        fill = f"hsl(145 45% {88 - 36 * sigma / ROW_GATE:.0f}%)"
    else:
        fill = f"hsl(4 75% {58 - 26 * min(1.0, log10(sigma) / 5):.0f}%)"
    return (
        f'<rect x="{MAP_LEFT + position * width:.1f}" y="{y}" width="{max(0.8, width - 0.5):.1f}" height="{CELL - 1}" '
        f'fill="{fill}"><title>{escape(label)}, position {position}: sigma {sigma_text(sigma)}</title></rect>'
    )
