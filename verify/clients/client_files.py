"""Whether the graphs and weights that a client opens are those that were verified.

The few tokens of the other checks do not show a small difference, such as that of an adapter merged at weight 0.05.
Which graph files a client opens in a folder follows from its configuration and its own rules of choice, read in
onnxruntime-genai 0.18 (`src/config.cpp`), optimum-onnx 0.1 (`optimum/onnxruntime/modeling_decoder.py`) and
@huggingface/transformers 4.3 (`src/models/session.js`, `src/utils/dtypes.js`).
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from llmconv.checkpoint import read_json
from llmconv.errors import listing
from llmconv.output.manifest import MANIFEST, read_manifest
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, named_files
from llmconv.runtime.onnxruntime.graph_entry import EMBEDDINGS_ROLE, VISION_ROLE
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors
from llmconv.runtime.onnxruntime.shared_buffers import EMBEDDINGS
from llmconv.runtime.onnxruntime.vision import VISION
from llmconv.verify.bisect.replay import VerifiedFolder
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
    """Compares the files that clients open in a folder with the graphs of this run; `model` is the model's folder."""

    verified: VerifiedFolder
    model: Path

    def checks(self, client: str) -> list[Check]:
        """One check; none if the client finds no graph. MalformedInput if its configuration is refused."""
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


IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Fields of `config.json` with the placeholder token."""


def as_for_optimum(graph: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """The graph with the cache inputs that optimum may need in `model.onnx`, where other clients have it without.

    Nothing is yielded for a decoder whose cache has no fixed number and size of heads.
    """
    from llmconv.export.clients import EncodedGraphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.optimum import accept_any_empty_past  # noqa: PLC0415

    encoded = graph.SerializeToString()
    past = EncodedGraphs({"unified": encoded}, {}, ()).past()
    if past and all(len(port.axes) == 4 and type(port.axes[1]) is type(port.axes[3]) is int for port in past):
        yield onnx.ModelProto.FromString(accept_any_empty_past(encoded, past))


def image_variants(graphs: Mapping[Path, onnx.ModelProto], model: Path) -> list[onnx.ModelProto]:
    """The variants of vision tower and embedding table among the graphs, for the placeholder token in `config.json`."""
    from llmconv.export.clients.genai_images import image_graphs  # noqa: PLC0415 - only for `--client`
    from llmconv.export.clients.transformersjs_images import variant  # noqa: PLC0415

    encoded = {path.name: graph.SerializeToString() for path, graph in graphs.items()}
    if VISION not in encoded or EMBEDDINGS not in encoded:
        return []
    parts = {VISION_ROLE: encoded[VISION], EMBEDDINGS_ROLE: encoded[EMBEDDINGS]}
    made = [variant(VISION_ROLE, parts[VISION_ROLE])]
    config = read_json(model / "config.json")
    tokens = [config[name] for name in IMAGE_TOKENS if type(config.get(name)) is int]
    with suppress(StopIteration, IndexError, KeyError, ValueError):  # parts of another form than GenAI's variants need
        made += image_graphs(tokens[0], parts).values()
    return [onnx.ModelProto.FromString(one) for one in made]


STANDARD_NAME = "model.onnx"
"""The file that optimum prefers, in the folder and then in any folder inside."""

JS_FOLDER, JS_CONFIG = "onnx", "transformers.js_config"

JS_SUFFIXES = {"fp32": "", "q8": "_quantized"} | {
    name: f"_{name}" for name in ("fp16", "int8", "uint8", "bnb4", "q4", "q2", "q1", "q4f16", "q2f16", "q1f16")
}
"""End of a graph's name by the `dtype` of transformers.js."""


def opened_graphs(client: str, folder: Path) -> list[Path]:
    """The files that a client opens as graphs, missing ones left out; MalformedInput if `genai_guard` refuses."""
    return [path for path in OPENED[client](folder) if path.exists()]


def _genai(folder: Path) -> list[Path]:
    """Every file that `genai_config.json` names, apart from configurations of processors."""
    return [folder / name for name in named_files(folder)] if (folder / CONFIG).is_file() else []


def _optimum(folder: Path) -> list[Path]:
    """`model.onnx`; where there is none, every graph that may be chosen instead."""
    if (folder / STANDARD_NAME).exists():
        return [folder / STANDARD_NAME]
    found = sorted(folder.rglob("*.onnx"))
    return [path for path in found if path.name == STANDARD_NAME] or found


def _transformersjs(folder: Path) -> list[Path]:
    """The graphs in `onnx/` of the variety that `config.json` selects."""
    path = folder / "config.json"
    config = read_json(path).get(JS_CONFIG) if path.is_file() else None
    dtype = _js_dtype(config if isinstance(config, dict) else {})
    return [graph for graph in sorted((folder / JS_FOLDER).glob("*.onnx")) if _is_selected(graph.stem, dtype)]


def _js_dtype(config: Mapping[str, Any]) -> Any:
    """The `dtype` of a configuration, which the section of its device overrides."""
    devices = config.get("device_config")
    own = devices.get(str(config.get("device") or "cpu")) if isinstance(devices, dict) else None
    return {**config, **(own if isinstance(own, dict) else {})}.get("dtype")


def _is_selected(stem: str, dtype: Any) -> bool:
    """Whether a graph is of the selected variety: one for all graphs, or one for each."""
    suffix = max((suffix for suffix in JS_SUFFIXES.values() if stem.endswith(suffix)), key=len)
    wanted = dtype.get(stem.removesuffix(suffix)) if isinstance(dtype, dict) else dtype
    return suffix == JS_SUFFIXES.get(wanted if isinstance(wanted, str) else "", "")


OPENED: Mapping[str, Callable[[Path], list[Path]]] = {
    "genai": _genai,
    "optimum": _optimum,
    "transformersjs": _transformersjs,
}
