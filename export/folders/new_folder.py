"""Where an export writes: into the model folder whose weights the graphs map, or into a new folder with the weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from llmconv.checkpoint import Checkpoint
from llmconv.export.graph_files import GraphFiles, GraphPlan
from llmconv.export.graph_spec import FLOAT32
from llmconv.export.quantization.block_rounding import NONE
from llmconv.export.quantization.joined_products import side_by_side
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.files.paths import local_only
from llmconv.files.safetensors_file import FileTensor, encode_header
from llmconv.output.manifest import steps_of_weights
from llmconv.output.plan import MODEL, Plan, Shard, json_bytes, plan_checkpoint
from llmconv.output.store_folder import refuse_links
from llmconv.output.writer import Place, check_output, destination_of, write_checkpoint
from llmconv.progress import warn
from llmconv.tensors import BY_NAME, Array, Flushed, LazyTensor, cast

QUANTIZED = "quantized"
"""Beginning of the names of weight files that a Hugging Face model cannot be loaded from."""


class OutputFolder(Protocol):
    """The folder that an export writes into."""

    @property
    def place(self) -> Place:
        """The folder that contains the graphs afterwards."""

    def check(self, plan: GraphPlan) -> None:
        """Raises InputRefused if `write` could not succeed."""

    def weights(self) -> Mapping[str, FileTensor]:
        """Where each tensor will be once `write` has returned."""

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> OutputFolder:
        """The folder with codes, scales and zero points instead of these weights.

        `importance` is of columns; all count alike in weights left out. `smoothing` has factors of weights, and of the
        norms that are divided by them.
        """

    def divided(self, parts: Mapping[str, int]) -> OutputFolder:
        """The folder with tensors whose numbers in `parts` differ in different files, as far as it writes them."""

    def planned(self) -> dict[str, int]:
        """Bytes of the weights and other files of the model that `write` writes, by name."""

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        """Writes files and manifest entries, `step` that of this export; returns the bytes of weights written."""


@dataclass(frozen=True)
class NewFolder:
    """A new folder: the weights are streamed there once, cast to `dtype`, and mapped there.

    Attributes:
        dtype: `keep`, or the dtype to store the weights in.
        max_shard_size: largest safetensors file, such as `5GB`.
        kept: pattern of the names of tensors that keep their dtype.
        codes: what is stored instead of quantized weights, by name of the weight with a suffix.
        parts: numbers by name of a tensor; those with different numbers are in different files.
    """

    place: Place
    checkpoint: Checkpoint
    dtype: str
    max_shard_size: str | int
    overwrite: bool
    resume: bool
    kept: re.Pattern[str] | None = None
    codes: Mapping[str, LazyTensor] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    _flushed: Flushed = field(default_factory=Flushed)

    def check(self, plan: GraphPlan) -> None:
        """Refuses an existing folder without `overwrite`, one inside of the model folder, and too small a disk."""
        if plan.options.quantization and not self.codes:  # the size of the codes is not known yet
            target = destination_of(self.place)
            target.require_free(self.overwrite, [self.checkpoint.path], resume=self.resume)
            return
        check_output(self._plan, self.place, self.overwrite, [self.checkpoint.path], resume=self.resume)

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> NewFolder:
        """See `OutputFolder`."""
        tensors: dict[str, LazyTensor] = {}
        codes: dict[str, LazyTensor] = {}
        parts = dict(self.parts)
        for name, tensor in self.checkpoint.items():
            if weight := weights.get(name):
                factors = smoothing.matrices.get(name, NONE)
                made = weight.stored(name, tensor, importance.get(name, NONE), factors)
                parts |= dict.fromkeys(made, parts.get(name, 0))
                codes |= made
                tensors |= made
            elif name in smoothing.norms:
                made = smoothing.norm(name, tensor)
                codes |= made
                tensors |= made
            else:
                tensors[name] = tensor
        ordered = side_by_side(tensors, [weight.group for weight in weights.values()])
        return replace(self, checkpoint=replace(self.checkpoint, tensors=ordered), codes=codes, parts=parts)

    def divided(self, parts: Mapping[str, int]) -> NewFolder:
        """See `OutputFolder`."""
        return replace(self, parts=parts)

    def weights(self) -> Mapping[str, FileTensor]:
        """The tensors in the shards that `write` writes."""
        home = local_only(self.place) or Path(self.place.name)  # of an address only the names of files are used
        return {name: tensor for shard in self._plan.shards for name, tensor in _placed(shard, home).items()}

    def planned(self) -> dict[str, int]:
        """See `OutputFolder`."""
        small = {name: len(content) for name, content in self._plan.small_files.items()}
        return {**{shard.name: _file_bytes(shard) for shard in self._plan.shards}, **small}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        """Writes weights, side files, graphs and manifest, which become visible together."""
        contents = dict(files.files)
        if files.config:
            contents["config.json"] = json_bytes({**self._plan.checkpoint.config, **files.config})
        if not isinstance(self.place, Path):
            refuse_links(contents)
        done = write_checkpoint(
            self._plan,
            self.place,
            steps=[*steps_of_weights(self.checkpoint.path), step],
            sources=sources_of(self.checkpoint),
            overwrite=self.overwrite,
            resume=self.resume,
            more_files=contents,
            graphs=files.entries,
        )
        if self._flushed.count:
            warn(f"{self._flushed.count:,} weights are too small for {self.dtype} and became zero")
        return 0 if done.found else self._plan.nbytes

    @cached_property
    def _plan(self) -> Plan:
        checkpoint = self.checkpoint
        if self.dtype != "keep":
            dtype = BY_NAME[self.dtype]
            kept = {name: tensor for name, tensor in checkpoint.items() if self.kept and self.kept.search(name)}
            kept |= self.codes
            tensors = {name: cast(tensor, dtype, name, self._flushed) for name, tensor in checkpoint.items()} | kept
            checkpoint = replace(checkpoint, tensors=tensors, config={**checkpoint.config, "dtype": self.dtype})
        return plan_checkpoint(checkpoint, self.max_shard_size, QUANTIZED if self.codes else MODEL, self.parts)


def main_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    """The dtype of most bytes of weights that are stored as they are."""
    sizes: Counter[str] = Counter()
    for tensor in file_tensors(tensors).values():
        sizes[tensor.dtype.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else FLOAT32


def file_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, FileTensor]:
    """The tensors that are stored unchanged in files."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}


