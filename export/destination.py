"""Where graphs go: into the model folder, beside the weights they map, or into a new folder with the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from llmconv.checkpoint import Checkpoint, open_weights
from llmconv.errors import InputRefused
from llmconv.export.bind import bind
from llmconv.export.layouts import Content, Dressing, Graphs, Link
from llmconv.export.trace import OPSET, TracedGraph
from llmconv.manifest import MANIFEST, Manifest, file_entry, read_manifest, steps_of_weights
from llmconv.plan import json_bytes, plan_checkpoint
from llmconv.safetensors_io import FileTensor
from llmconv.staging import (
    StagedFolder,
    failing_safely,
    link_durably,
    link_entry,
    require_free,
    sync_folder,
    write_durably,
)
from llmconv.tensors import BY_NAME, LazyTensor, cast
from llmconv.writer import write_checkpoint

GRAPH_FILES = {"prefill": "prefill.onnx", "decode": "decode.onnx", "unified": "model.onnx"}


@dataclass(frozen=True)
class Sizes:
    """Bytes of one export: of all graph files, of the weights each graph maps, of the weights that were written."""

    graphs: int
    mapped: int
    copied: int


class Destination(Protocol):
    """A place for graphs; `dressing` tells what clients want beside them."""

    @property
    def folder(self) -> Path:
        """The folder that holds the graphs afterwards."""

    def check(self, checkpoint: Checkpoint, roles: Sequence[str], dressing: Dressing) -> None:
        """Raises InputRefused where `write` could not succeed."""

    def write(
        self,
        traced: TracedGraph,
        checkpoint: Checkpoint,
        roles: Sequence[str],
        dressing: Dressing,
        step: dict[str, Any],
    ) -> Sizes:
        """Binds the graph, writes it once per role, and enters it in the manifest."""


@dataclass(frozen=True)
class InPlace:
    """The model folder itself: nothing is written but graphs, and what clients want beside them."""

    folder: Path
    dtype: str
    overwrite: bool

    def check(self, checkpoint: Checkpoint, roles: Sequence[str], dressing: Dressing) -> None:
        """Refuses links, weights of another dtype, and existing files without `overwrite`."""
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
        taken = [GRAPH_FILES[role] for role in roles if role in complete] + list(dressing.names)
        existing = [name for name in taken if os.path.lexists(self.folder / name)]
        if existing and not self.overwrite:
            raise InputRefused(f"`{self.folder / existing[0]}` already exists", hint="give `--overwrite` to replace it")

    def write(
        self,
        traced: TracedGraph,
        checkpoint: Checkpoint,
        roles: Sequence[str],
        dressing: Dressing,
        step: dict[str, Any],
    ) -> Sizes:
        """Each file by temporary file and rename; the manifest last, so that only complete sets are announced."""
        tensors = file_tensors(checkpoint)
        mapped = bind(traced, tensors)
        contents = dressing.files(_graphs(traced, tensors, roles))
        manifest = read_manifest(self.folder)
        with failing_safely():
            for name, content in contents.items():
                manifest.files[name] = self._place(name, content)
            manifest.graphs.update(_entries(traced.model, roles))
            manifest.steps = [*(old for old in manifest.steps if old != step), step]
            write_durably(self.folder / MANIFEST, manifest.encode())
            for folder in {(self.folder / name).parent for name in contents}:
                sync_folder(folder)
        return Sizes(_graph_bytes(contents), mapped, 0)

    def _place(self, name: str, content: Content) -> dict[str, Any]:
        """Writes one file or link and returns its entry in the manifest."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, Link):
            link_durably(path, content.target)
            return link_entry(content.target)
        write_durably(path, content)
        return file_entry(content)


@dataclass(frozen=True)
class NewFolder:
    """A new folder: the weights are streamed there once, cast to `dtype`, and mapped there."""

    folder: Path
    dtype: str
    max_shard_size: str
    overwrite: bool
    resume: bool

    def check(self, checkpoint: Checkpoint, roles: Sequence[str], dressing: Dressing) -> None:
        """Refuses an existing folder without `overwrite`, and one inside the model's."""
        require_free(self.folder, self.overwrite, [checkpoint.path])

    def write(
        self,
        traced: TracedGraph,
        checkpoint: Checkpoint,
        roles: Sequence[str],
        dressing: Dressing,
        step: dict[str, Any],
    ) -> Sizes:
        """Weights, side files, graphs and manifest become visible together."""
        sizes: list[Sizes] = []

        def add_graphs(staged: StagedFolder, manifest: Manifest) -> None:
            tensors = file_tensors(open_weights(staged.path))
            mapped = bind(traced, tensors)
            graphs = _graphs(traced, tensors, roles)
            contents = dressing.files(graphs)
            if fields := dressing.config(graphs):
                contents["config.json"] = json_bytes({**plan.checkpoint.config, **fields})
            for name, content in contents.items():
                if isinstance(content, Link):
                    staged.link(name, content.target)
                else:
                    staged.write_file(name, content)
            manifest.graphs = _entries(traced.model, roles)
            sizes.append(Sizes(_graph_bytes(contents), mapped, plan.nbytes))

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


def _graphs(traced: TracedGraph, tensors: Mapping[str, FileTensor], roles: Sequence[str]) -> Graphs:
    content = encode(traced.model)
    weights = tuple(sorted({tensor.path.name for tensor in tensors.values()}))
    return Graphs(dict.fromkeys(roles, content), {role: GRAPH_FILES[role] for role in roles}, weights)


def _graph_bytes(contents: Mapping[str, Content]) -> int:
    """Bytes of all graphs; links have none."""
    graphs = [content for name, content in contents.items() if name.endswith((".onnx", ".graph"))]
    return sum(len(content) for content in graphs if isinstance(content, bytes))


def _entries(model: ir.Model, roles: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The manifest's `graphs`."""
    ports = {
        "inputs": [value.name for value in model.graph.inputs],
        "outputs": [value.name for value in model.graph.outputs],
    }
    return {role: {"file": GRAPH_FILES[role], "opset": OPSET, **ports} for role in roles}
