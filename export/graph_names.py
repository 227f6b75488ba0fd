"""The names of graph files: the usual ones by role, and those of `--graph-name ROLE=FILE`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UsageProblem
from llmconv.output.manifest import (
    EMBEDDINGS,
    EMBEDDINGS_ROLE,
    GRAPH_FILES,
    MTP,
    MTP_ROLE,
    SINGLE_PASS_FILES,
    VISION,
    VISION_ROLE,
)

FILES: Mapping[str, str] = {  # the usual names by role
    **GRAPH_FILES,
    **SINGLE_PASS_FILES,
    EMBEDDINGS_ROLE: EMBEDDINGS,
    VISION_ROLE: VISION,
    MTP_ROLE: MTP,
}

OPTION, SUFFIX = "--graph-name", ".onnx"
LONGEST = 200  # maximum number of bytes of a name: file systems take 255, and the number of a stage is added


def graph_names(given: Sequence[str], roles: Collection[str], layouts: Collection[str]) -> dict[str, str]:
    """File names by role, given `ROLE=FILE` each.

    `layouts` are clients with files of their own; names of the graphs of embeddings and images are fixed. Raises
    UsageProblem: there is such a client, no such role, a role or a name twice, or a name that no graph in a folder can
    have.
    """
    if given and layouts:
        raise UsageProblem(
            f"the layout `{next(iter(layouts))}` has names of its own", hint=f"leave out `{OPTION}`, or `--layout`"
        )
    found: dict[str, str] = {}
    for one in [given] if isinstance(given, str) else given:
        role, equals, name = one.partition("=")
        if not equals:
            raise UsageProblem(f"`{OPTION} {one}` is not ROLE=FILE", hint=f"for example `{OPTION} decode=step{SUFFIX}`")
        if role in (EMBEDDINGS_ROLE, VISION_ROLE):
            raise UsageProblem(
                f"`{OPTION} {one}`: the name `{FILES[role]}` is fixed", hint=f"one of: {', '.join(roles)}"
            )
        if role not in roles:
            raise UsageProblem(f"`{OPTION} {one}`: no graph `{role}` is exported", hint=f"one of: {', '.join(roles)}")
        if role in found:
            raise UsageProblem(f"`{OPTION}` is given twice for `{role}`", hint="leave out one of them")
        if problem := _problem(name):
            raise UsageProblem(f"`{OPTION} {one}`: {problem}", hint=f"for example `{OPTION} {role}=my-{role}{SUFFIX}`")
        found[role] = name
    names = [found.get(role, FILES[role]) for role in roles]
    alike = [name.casefold() for name in names]  # one file on macOS and Windows
    if double := next((name for name in names if alike.count(name.casefold()) > 1), None):
        raise UsageProblem(f"two graphs would have the name `{double}`", hint="give each a name of its own")
    return found


def _problem(name: str) -> str:
    if Path(name).name != name or "\\" in name or not name.isprintable():
        return "a name without a folder is needed"
    if not name.endswith(SUFFIX) or name == SUFFIX or name.startswith("."):
        return f"the name must end in `{SUFFIX}`"
    if len(name.encode()) > LONGEST:
        return f"a name of at most {LONGEST} bytes is needed"
    return f"`{name}` is the name of another graph" if name.casefold() in (EMBEDDINGS, VISION) else ""


def files_of(entry: dict[str, Any]) -> list[str]:
    parts = [*entry.get("stages", [entry]), entry.get("prefix", {})]
    return [part["file"] for part in parts if "file" in part]


def home_of(checkpoint: Checkpoint, source: Path) -> Path:
    """The folder of the model, or of its GGUF file `source`, into which graphs go without an output."""
    if checkpoint.format != "gguf":
        return checkpoint.path
    return source.parent if source.is_file() else source


def existing_files(
    folder: Path, recorded: Mapping[str, Any], roles: Collection[str], more: Sequence[str] = ()
) -> list[str]:
    """The graph files of these roles, by recorded manifest entries, and those of `more`, that a folder has already."""
    names = [*(name for role in roles if role in recorded for name in files_of(recorded[role])), *more]
    return [name for name in names if os.path.lexists(folder / name)]
