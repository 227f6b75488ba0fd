"""InPlace: graphs that are added to the model folder whose weights they map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused
from llmconv.export.clients import FileContent
from llmconv.export.folders.new_folder import file_tensors, main_dtype
from llmconv.export.graph_files import GraphFiles, GraphPlan
from llmconv.export.graph_names import existing_files, files_of
from llmconv.export.graph_spec import FLOAT32
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.files.safe_folder import Folder, Link, WritableContent
from llmconv.files.safetensors_file import FileTensor
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, link_entry, read_manifest
from llmconv.output.streaming import failing_safely
from llmconv.progress import say
from llmconv.tensors import Array

BLOCK = 4096
"""Block size of most file systems, in bytes; every file takes a multiple of it."""


@dataclass(frozen=True)
class InPlace:
    """The model folder itself: only graphs and the files of clients are written.

    `dtype` is `keep`, or the dtype that its weights must have; `codes` are codes and scales of quantized weights in the
    model's own files, by name of the weight with a suffix.
    """

    checkpoint: Checkpoint
    dtype: str
    overwrite: bool = False
    resume: bool = False
    codes: Mapping[str, FileTensor] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """The model folder."""
        return self.checkpoint.path

    def check(self, plan: GraphPlan) -> None:
        """Refuses linked weights, weights of another dtype, and existing files that cannot or may not be replaced."""
        tensors = file_tensors(self.checkpoint)
        links = sorted({tensor.location for tensor in tensors.values() if tensor.path.is_symlink()})
        if links:
            raise InputRefused(
                f"`{links[0]}` is a symbolic link, which ONNX runtimes refuse to map",
                hint="give `-o OUT`: the weights are copied there once",
            )
        self.require_mappable(plan)
        graphs = {role: plan.file_names(role) for role in plan.specs}
        _require_replaceable(self.place, [*sum(graphs.values(), []), *plan.clients.names, MANIFEST])
        recorded = read_manifest(self.place).graphs
        written = [name for role in graphs if role in recorded for name in graphs[role]]
        existing = existing_files(self.place, recorded, list(graphs), [*written, *plan.clients.names])
        if existing and not self.overwrite and not self.resume:
            raise InputRefused(f"`{self.place / existing[0]}` already exists", hint="give `--overwrite` to replace it")

    def require_mappable(self, plan: GraphPlan) -> None:
        """Refuses weights of another dtype than the graphs are to map."""
        stored = {tensor.dtype.name for tensor in file_tensors(self.checkpoint).values()}
        self._require_precision(plan)
        if self.dtype != "keep" and stored != {self.dtype}:
            raise InputRefused(
                f"the weights are {', '.join(sorted(stored))}, so `--dtype {self.dtype}` cannot map them in place",
                hint="give `-o OUT`: the weights are cast there once",
            )

    def _require_precision(self, plan: GraphPlan) -> None:
        """Refuses half-precision graphs over weights that are mostly stored in another dtype."""
        precision = next(iter(plan.specs.values())).precision
        stored = main_dtype(self.checkpoint)
        if precision not in (FLOAT32, stored):
            raise InputRefused(
                f"the weights are {stored}, so graphs that compute in {precision} cannot map them in place",
                hint=f"give `-o OUT`: the weights are cast to {precision} there once"
                + (", or give `--precision float32`" if stored == FLOAT32 else ""),
            )

    def weights(self) -> Mapping[str, FileTensor]:
        """The tensors in the model's own files."""
        return {**file_tensors(self.checkpoint), **self.codes}

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> InPlace:
        """As `OutputFolder.quantized`; InputRefused for weights whose bytes in the files are not what graphs read."""
        codes: dict[str, FileTensor] = {}
        for name, tensor in self.checkpoint.items():
            weight = weights.get(name)
            found = weight.in_file(name) if weight else None
            if not isinstance(tensor, FileTensor) and not found:
                raise InputRefused(
                    f"graphs cannot map `{name}` as the model's files store it",
                    hint="give `-o OUT`: its codes are repacked there once, without a change of values",
                )
            codes |= found or {}
        return replace(self, codes=codes)

    def divided(self, parts: Mapping[str, int]) -> InPlace:
        """See `OutputFolder`: the model's files stay as they are."""
        return self

    def planned(self) -> dict[str, int]:
        """See `OutputFolder`: none."""
        return {}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        """Writes all files completely before the first of them appears; the manifest appears last."""
        manifest = read_manifest(self.place)
        before = {name for entry in manifest.graphs.values() for name in files_of(entry)}
        manifest.files |= {name: _entry(content) for name, content in files.files.items()}
        replaced = _forget_replaced(manifest, files)
        _forget_missing(manifest, self.place, files)
        manifest.graphs.update(files.entries)
        manifest.steps = [*(old for old in manifest.steps if old != step), step]
        contents: dict[str, WritableContent] = {**files.files, MANIFEST: manifest.encode()}
        if self.resume and not self.overwrite and self._is_complete(contents, before):
            return 0
        manifest.verified = None  # of the graphs before
        contents[MANIFEST] = manifest.encode()
        sizes = [len(content) if isinstance(content, bytes) else 0 for content in contents.values()]
        require_space(self.place, sum(BLOCK * -(-size // BLOCK) for size in sizes), home=self.place)
        with failing_safely(), Folder.open(self.place) as folder:
            folder.sweep()
            folder.write_together(contents)
            for name in replaced:
                folder.remove_inner(name)
        return 0

    def _is_complete(self, files: Mapping[str, WritableContent], before: set[str]) -> bool:
        """Whether every file already exists with this content; refuses graphs that were made with other options."""
        same = {name for name, content in files.items() if _exists(self.place / name, content)}
        other = sorted(name for name in (before & files.keys()) - same if os.path.lexists(self.place / name))
        if other:
            raise InputRefused(
                f"`{self.place / other[0]}` already exists, made with other options or of another model",
                hint="give `--overwrite` to replace it",
            )
        if len(same) == len(files):
            say(f"the graphs in `{self.place}` are complete: nothing to resume")
        return len(same) == len(files)


def _require_replaceable(folder: Path, names: Sequence[str]) -> None:
    """Refuses pipes, devices and folders with these names, and linked folders, before the trace."""
    with Folder.open(folder) as home:
        for name in names:
            if not (outer := name.rpartition("/")[0]) or home.find(outer):
                with home.holding(name) as (inner, last):
                    inner.require_replaceable(last)


def _exists(path: Path, content: WritableContent) -> bool:
    """Whether a file or link already exists with this content."""
    if isinstance(content, Link):
        return path.is_symlink() and os.readlink(path) == content.target
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


def _entry(content: FileContent) -> dict[str, Any]:
    """The manifest entry of a file or link."""
    return link_entry(content.target) if isinstance(content, Link) else file_entry(content)


def _forget_missing(manifest: Manifest, folder: Path, files: GraphFiles) -> None:
    """Removes the entries of graphs with deleted files, unless they are written now."""
    for role, entry in list(manifest.graphs.items()):
        gone = [name for name in files_of(entry) if name not in files.files and not (folder / name).exists()]
        if gone:
            del manifest.graphs[role]
        for name in gone:
            manifest.files.pop(name, None)


def _forget_replaced(manifest: Manifest, files: GraphFiles) -> list[str]:
    """Removes and returns files of an earlier export of the same graphs that are not written again, such as stages."""
    before = {name for role in files.entries for name in files_of(manifest.graphs.get(role, {}))}
    kept = {name for role, entry in manifest.graphs.items() if role not in files.entries for name in files_of(entry)}
    left = [name for name in sorted(before - kept - files.files.keys()) if name in manifest.files]
    for name in left:
        del manifest.files[name]
    return left
