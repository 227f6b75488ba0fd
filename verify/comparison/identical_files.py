"""Identical graph files in a folder: one is run, and its checks are repeated for the others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.verify.results.report import Check

Result = TypeVar("Result")


def distinct(folder: Path, graphs: Sequence[OrtGraph]) -> tuple[list[OrtGraph], dict[str, list[str]]]:
    """The first graph of each content, and the names of its copies by its own name.

    Copies have the same bytes, and the same manifest entry except for the role.
    """
    kept, copies = distinct_entries(folder, [graph.entry for graph in graphs])
    names = {entry.name for entry in kept}
    return [graph for graph in graphs if graph.name in names], copies


def distinct_entries(folder: Path, entries: Sequence[GraphEntry]) -> tuple[list[GraphEntry], dict[str, list[str]]]:
    """The same of graphs that are not opened; arguments as for `distinct`."""
    firsts: dict[object, GraphEntry] = {}
    copies: dict[str, list[str]] = {}
    for entry in entries:
        first = firsts.setdefault(entry.content_key(folder), entry)
        if first is not entry:
            copies.setdefault(first.name, []).append(entry.name)
    return list(firsts.values()), copies


def with_copies(
    found: Generator[list[Check], None, Result], copies: dict[str, list[str]]
) -> Generator[list[Check], None, Result]:
    """The same checks, each followed by those of the graph's copies; returns what `found` returns."""
    while True:
        try:
            checks = next(found)
        except StopIteration as end:
            result: Result = end.value
            return result
        yield checks
        for first, names in copies.items():
            own = [check for check in checks if check.graph == first]
            yield from ([_of_copy(check, name) for check in own] for name in names)


def _of_copy(check: Check, name: str) -> Check:
    if check.verdict == "skip":  # for a reason that holds for both
        return replace(check, graph=name)
    note = f"the same bytes as {check.graph}"
    return replace(check, graph=name, detail="; ".join(part for part in (check.detail, note) if part))
