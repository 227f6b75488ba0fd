"""Where graphs go: into the model folder, beside the weights they map, or into a new folder with the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llmconv.checkpoint import Checkpoint, open_weights
from llmconv.errors import InputRefused
from llmconv.export.graph_files import Drawing, Drawn, files_of
from llmconv.export.traced_graph import TracedGraph
from llmconv.export.weights.bind import bind, mapped_bytes
from llmconv.files.safe_folder import FileContent, Folder, Link
from llmconv.files.safetensors_file import FileTensor
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, link_entry, read_manifest, steps_of_weights
from llmconv.output.plan import json_bytes, plan_checkpoint
from llmconv.output.staging import StagedFolder, failing_safely, require_free
from llmconv.output.writer import require_space, write_checkpoint
from llmconv.progress import say
from llmconv.tensors import BY_NAME, LazyTensor, cast

BLOCK = 4096
"""Bytes that a file is rounded up to on most disks."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one export.

    Attributes:
        graphs: of all graph files.
        mapped: of the weights that the graphs map, counted once.
        copied: of the weights that were written.
    """

    graphs: int
    mapped: int
    copied: int


class Destination(Protocol):
    """A place for graphs."""

    @property
    def folder(self) -> Path:
        """The folder that holds the graphs afterwards."""

    def check(self, checkpoint: Checkpoint, drawing: Drawing) -> None:
        """Raises InputRefused where `write` could not succeed."""

    def stored(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as the folder holds it afterwards."""

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, drawing: Drawing, step: dict[str, Any]
    ) -> Sizes:
        """Binds the graphs, draws and writes their files, and enters them in the manifest.

        Args:
            graphs: by role; roles may share one.
            checkpoint: its weights.
            drawing: what becomes of them.
            step: for the manifest.
        """


