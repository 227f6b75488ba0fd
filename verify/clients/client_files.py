"""ClientFiles: whether the graphs and weights that a client opens are those that were verified.

The few tokens of the other checks do not show a small difference, such as that of an adapter merged at weight 0.05.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from llmconv.errors import listing
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors
from llmconv.runtime.onnxruntime.vision import VISION
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.clients.client_variants import as_for_optimum, image_variants
from llmconv.verify.clients.opened_graphs import opened_graphs
from llmconv.verify.results.report import Check

NAME = "client files"
"""Name of the check in reports."""

BLOCK = 1 << 20
"""Bytes of a weight file that are compared at a time."""

GRAPH_BYTES = (1 << 31) - 1
"""Largest graph, a limit of protobuf."""

LINKS = 8
"""Longest chain of recorded links."""

Place = tuple[str, int, tuple[int, ...], str, str]
"""Name, type and shape of a tensor, and its range of bytes in a weight file."""


@dataclass(frozen=True)
class ClientFiles:
    """The files of a folder that clients open.

    Attributes:
        verified: the graphs of this run.
        model: the model's folder.
    """

    verified: VerifiedFolder
    model: Path

    def checks(self, client: str) -> list[Check]:
        """One check; none if the client finds no graph, which it reports itself.

        Args:
            client: name of the client.

        Raises:
            MalformedInput: the configuration of the client is refused.
        """
        opened = opened_graphs(client, self.verified.path)
        if not opened:
            return []
        problems = [problem for path in opened for problem in self._problems(path)]
        if problems:
            return [Check(NAME, client, "", verdict="fail", detail=f"{client}: {'; '.join(problems)}")]
        names = [self._name(path) for path in opened]
        return [Check(NAME, client, "", detail=f"{client}: {listing(names)} as verified")]

    @cached_property
    def graphs(self) -> dict[Path, onnx.ModelProto]:
        """The verified graphs by their files."""
        folder, entries = self.verified.path, self.verified.entries
        listed = {path.name for entry in entries for path in entry.paths(folder)} | {*self.verified.models}
        read = {folder / name: _parsed((folder / name).read_bytes()) for name in listed if (folder / name).is_file()}
        return {path: graph for path, graph in read.items() if graph is not None}

    @cached_property
    def _contents(self) -> dict[str, Path | None]:
        """The verified graphs by content; a variant of one that clients need has no file of its own here."""
        variants: dict[str, Path | None] = dict.fromkeys(map(_content, image_variants(self.graphs, self.model)))
        return variants | {_content(graph): path for path, graph in self.graphs.items()}

    def _problems(self, path: Path) -> Iterator[str]:
        """What is wrong with a graph that a client opens, and with its weights."""
        name = self._name(path)
        if not path.is_file() or path.stat().st_size > GRAPH_BYTES:
            yield f"`{name}` is not a graph"
            return
        encoded = path.read_bytes()
        graph = _parsed(encoded)
        if graph is None:
            yield f"`{name}` is not an ONNX graph"
            return
        found = next((one for one in map(_content, (graph, *as_for_optimum(graph))) if one in self._contents), "")
        recorded = self._recorded(name)
        if not found and hashlib.sha256(encoded).hexdigest() != recorded:
            what = f", and its sha256 is not the one in `{MANIFEST}`" if recorded else ""
            yield f"it opens `{name}`, which is not one of the verified graphs{what}"
            return
        own = self._contents.get(found)
        yield from self._wrong_weights(path, graph, [own] if own else list(self.graphs))

    def _wrong_weights(self, path: Path, graph: onnx.ModelProto, graphs: Sequence[Path]) -> Iterator[str]:
        """The weight files of a graph that differ from those of the verified graphs."""
        expected: dict[Place, set[Path]] = {}
        for one in graphs:
            for place, file in _places(one, self.graphs[one]):
                expected.setdefault(place, set()).add(file)
        pairs: dict[Path, set[Path]] = {}
        for place, file in _places(path, graph):
            if place not in expected:
                yield f"`{self._name(path)}` has the weights `{place[0][:80]}` elsewhere than the verified graphs"
                return
            pairs[file] = pairs.get(file, expected[place]) & expected[place]
        for file, wanted in pairs.items():
            if file.exists() and not any(_are_equal(file, one) for one in wanted):
                names = listing(sorted(map(self._name, wanted))) or "one file of the verified graphs"
                yield f"the weights in `{self._name(file)}` are not those in {names}"

    def _recorded(self, name: str) -> str:
        """The sha256 in the manifest of a file, or of the file that it was a link to; empty if there is none.

        It counts for models with images alone. All variants of a decoder are compared by content, and a recorded one
        may be of an earlier export than the verified graphs.
        """
        if VISION not in self.verified.models:
            return ""
        files = read_manifest(self.verified.path).files
        for _ in range(LINKS):
            entry = files.get(name, {})
            if not (link := entry.get("link")):
                return str(entry.get("sha256") or "")
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        return ""

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self.verified.path)


def _parsed(encoded: bytes) -> onnx.ModelProto | None:
    """A graph without its weights; None for other content."""
    graph = onnx.ModelProto()
    try:
        graph.ParseFromString(encoded)
    except DecodeError:
        return None
    return graph


def _content(graph: onnx.ModelProto) -> str:
    """Equal for graphs that differ in the names of their weight files at most."""
    copy = onnx.ModelProto.FromString(graph.SerializeToString())
    for tensor in external_tensors(copy):
        for pair in tensor.external_data:
            pair.value = "" if pair.key == "location" else pair.value
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _places(path: Path, graph: onnx.ModelProto) -> Iterator[tuple[Place, Path]]:
    """Every tensor with external data, and the file with its data."""
    for tensor in external_tensors(graph):
        fields: Mapping[str, str] = external_fields(tensor)
        span = fields.get("offset", "0"), fields.get("length", "")
        yield (tensor.name, tensor.data_type, tuple(tensor.dims), *span), path.parent / fields.get("location", "")


def _are_equal(path: Path, other: Path) -> bool:
    """Whether two files have the same bytes; they are read in blocks."""
    if not path.is_file() or not other.is_file():
        return False
    if path.samefile(other):
        return True
    if path.stat().st_size != other.stat().st_size:
        return False
    with open(path, "rb") as mine, open(other, "rb") as theirs:
        while block := mine.read(BLOCK):
            if block != theirs.read(BLOCK):
                return False
    return True
