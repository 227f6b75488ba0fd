"""Where graphs go: into the model folder, beside the weights they map, or into a new folder with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from llmconv.checkpoint import Checkpoint, open_weights
from llmconv.errors import InputRefused
from llmconv.export.bind import bind
from llmconv.export.form import GROWING
from llmconv.export.trace import TracedGraph
from llmconv.manifest import MANIFEST, Manifest, file_entry, read_manifest, steps_of_weights
from llmconv.plan import plan_checkpoint
from llmconv.safetensors_io import FileTensor
from llmconv.staging import StagedFolder, failing_safely, require_free, sync_folder, write_durably
from llmconv.tensors import BY_NAME, LazyTensor, cast
from llmconv.writer import write_checkpoint

GRAPH_FILES = {
    "prefill": "prefill.onnx",
    "decode": "decode.onnx",
    "unified": "model.onnx",
    "embeddings": "embeddings.onnx",
}


@dataclass(frozen=True)
class Sizes:
    """Bytes of one export: of all graph files, of the weights each graph maps, of the weights that were written."""

    graphs: int
    mapped: int
    copied: int


class Destination(Protocol):
    """A place for graphs."""

    @property
    def folder(self) -> Path:
        """The folder that holds the graphs afterwards."""

    def check(self, checkpoint: Checkpoint, roles: Sequence[str]) -> None:
        """Raises InputRefused where `write` could not succeed."""

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, step: dict[str, Any], prefixes: Sequence[str]
    ) -> Sizes:
        """Binds the graphs, writes each to the file of its role, and enters them in the manifest.

        Args:
            graphs: by role.
            checkpoint: its weights.
            step: for the manifest.
            prefixes: of the tensors' names, see `bind.match_weights`.
        """


@dataclass(frozen=True)
class InPlace:
    """The model folder itself: nothing but graphs is written."""

    folder: Path
    dtype: str
    overwrite: bool

    def check(self, checkpoint: Checkpoint, roles: Sequence[str]) -> None:
        """Refuses links, weights of another dtype, and existing graphs without `overwrite`."""
        tensors = file_tensors(checkpoint)
        links = sorted({tensor.path.name for tensor in tensors.values() if tensor.path.is_symlink()})
        if links:
            raise InputRefused(
                f"`{links[0]}` is a symbolic link, which ONNX runtimes refuse to map",
                hint="give `-o OUT`: the weights are copied there once",
            )
        stored = {tensor.dtype.name for tensor in tensors.values()}
        if self.dtype != "keep" and stored != {self.dtype}:
            raise InputRefused(
                f"the weights are {', '.join(sorted(stored))}, so `--dtype {self.dtype}` cannot map them in place",
                hint="give `-o OUT`: the weights are cast there once",
            )
        complete = read_manifest(self.folder).graphs
        existing = [
            GRAPH_FILES[role] for role in roles if role in complete and (self.folder / GRAPH_FILES[role]).exists()
        ]
        if existing and not self.overwrite:
            raise InputRefused(f"`{self.folder / existing[0]}` already exists", hint="give `--overwrite` to replace it")

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, step: dict[str, Any], prefixes: Sequence[str]
    ) -> Sizes:
        """Each graph by temporary file and rename; the manifest last, so that only complete sets are announced."""
        contents, mapped = _bound(graphs, file_tensors(checkpoint), prefixes)
        manifest = read_manifest(self.folder)
        with failing_safely():
            for role, content in contents.items():
                write_durably(self.folder / GRAPH_FILES[role], content)
                manifest.files[GRAPH_FILES[role]] = file_entry(content)
            manifest.graphs.update(_entries(graphs))
            manifest.steps = [*(old for old in manifest.steps if old != step), step]
            write_durably(self.folder / MANIFEST, manifest.encode())
            sync_folder(self.folder)
        return Sizes(sum(map(len, contents.values())), mapped, 0)


@dataclass(frozen=True)
class NewFolder:
    """A new folder: the weights are streamed there once, cast to `dtype`, and mapped there."""

    folder: Path
    dtype: str
    max_shard_size: str
    overwrite: bool
    resume: bool

    def check(self, checkpoint: Checkpoint, roles: Sequence[str]) -> None:
        """Refuses an existing folder without `overwrite`."""
        require_free(self.folder, self.overwrite)

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, step: dict[str, Any], prefixes: Sequence[str]
    ) -> Sizes:
        """Weights, side files, graphs and manifest become visible together."""
        sizes: list[Sizes] = []

        def add_graphs(staged: StagedFolder, manifest: Manifest) -> None:
            contents, mapped = _bound(graphs, file_tensors(open_weights(staged.path)), prefixes)
            for role, content in contents.items():
                staged.write_file(GRAPH_FILES[role], content)
            manifest.graphs = _entries(graphs)
            sizes.append(Sizes(sum(map(len, contents.values())), mapped, plan.nbytes))

        plan = plan_checkpoint(self._cast(checkpoint), self.max_shard_size)
        write_checkpoint(
            plan,
            self.folder,
            steps=[*steps_of_weights(checkpoint.path), step],
            sources=sorted({tensor.path for tensor in file_tensors(checkpoint).values()}),
            overwrite=self.overwrite,
            resume=self.resume,
            finish=add_graphs,
        )
        return sizes[0]

    def _cast(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.dtype == "keep":
            return checkpoint
        tensors = {name: cast(tensor, BY_NAME[self.dtype]) for name, tensor in checkpoint.items()}
        return replace(checkpoint, tensors=tensors, config={**checkpoint.config, "dtype": self.dtype})


def file_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, FileTensor]:
    """Those tensors that lie in files as they are."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}


def encode(model: ir.Model) -> bytes:
    """The bytes of an ONNX file; the same model gives the same bytes."""
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _bound(
    graphs: Mapping[str, TracedGraph], tensors: Mapping[str, FileTensor], prefixes: Sequence[str]
) -> tuple[dict[str, bytes], int]:
    """The file's content for every role, and how many bytes of weights each graph maps; roles may share a graph."""
    contents: dict[int, bytes] = {}
    mapped = 0
    for traced in graphs.values():
        if id(traced) not in contents:
            mapped = max(mapped, bind(traced, tensors, prefixes))
            contents[id(traced)] = encode(traced.model)
    return {role: contents[id(traced)] for role, traced in graphs.items()}, mapped


def _entries(graphs: Mapping[str, TracedGraph]) -> dict[str, dict[str, Any]]:
    """The manifest's `graphs`."""
    return {role: {"file": GRAPH_FILES[role], **_entry(traced)} for role, traced in graphs.items()}


def _entry(traced: TracedGraph) -> dict[str, Any]:
    graph = traced.model.graph
    ports = {"inputs": [value.name for value in graph.inputs], "outputs": [value.name for value in graph.outputs]}
    form = {} if traced.form == GROWING else {"form": traced.form.entry()}
    return {"opset": traced.form.opset, **form, **ports}
