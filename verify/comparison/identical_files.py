"""Identical graph files in a folder: one is run, and its checks are repeated for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.verify.results.report import Check, Checks


def distinct(folder: Path, graphs: Sequence[OrtGraph]) -> tuple[list[OrtGraph], dict[str, list[str]]]:
    """The first graph of each content, and the names of its copies by its own name.

    Copies have the same bytes, and the same manifest entry except for the role.
    """
    firsts: dict[object, OrtGraph] = {}
    copies: dict[str, list[str]] = {}
    for graph in graphs:
        first = firsts.setdefault(graph.entry.content_key(folder), graph)
        if first is not graph:
            copies.setdefault(first.name, []).append(graph.name)
    return list(firsts.values()), copies


def with_copies(found: Checks, copies: dict[str, list[str]]) -> Checks:
    """The same checks, each followed by those of the graph's copies."""
    for checks in found:
        yield checks
        for first, names in copies.items():
            own = [check for check in checks if check.graph == first]
            yield from ([_of_copy(check, name) for check in own] for name in names)


def _of_copy(check: Check, name: str) -> Check:
    if check.verdict == "skip":  # for a reason that holds for both
        return replace(check, graph=name)
    note = f"the same bytes as {check.graph}"
    return replace(check, graph=name, detail="; ".join(part for part in (check.detail, note) if part))
