"""llmconv.json, the manifest of an output: the steps that made it, and the size and sha256 of every file.

    {
      "manifest_version": 1,
      "steps":  [{"command": "to-hf", "llmconv": "0.1.0", "source": "ep0-ba2-rank0.pt", "options": {…}}, …],
      "files":  {"model.safetensors": {"bytes": 123, "sha256": "…"}, …},
      "graphs": {"prefill": {"file": "prefill.onnx", …}, …},           # once exported
      "verified": {"verdict": "pass", …}                               # once verified, see `recorded_verdict`
    }

It contains no time, host or absolute path, so the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from llmconv.checkpoint import own_file, parse_object, read_json
from llmconv.errors import MalformedInput
from llmconv.files.hub import source_name
from llmconv.files.safe_folder import is_inner
from llmconv.version import __version__

MANIFEST = "llmconv.json"
VERIFIED = "verified"
"""Key of the recorded verdict."""


@dataclass
class Manifest:
    """The content of `llmconv.json`, as in the module's docstring.

    Attributes:
        found: the folder was complete before the run, which wrote nothing; not stored in the file.
        verified: the recorded verdict as it is in the file, unchecked; None without one.
        unfinished: only a part was written, and nothing is published; not stored in the file.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest_version: int = 1
    found: bool = False
    unfinished: bool = False
    verified: Any = None

    def encode(self) -> bytes:
        """The file's bytes: stable key order, so equal manifests are equal files."""
        content = {
            "manifest_version": self.manifest_version,
            "steps": self.steps,
            "files": dict(sorted(self.files.items())),
            "graphs": self.graphs,
            **({VERIFIED: self.verified} if self.verified is not None else {}),
        }
        return (json.dumps(content, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, empty if there is none; raises MalformedInput for other forms, or a file outside."""
    if not (folder / MANIFEST).is_file():
        return Manifest()
    return _checked(read_json(own_file(folder, MANIFEST)))


def parse_manifest(content: bytes) -> Manifest:
    """The manifest with this content; raises MalformedInput as `read_manifest`."""
    return _checked(parse_object(content, MANIFEST))


def _checked(content: dict[str, Any]) -> Manifest:
    steps, files, graphs = (content.get(name, empty) for name, empty in (("steps", []), ("files", {}), ("graphs", {})))
    if not isinstance(steps, list) or not all(isinstance(done, dict) for done in steps):
        _refuse("`steps` is not a list of objects")
    for name, entries in (("files", files), ("graphs", graphs)):
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            _refuse(f"`{name}` is not a map of objects")
    for name, entry in files.items():
        if not is_inner(name) or not name.isprintable():
            _refuse(f"`files` names {name[:80]!r}, which is not a file of the folder")
        if not all(isinstance(entry.get(field, empty), kind) for field, kind, empty in FIELDS):
            _refuse(f"the entry of `{name[:80]}` has a field of the wrong type")
    if not all(_names_files(entry) for entry in graphs.values()):
        _refuse("`graphs` does not name plain files")
    return Manifest(steps, files, graphs, verified=content.get(VERIFIED))


FIELDS: tuple[tuple[str, type, Any], ...] = (
    ("bytes", int, 0),
    ("sha256", str, ""),
    ("link", str, ""),
    ("clone_of", str, ""),
)


def _names_files(entry: dict[str, Any]) -> bool:
    """Whether all files in a graph's entry (its own, of its stages, of a prefix) are plain names."""
    stages = entry.get("stages", [entry])
    parts = [*(stages if isinstance(stages, list) else [None]), entry.get("prefix", {})]
    return all(isinstance(part, dict) and _is_plain(part.get("file", "x")) for part in parts)


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and is_inner(name) and "/" not in name and name.isprintable()


def _refuse(problem: str) -> NoReturn:
    raise MalformedInput(f"`{MANIFEST}` is not a valid manifest: {problem}", hint="remove it, or make the folder again")


def steps_of_weights(folder: Path) -> list[dict[str, Any]]:
    """The steps that made the weights in `folder`, without exports, whose graphs are not copied with the weights."""
    return [done for done in read_manifest(folder).steps if done.get("command") != "export"]


def step(command: str, source: Path, **options: Any) -> dict[str, Any]:
    """One entry of `steps`, without options that are None, False or empty.

    Only the name of `source` is recorded; for a model of the hub `org/name@commit`.
    """
    given = {name: value for name, value in options.items() if value not in (None, (), False)}
    return {"command": command, "llmconv": __version__, "source": source_name(source), "options": given}


def file_entry(content: bytes) -> dict[str, Any]:
    """The entry of `files` for a file with this content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def link_entry(target: str) -> dict[str, Any]:
    """The entry of `files` for a symbolic link."""
    return {"link": target}


def is_file_entry(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value, such as one of a journal, has the form of `file_entry`."""
    if not isinstance(value, dict) or value.keys() != {"bytes", "sha256"}:
        return False
    size, digest = value["bytes"], value["sha256"]
    return type(size) is int and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None