def _placed(shard: Shard, folder: Path) -> dict[str, FileTensor]:
    """The tensors of a shard where they will be in `folder`; a copied shard keeps the offsets of the original."""
    home, path = shard.prefix, folder / shard.name
    if shard.copy_of:
        stored = file_tensors(shard.tensors).items()
        return {home + n: FileTensor(path, t.offset, t.dtype, t.shape, location=shard.name) for n, t in stored}
    placed, offset = {}, len(encode_header({name: (t.dtype, t.shape) for name, t in shard.tensors.items()}))
    for name, tensor in shard.tensors.items():
        placed[home + name] = FileTensor(path, offset, tensor.dtype, tensor.shape, location=shard.name)
        offset += tensor.nbytes
    return placed


def _file_bytes(shard: Shard) -> int:
    """Size of a shard's file, with its header."""
    if shard.copy_of:
        return shard.copy_of.stat().st_size
    return len(encode_header({name: (t.dtype, t.shape) for name, t in shard.tensors.items()})) + shard.nbytes


def sources_of(checkpoint: Checkpoint) -> list[Path]:
    """The files that an export reads: weights, config and side files."""
    small = [checkpoint.path / name for name in ("config.json", *checkpoint.side_files)]
    weights = {tensor.path for tensor in file_tensors(checkpoint).values()}
    return sorted({*weights, *(path for path in small if path.is_file())})
