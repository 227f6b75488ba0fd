"""GraphEntry: the entry of one graph in a folder's manifest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from llmconv.errors import MalformedInput
from llmconv.output.manifest import read_manifest

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}
SINGLE_PASS_FILES = {"scoring": "scoring.onnx", "embed": "model.onnx", "classify": "model.onnx", "rerank": "model.onnx"}
"""Files of graphs without a cache, by role."""

EMBEDDINGS_ROLE = "embeddings"  # the role in a manifest of a separate embedding graph, see `EmbeddingGraph`
VISION_ROLE = "vision"  # the role in a manifest of the graph of a vision tower, see `VisionGraph`


@dataclass(frozen=True)
class PrefixEntry:
    """The tuned prefix that a graph inserts before the prompt."""

    file: str  # safetensors file with the trained tensor and the keys and values computed from it
    kind: str  # training method: `prefix_tuning`, `soft_prompt` or `pre_caches`
    length: int  # number of virtual tokens, by which the cache is longer than the prompt
    first_position: int  # position of the prompt's first token


@dataclass(frozen=True)
class GraphEntry:
    """One graph of a folder."""

    role: str  # `prefill`, `decode` or `unified`
    files: tuple[str, ...]  # its file, or the files of its stages in order
    last_logits: bool | None = None  # whether it returns logits of the last position only; None without a manifest
    postprocess: str = ""  # `argmax` or `topk:K` if it returns tokens and scores; empty if it returns logits
    prefix: PrefixEntry | None = None  # its tuned prefix, if any
    # extra inputs of the family that it does not have, because they always have their default
    fixed_inputs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the graph in reports: its file, or `prefill-*-of-2.onnx` for stages."""
        return self.files[0] if len(self.files) == 1 else self.files[0].replace("-1-", "-*-")

    def paths(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.files]

    def content_key(self, folder: Path) -> object:
        """Equal for graphs in a folder with the same bytes, and the same entry except for the role."""
        digests = tuple(hashlib.sha256(path.read_bytes()).digest() for path in self.paths(folder) if path.is_file())
        return digests, replace(self, role="", files=())


def graph_entries(folder: Path) -> list[GraphEntry]:
    """The decoder graphs that keep a cache, from the manifest, or by usual file names; raises MalformedInput."""
    if not (listed := _listed(folder)):
        found = {role: name for role, name in GRAPH_FILES.items() if (folder / name).is_file()}
        return [GraphEntry(role, (name,)) for role, name in found.items()]
    others = {EMBEDDINGS_ROLE, VISION_ROLE, *SINGLE_PASS_FILES}
    return [_read(role, content) for role, content in listed.items() if role not in others]


def single_pass_entries(folder: Path) -> list[GraphEntry]:
    """The graphs of a folder without a cache, from its manifest; raises MalformedInput for an invalid entry."""
    return [_read(role, content) for role, content in _listed(folder).items() if role in SINGLE_PASS_FILES]


def _listed(folder: Path) -> dict[str, Any]:
    listed = read_manifest(folder).graphs
    if not isinstance(listed, dict):
        raise MalformedInput("the manifest's `graphs` is not an object", hint="run `llmconv export` again")
    return listed


def _read(role: str, content: Any) -> GraphEntry:
    if not isinstance(content, dict):
        _refuse(role, content)
    files = _files(role, content)
    postprocess = content.get("postprocess", "")
    if not isinstance(postprocess, str):
        _refuse(role, postprocess)
    fixed = content.get("fixed_inputs", [])
    if not isinstance(fixed, list) or not all(isinstance(name, str) for name in fixed):
        _refuse(role, fixed)
    return GraphEntry(role, files, bool(content.get("last_logits")), postprocess, _prefix(role, content), tuple(fixed))


def _files(role: str, content: dict[str, Any]) -> tuple[str, ...]:
    """The plain names of `file`, or of the `stages`."""
    stages = content.get("stages", [content])
    if not isinstance(stages, list) or not stages:
        _refuse(role, stages)
    names = [stage.get("file") if isinstance(stage, dict) else None for stage in stages]
    return tuple(_plain(role, name) for name in names)


def _prefix(role: str, content: dict[str, Any]) -> PrefixEntry | None:
    found = content.get("prefix")
    if found is None:
        return None
    if not isinstance(found, dict) or found.keys() != {"file", "kind", "length", "first_position"}:
        _refuse(role, found)
    length, first = found["length"], found["first_position"]
    if not isinstance(length, int) or length < 1 or first not in (0, length):
        _refuse(role, found)
    return PrefixEntry(_plain(role, found["file"]), str(found["kind"]), length, first)


def _plain(role: str, name: Any) -> str:
    if not isinstance(name, str) or not name or Path(name).name != name:
        _refuse(role, name)
    return name


def _refuse(role: str, found: object) -> NoReturn:
    raise MalformedInput(
        f"invalid entry of the {role} graph in the manifest: {found!r}", hint="run `llmconv export` again"
    )
