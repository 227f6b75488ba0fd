"""GraphEntry: what a folder's manifest says of one graph; the runner and the verifier read it from there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmconv.errors import MalformedInput
from llmconv.manifest import read_manifest

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}


@dataclass(frozen=True)
class GraphEntry:
    """One graph of a folder.

    Attributes:
        role: `prefill`, `decode` or `unified`.
        files: its file.
        last_logits: it gives the last position only; None where there is no manifest to say so.
        postprocess: `argmax` or `topk:K` where it gives tokens and scores; empty where it gives logits.
    """

    role: str
    files: tuple[str, ...]
    last_logits: bool | None = None
    postprocess: str = ""

    @property
    def name(self) -> str:
        """What reports call the graph."""
        return self.files[0]

    def paths(self, folder: Path) -> list[Path]:
        """Its files in a folder."""
        return [folder / name for name in self.files]


def graph_entries(folder: Path) -> list[GraphEntry]:
    """The graphs of a folder: as the manifest says, else by the usual names.

    Raises:
        MalformedInput: the manifest says of a graph what cannot be.
    """
    listed = read_manifest(folder).graphs
    if not listed:
        found = {role: name for role, name in GRAPH_FILES.items() if (folder / name).is_file()}
        return [GraphEntry(role, (name,)) for role, name in found.items()]
    return [_read(role, content) for role, content in listed.items()]


def _read(role: str, content: Any) -> GraphEntry:
    if not isinstance(content, dict):
        _refuse(role, content)
    files = (content.get("file", ""),)
    postprocess = content.get("postprocess", "")
    _require_plain(role, files)
    if not isinstance(postprocess, str):
        _refuse(role, postprocess)
    return GraphEntry(role, files, bool(content.get("last_logits")), postprocess)


def _require_plain(role: str, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            _refuse(role, name)


def _refuse(role: str, found: object) -> NoReturn:
    raise MalformedInput(f"the manifest names {found!r} as the {role} graph", hint="run `llmconv export` again")