@dataclass(frozen=True)
class InPlace:
    """The model folder itself: nothing is written but graphs, and what clients want beside them."""

    folder: Path
    dtype: str
    overwrite: bool
    resume: bool = False

    def check(self, checkpoint: Checkpoint, drawing: Drawing) -> None:
        """Refuses linked weights, weights of another dtype, what cannot be replaced, graphs without `overwrite`."""
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
        _require_replaceable(self.folder, [name for role in drawing.forms for name in drawing.names(role)])
        _require_replaceable(self.folder, [*drawing.dressing.names, MANIFEST])
        names = drawing.replaced(read_manifest(self.folder).graphs)
        existing = [name for name in names if os.path.lexists(self.folder / name)]
        if existing and not self.overwrite and not self.resume:
            raise InputRefused(f"`{self.folder / existing[0]}` already exists", hint="give `--overwrite` to replace it")

    def stored(self, checkpoint: Checkpoint) -> Checkpoint:
        """As it is."""
        return checkpoint

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, drawing: Drawing, step: dict[str, Any]
    ) -> Sizes:
        """All files are complete on the disk before the first of them appears; the manifest appears last."""
        tensors = file_tensors(checkpoint)
        mapped = _bind_all(graphs, tensors)
        drawn = drawing.draw(graphs, self.folder, _files(tensors))
        manifest = read_manifest(self.folder)
        before = {name for entry in manifest.graphs.values() for name in files_of(entry)}
        manifest.files |= {name: _entry(content) for name, content in drawn.files.items()}
        replaced = _forget_replaced(manifest, drawn)
        _forget_missing(manifest, self.folder, drawn)
        manifest.graphs.update(drawn.entries)
        manifest.steps = [*(old for old in manifest.steps if old != step), step]
        files: dict[str, FileContent] = {**drawn.files, MANIFEST: manifest.encode()}
        if self.resume and not self.overwrite and self._is_complete(files, before):
            return Sizes(drawn.nbytes, mapped, 0)
        sizes = [len(content) if isinstance(content, bytes) else 0 for content in files.values()]
        require_space(self.folder, sum(BLOCK * -(-size // BLOCK) for size in sizes), home=self.folder)
        with failing_safely(), Folder.open(self.folder) as folder:
            folder.sweep()
            folder.write_together(files)
            for name in replaced:
                folder.remove_inner(name)
        return Sizes(drawn.nbytes, mapped, 0)

    def _is_complete(self, files: Mapping[str, FileContent], before: set[str]) -> bool:
        """Whether every file is there as it would be written; a graph of other options is refused."""
        same = {name for name, content in files.items() if _is_there(self.folder / name, content)}
        other = sorted(name for name in (before & files.keys()) - same if os.path.lexists(self.folder / name))
        if other:
            raise InputRefused(
                f"`{self.folder / other[0]}` already exists, made with other options or of another model",
                hint="give `--overwrite` to replace it",
            )
        if len(same) == len(files):
            say(f"the graphs in `{self.folder}` are complete: nothing to resume")
        return len(same) == len(files)


@dataclass(frozen=True)
class NewFolder:
    """A new folder: the weights are streamed there once, cast to `dtype`, and mapped there."""

    folder: Path
    dtype: str
    max_shard_size: str | int
    overwrite: bool
    resume: bool

    def check(self, checkpoint: Checkpoint, drawing: Drawing) -> None:
        """Refuses an existing folder without `overwrite`, and one inside the model's."""
        require_free(self.folder, self.overwrite, [checkpoint.path], resume=self.resume)

    def write(
        self, graphs: Mapping[str, TracedGraph], checkpoint: Checkpoint, drawing: Drawing, step: dict[str, Any]
    ) -> Sizes:
        """Weights, side files, graphs and manifest become visible together."""
        sizes: list[Sizes] = []

        def add_graphs(staged: StagedFolder, manifest: Manifest) -> None:
            tensors = file_tensors(open_weights(staged.path))
            mapped = _bind_all(graphs, tensors)
            drawn = drawing.draw(graphs, staged.path, _files(tensors))
            contents = dict(drawn.files)
            if drawn.config:
                contents["config.json"] = json_bytes({**plan.checkpoint.config, **drawn.config})
            for name, content in contents.items():
                staged.write_file(name, content)
            manifest.graphs = drawn.entries
            sizes.append(Sizes(drawn.nbytes, mapped, plan.nbytes))

        plan = plan_checkpoint(self.stored(checkpoint), self.max_shard_size)
        done = write_checkpoint(
            plan,
            self.folder,
            steps=[*steps_of_weights(checkpoint.path), step],
            sources=_sources(checkpoint),
            overwrite=self.overwrite,
            resume=self.resume,
            finish=add_graphs,
        )
        return Sizes(graph_bytes(done), plan.nbytes, 0) if done.found else sizes[0]

    def stored(self, checkpoint: Checkpoint) -> Checkpoint:
        """Its weights in `dtype`, as the folder gets them."""
        if self.dtype == "keep":
            return checkpoint
        tensors = {name: cast(tensor, BY_NAME[self.dtype]) for name, tensor in checkpoint.items()}
        return replace(checkpoint, tensors=tensors, config={**checkpoint.config, "dtype": self.dtype})


def _require_replaceable(folder: Path, names: Sequence[str]) -> None:
    """Refuses before the trace what writing would refuse: pipes, devices and folders in the way, linked folders."""
    with Folder.open(folder) as home:
        for name in names:
            if not (outer := name.rpartition("/")[0]) or home.find(outer):
                with home.holding(name) as (inner, last):
                    inner.require_replaceable(last)


def file_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, FileTensor]:
    """Those tensors that lie in files as they are."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}


def _sources(checkpoint: Checkpoint) -> list[Path]:
    """The files that an export reads: weights, config and side files."""
    small = [checkpoint.path / name for name in ("config.json", *checkpoint.side_files)]
    weights = {tensor.path for tensor in file_tensors(checkpoint).values()}
    return sorted({*weights, *(path for path in small if path.is_file())})


def _bind_all(graphs: Mapping[str, TracedGraph], tensors: Mapping[str, FileTensor]) -> int:
    """Binds each graph once; returns how many bytes of weights they map together."""
    distinct = {id(traced): traced for traced in graphs.values()}.values()
    for traced in distinct:
        bind(traced, tensors)
    return mapped_bytes(distinct)


def _files(tensors: Mapping[str, FileTensor]) -> tuple[str, ...]:
    """The files that hold the weights."""
    return tuple(sorted({tensor.path.name for tensor in tensors.values()}))


def _is_there(path: Path, content: FileContent) -> bool:
    """Whether a file or link is as it would be written."""
    if isinstance(content, Link):
        return path.is_symlink() and os.readlink(path) == content.target
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


def graph_bytes(manifest: Manifest) -> int:
    """Bytes of the graphs that a manifest lists."""
    names = {name for entry in manifest.graphs.values() for name in files_of(entry)}
    return sum(manifest.files[name]["bytes"] for name in names if "bytes" in manifest.files.get(name, {}))


def _entry(content: FileContent) -> dict[str, Any]:
    """Of one file, for the manifest."""
    if isinstance(content, Link):
        return link_entry(content.target)
    assert isinstance(content, bytes)
    return file_entry(content)


def _forget_missing(manifest: Manifest, folder: Path, drawn: Drawn) -> None:
    """Graphs of which somebody has removed a file, and which are not written now."""
    for role, entry in list(manifest.graphs.items()):
        gone = [name for name in files_of(entry) if name not in drawn.files and not (folder / name).exists()]
        if gone:
            del manifest.graphs[role]
        for name in gone:
            manifest.files.pop(name, None)


def _forget_replaced(manifest: Manifest, drawn: Drawn) -> list[str]:
    """Files of an earlier export of the same graphs that this one does not write again, such as stages."""
    before = {name for role in drawn.entries for name in files_of(manifest.graphs.get(role, {}))}
    kept = {name for role, entry in manifest.graphs.items() if role not in drawn.entries for name in files_of(entry)}
    left = [name for name in sorted(before - kept - drawn.files.keys()) if name in manifest.files]
    for name in left:
        del manifest.files[name]
    return left
