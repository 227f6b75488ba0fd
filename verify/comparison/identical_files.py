"""Graphs of a folder that are the same file under two names: one is run, and its checks hold for both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmconv.runtime.onnxruntime.runner import OrtGraph
from llmconv.verify.results.report import Check

Add = Callable[[list[Check]], None]


def distinct(folder: Path, graphs: Sequence[OrtGraph]) -> tuple[list[OrtGraph], dict[str, list[str]]]:
    """The first graph of each content, and the names of its copies by its own.

    Copies have the same bytes, and the manifest says the same of them but for the role.
    """
    firsts: dict[object, OrtGraph] = {}
    copies: dict[str, list[str]] = {}
    for graph in graphs:
        first = firsts.setdefault(_content(folder, graph), graph)
        if first is not graph:
            copies.setdefault(first.name, []).append(graph.name)
    return list(firsts.values()), copies


def _content(folder: Path, graph: OrtGraph) -> object:
    digests = tuple(hashlib.sha256(path.read_bytes()).digest() for path in graph.entry.paths(folder))
    return digests, replace(graph.entry, role="", files=())


def adding_copies(add: Add, copies: dict[str, list[str]]) -> Add:
    """`add`, which also adds the checks of a graph for its copies."""

    def add_all(checks: list[Check]) -> None:
        add(checks)
        for first, names in copies.items():
            own = [check for check in checks if check.graph == first]
            for name in names:
                add([_of_copy(check, name) for check in own])

    return add_all


def _of_copy(check: Check, name: str) -> Check:
    note = f"the same bytes as {check.graph}"
    return replace(check, graph=name, detail="; ".join(part for part in (check.detail, note) if part))
