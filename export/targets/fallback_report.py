"""What `export` reports about nodes that a provider leaves to the CPU: warnings, manifest fields, a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from llmconv.errors import UnsupportedInput
from llmconv.export.targets.kernels import Fallback, fallbacks
from llmconv.export.targets.presets import TARGETS
from llmconv.progress import warn_all

LINES = 8
"""Longest list of warnings."""


def find_fallbacks(model: onnx.ModelProto, target: str | None) -> list[Fallback]:
    """The nodes without a kernel; none without a target, or for one that is not compared."""
    return fallbacks(model, target) if target and TARGETS[target].compared else []


def fallback_fields(found: Sequence[Fallback]) -> dict[str, Any]:
    """The field `fallback` of a graph's manifest entry, left out if every node has a kernel."""
    return {"fallback": [one.manifest_fields() for one in found]} if found else {}


def report(found: Mapping[str, Sequence[Fallback]], target: str | None, *, strict: bool) -> None:
    """Warns of nodes without a kernel, or refuses them.

    Args:
        found: by file name; files with equal nodes share a line.
        target: the target of the graphs.
        strict: refuse instead.

    Raises:
        UnsupportedInput: there is such a node, and `strict` is given.
    """
    graphs: dict[Fallback, list[str]] = {}
    for name, fallen in found.items():
        for one in fallen:
            graphs.setdefault(one, []).append(name)
    if strict and graphs:
        kinds = list(dict.fromkeys(map(str, graphs)))
        raise UnsupportedInput(
            f"no kernel in `{target}` for {', '.join(kinds[:LINES])}{' …' if len(kinds) > LINES else ''}",
            hint="leave out `--strict-target`: these nodes then run on the CPU, with a copy of their values per call",
        )
    warn_all(_lines(graphs, target))


def _lines(graphs: Mapping[Fallback, Sequence[str]], target: str | None) -> list[str]:
    lines = [
        f"no kernel in `{target}` for {kind}: {_fallen(kind, names)}, such as `{kind.first}`"
        for kind, names in graphs.items()
    ]
    left = len(lines) - LINES + 1
    return lines if left <= 1 else [*lines[: LINES - 1], f"and {left} more kinds of nodes, see `llmconv.json`"]


def _fallen(kind: Fallback, names: Sequence[str]) -> str:
    nodes, run = ("node", "runs") if kind.count == 1 else ("nodes", "run")
    return f"{kind.count:,} {nodes} of {', '.join(names)} {run} on the CPU"
