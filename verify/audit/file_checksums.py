"""Compares the graph files of a folder with the sha256 that the manifest recorded at the export."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.runtime.onnxruntime.embeddings import EMBEDDINGS
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, single_pass_entries
from llmconv.runtime.onnxruntime.vision import VISION
from llmconv.verify.results.report import Check

NAME = "graph file"
"""Name of the check in reports."""

UNLISTED = "is in the folder but not listed as one of its graphs; it was not verified"

WAY_OUT = "export again, or pass `--allow-changed` to verify it as it is"


def audit_graph_files(
    folder: Path, entries: Sequence[GraphEntry], models: Mapping[str, onnx.ModelProto], *, allow_changed: bool = False
) -> tuple[list[Check], list[str]]:
    """Compares every graph file with the manifest.

    Args:
        folder: the folder of the graphs.
        entries: the graphs.
        models: the graphs by name; contains the graph of the embedding table if there is one.
        allow_changed: a changed file is a note instead of a failure.

    Returns:
        A check for each graph with a recorded sha256, a skipped check for each unlisted graph file, and notes on
        allowed changes and on files without a sha256.
    """
    table = {name: [folder / name] for name in (EMBEDDINGS, VISION) if name in models}
    files = {**{entry.name: entry.paths(folder) for entry in entries}, **table}
    others = single_pass_entries(folder)  # which have checks of their own
    listed = {path.name for paths in (*files.values(), *(entry.paths(folder) for entry in others)) for path in paths}
    unlisted = sorted(path.name for path in folder.glob("*.onnx") if path.name not in listed)
    skipped = [Check(NAME, name, "", verdict="skip", detail=UNLISTED) for name in unlisted]
    if not (folder / MANIFEST).is_file():
        return skipped, [f"no `{MANIFEST}`: changes of the graphs after their export cannot be detected"]
    recorded = read_manifest(folder).files
    checks: list[Check] = []
    notes: list[str] = []
    for graph, paths in files.items():
        changed = [path.name for path in paths if _is_changed(path, recorded)]
        unknown = [path.name for path in paths if not _sha256(path, recorded)]
        notes += [
            f"`{name}` has no sha256 in `{MANIFEST}`: a change after its export cannot be detected" for name in unknown
        ]
        if changed and allow_changed:
            notes += [f"graph changed: {_text(changed)}; allowed"]
        elif changed:
            checks.append(Check(NAME, graph, "", verdict="fail", detail=f"graph changed: {_text(changed)}; {WAY_OUT}"))
        elif not unknown:
            checks.append(Check(NAME, graph, "", detail="sha256 as in the manifest"))
    return [*checks, *skipped], notes


def _is_changed(path: Path, recorded: Mapping[str, Mapping[str, Any]]) -> bool:
    expected = _sha256(path, recorded)
    if not expected:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() != expected


def _sha256(path: Path, recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """The recorded sha256; empty if there is none."""
    entry = recorded.get(path.name, {})
    return str(entry.get("sha256") or "") if isinstance(entry, dict) else ""


def _text(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    if len(quoted) == 1:
        return f"{quoted[0]} is not the graph that was exported (its sha256 differs)"
    return f"{', '.join(quoted)} are not the graphs that were exported (their sha256 differ)"
