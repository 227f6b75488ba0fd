"""Where an export writes: into the model folder whose weights the graphs map, or a new folder with weights or without.

All three have a `place`, the folder that contains the graphs afterwards; `check` raises InputRefused if `write` could
not succeed; `weights` says where each tensor will be once `write` has returned; `planned` are the bytes of the model's
files that it writes, by name; `write` takes the graphs and the manifest's entry of the export, and returns the bytes
of weights written. `quantized` is the folder with codes, scales and zero points instead of these weights: `importance`
is of columns, which count alike in weights left out, and `smoothing` has factors of weights and of the norms that are
divided by them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmconv.checkpoint import INDEX, Checkpoint, own_file, read_small
from llmconv.errors import InputRefused
from llmconv.export.graph_files import GraphFiles, GraphPlan
from llmconv.export.graph_spec import FLOAT32
from llmconv.files.paths import local_only
from llmconv.files.safe_folder import Folder, Link, WritableContent, refuse_links
from llmconv.files.safetensors_file import RANGES, FileTensor, encode_header
from llmconv.files.weight_ranges import Mapped, encode_ranges, placed, require_mapped
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import (
    MANIFEST,
    existing_files,
    file_entry,
    files_of,
    link_entry,
    read_manifest,
    steps_of_weights,
)
from llmconv.output.plan import MODEL, Plan, Shard, failing_safely, json_bytes, plan_checkpoint
from llmconv.output.writer import Place, check_output, destination_of, write_checkpoint
from llmconv.progress import say, warn
from llmconv.tensors import BY_NAME, Array, Flushed, LazyTensor, cast

if TYPE_CHECKING:
    from llmconv.export.quantization.selection import QuantizedWeight
    from llmconv.export.quantization.smoothing import Smoothing

QUANTIZED = "quantized"  # beginning of the names of weight files that a Hugging Face model cannot be loaded from


@dataclass(frozen=True)
class NewFolder:
    """A new folder: the weights are streamed there once, cast to `dtype`, and mapped there."""

    place: Place
    checkpoint: Checkpoint
    dtype: str  # `keep`, or the dtype to store the weights in
    max_shard_size: str | int  # largest safetensors file, such as `5GB`
    overwrite: bool
    resume: bool
    kept: re.Pattern[str] | None = None  # pattern of the names of tensors that keep their dtype
    # what is stored instead of quantized weights, by name of the weight with a suffix
    codes: Mapping[str, LazyTensor] = field(default_factory=dict)
    # numbers by name of a tensor; those with different numbers are in different files
    parts: Mapping[str, int] = field(default_factory=dict)
    measured: str = ""  # as in `Plan`
    # names of codes that one product maps, so that they are in one file: all layers then have the same nodes
    together: Sequence[Collection[str]] = ()
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
        from llmconv.export.quantization.block_rounding import NONE  # noqa: PLC0415 - most exports are of floats
        from llmconv.export.quantization.products import parts_of, side_by_side  # noqa: PLC0415 - as above
        from llmconv.export.quantization.smoothing import measured_digest  # noqa: PLC0415 - as above

        tensors, codes, parts = dict[str, LazyTensor](), dict[str, LazyTensor](), dict(self.parts)
        for name, tensor in self.checkpoint.items():
            made = {name: tensor}
            if weight := weights.get(name):
                factors = [each.get(name, NONE) for each in (importance, smoothing.matrices, smoothing.outputs)]
                made = weight.stored(name, tensor, *factors)
                parts |= dict.fromkeys(made, parts.get(name, 0))
                codes |= made
            elif name in smoothing.norms or name in smoothing.matrices:
                made = smoothing.plain(name, tensor)
                codes |= made
            tensors |= made
        groups = list(dict.fromkeys(weight.group for weight in weights.values() if weight.group))
        checkpoint = replace(self.checkpoint, tensors=side_by_side(tensors, groups))
        digest = measured_digest(importance, smoothing, {name: weight.rounded for name, weight in weights.items()})
        together = parts_of(groups)
        return replace(self, checkpoint=checkpoint, codes=codes, parts=parts, together=together, measured=digest)

    def weights(self) -> Mapping[str, Mapped]:
        home = local_only(self.place) or Path(self.place.name)  # of an address only the names of files are used
        return {name: tensor for shard in self._plan.shards for name, tensor in _placed(shard, home).items()}

    def planned(self) -> dict[str, int]:
        small = {name: len(content) for name, content in self._plan.small_files.items()}
        return {**{shard.name: _file_bytes(shard) for shard in self._plan.shards}, **small}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        given = self.checkpoint, self._plan, self.place, files, step
        found = write_new(*given, overwrite=self.overwrite, resume=self.resume)
        if self._flushed.count:
            warn(f"{self._flushed.count:,} weights are too small for {self.dtype} and became zero")
        return 0 if found else self._plan.nbytes

    @cached_property
    def _plan(self) -> Plan:
        checkpoint = self.checkpoint
        if self.dtype != "keep":
            dtype = BY_NAME[self.dtype]
            kept = {name: tensor for name, tensor in checkpoint.items() if self.kept and self.kept.search(name)}
            kept |= self.codes
            tensors = {name: cast(tensor, dtype, name, self._flushed) for name, tensor in checkpoint.items()} | kept
            checkpoint = replace(checkpoint, tensors=tensors, config={**checkpoint.config, "dtype": self.dtype})
        prefix = QUANTIZED if self.codes else MODEL
        plan = plan_checkpoint(checkpoint, self.max_shard_size, prefix, self.parts, self.together)
        return replace(plan, measured=self.measured)


def write_new(
    source: Checkpoint,
    plan: Plan,
    place: Place,
    files: GraphFiles,
    step: dict[str, Any],
    *,
    overwrite: bool,
    resume: bool,
) -> bool:
    """Writes a new folder, whose files become visible together; whether a complete one was there already."""
    contents = dict(files.files)
    if files.config:
        contents["config.json"] = json_bytes({**plan.checkpoint.config, **files.config})
    if not isinstance(place, Path):
        refuse_links(contents)
    done = write_checkpoint(
        plan,
        place,
        steps=[*steps_of_weights(source.path), step],
        sources=sources_of(source),
        overwrite=overwrite,
        resume=resume,
        more_files=contents,
        graphs=files.entries,
    )
    return done.found


def main_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file_tensors(tensors).values():
        sizes[tensor.dtype.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else FLOAT32


def file_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, Mapped]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Mapped)}


def _placed(shard: Shard, folder: Path) -> dict[str, Mapped]:
    """The tensors of a shard where they will be in `folder`; a copied shard keeps the offsets of the original."""
    home, path = shard.prefix, folder / shard.name
    if shard.copy_of:
        stored = file_tensors(shard.tensors).items()
        return {home + n: placed(t, path, shard.name) for n, t in stored}
    found, offset = (
        dict[str, Mapped](),
        len(encode_header({name: (t.dtype, t.shape) for name, t in shard.tensors.items()})),
    )
    for name, tensor in shard.tensors.items():
        found[home + name] = FileTensor(path, offset, tensor.dtype, tensor.shape, location=shard.name)
        offset += tensor.nbytes
    return found


def _file_bytes(shard: Shard) -> int:
    if shard.copy_of:
        return shard.copy_of.stat().st_size
    return len(encode_header({name: (t.dtype, t.shape) for name, t in shard.tensors.items()})) + shard.nbytes


def sources_of(checkpoint: Checkpoint) -> list[Path]:
    names = ("config.json", *checkpoint.side_files) if checkpoint.format != "gguf" else ()  # those are made of the file
    small = [checkpoint.path / name for name in names]
    weights = {tensor.path for tensor in file_tensors(checkpoint).values()}
    return sorted({*weights, *(path for path in small if path.is_file())})


BLOCK = 4096  # block size of most file systems, in bytes; every file takes a multiple of it


@dataclass(frozen=True)
class InPlace:
    """The model folder itself: only graphs and the files of clients are written."""

    checkpoint: Checkpoint
    dtype: str  # `keep`, or the dtype that its weights must have
    overwrite: bool = False
    resume: bool = False
    # codes and scales of quantized weights in the model's own files, by name of the weight with a suffix
    codes: Mapping[str, FileTensor] = field(default_factory=dict)
    home: Path | None = None  # the folder of a model file that has no `config.json` next to it; None for a model folder

    @property
    def place(self) -> Path:
        return self.home or self.checkpoint.path

    def model_files(self) -> dict[str, bytes]:
        """The small files that make a folder with a model file a model folder; none for one that is."""
        if self.home is None:
            return {}
        small = {name: text for name, text in plan_checkpoint(self.checkpoint).small_files.items() if name != INDEX}
        return {**small, RANGES: encode_ranges(file_tensors(self.checkpoint))}

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
        with Folder.open(self.place) as home:  # no pipes, devices and folders with these names, or linked folders
            for name in [*sum(graphs.values(), []), *plan.clients.names, MANIFEST]:
                if not (outer := name.rpartition("/")[0]) or home.find(outer):
                    with home.holding(name) as (inner, last):
                        inner.require_replaceable(last)
        recorded = read_manifest(self.place).graphs
        written = [name for role in graphs if role in recorded for name in graphs[role]]
        self._require_own_files(set(graphs))
        existing = existing_files(self.place, recorded, list(graphs), [*written, *plan.clients.names])
        if existing and not self.overwrite and not self.resume:
            raise InputRefused(f"`{self.place / existing[0]}` already exists", hint="give `--overwrite` to replace it")

    def _require_own_files(self, roles: set[str]) -> None:
        """Refuses small files of another model next to a model file, and graphs of one that stay."""
        manifest = read_manifest(self.place)
        recorded, own = manifest.files, self.model_files()
        index, left = own.get(RANGES), sorted(manifest.graphs.keys() - roles)
        is_other = index and RANGES in recorded and not _exists(self.place / RANGES, index)
        if is_other and (left or not self.overwrite):
            raise InputRefused(
                f"`{self.place}` has graphs of another model file, or of this one before it changed",
                hint="give `-o OUT`, a new folder; or export all of its graphs again, with `--overwrite`"
                + (f": {', '.join(left)}, too" if self.overwrite else ""),
            )
        for name, content in own.items():
            path = self.place / name
            if name not in recorded and os.path.lexists(path) and not _exists(path, content):
                raise InputRefused(
                    f"`{path}` already exists, and is not that of the model file",
                    hint="give `-o OUT`, a new folder; or move the model file into a folder of its own",
                )

    def require_mappable(self, plan: GraphPlan) -> None:
        """Refuses weights of another dtype than `dtype`, or most of them of another than half-precision graphs.

        And weights whose values are not in the model's file.
        """
        if self.home and not plan.options.quantization:
            require_mapped(self.checkpoint)
        precision, main = next(iter(plan.specs.values())).precision, main_dtype(self.checkpoint)
        if precision not in (FLOAT32, main):
            raise InputRefused(
                f"the weights are {main}, so graphs that compute in {precision} cannot map them in place",
                hint=f"give `-o OUT`: the weights are cast to {precision} there once"
                + (", or give `--precision float32`" if main == FLOAT32 else ""),
            )
        stored = {tensor.dtype.name for tensor in file_tensors(self.checkpoint).values()}
        if self.dtype != "keep" and stored != {self.dtype}:
            raise InputRefused(
                f"the weights are {', '.join(sorted(stored))}, so `--dtype {self.dtype}` cannot map them in place",
                hint="give `-o OUT`: the weights are cast there once",
            )

    def weights(self) -> Mapping[str, Mapped]:
        return {**file_tensors(self.checkpoint), **self.codes}

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> InPlace:
        """Raises InputRefused for weights whose bytes in the files are not what graphs read."""
        codes: dict[str, FileTensor] = {}
        for name, tensor in self.checkpoint.items():
            weight = weights.get(name)
            found = weight.in_file(name) if weight else None
            if not isinstance(tensor, Mapped) and not found:
                raise InputRefused(
                    f"graphs cannot map `{name}` as the model's files store it",
                    hint="give `-o OUT`: its codes are written there once, as graphs read them",
                )
            codes |= found or {}
        return replace(self, codes=codes)

    def planned(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.model_files().items()}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        """Writes all files completely before the first of them appears; the manifest appears last."""
        manifest = read_manifest(self.place)
        before = {name for entry in manifest.graphs.values() for name in files_of(entry)}
        own = self.model_files()
        if own and files.config:
            own["config.json"] = json_bytes({**plan_checkpoint(self.checkpoint).checkpoint.config, **files.config})
        files = replace(files, files={**own, **files.files})
        for name, content in files.files.items():
            manifest.files[name] = link_entry(content.target) if isinstance(content, Link) else file_entry(content)
        # files of an earlier export of the same graphs that are not written again, such as stages
        old = {name for role in files.entries for name in files_of(manifest.graphs.get(role, {}))}
        others = {role: files_of(entry) for role, entry in manifest.graphs.items() if role not in files.entries}
        kept = {name for names in others.values() for name in names}
        replaced = [name for name in sorted(old - kept - files.files.keys()) if name in manifest.files]
        for name in replaced:
            del manifest.files[name]
        for role, entry in list(manifest.graphs.items()):  # graphs whose files were deleted
            gone = [name for name in files_of(entry) if name not in files.files and not (self.place / name).exists()]
            if gone:
                del manifest.graphs[role]
            for name in gone:
                manifest.files.pop(name, None)
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


def _exists(path: Path, content: WritableContent) -> bool:
    if isinstance(content, Link):
        return path.is_symlink() and os.readlink(path) == content.target
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


@contextmanager
def _without_weights() -> Iterator[None]:
    """Changes the hint of errors about weights that graphs cannot map as they are."""
    try:
        yield
    except InputRefused as error:
        hint = "leave out `--graphs-only`: the weights are converted into OUT once"
        raise InputRefused(error.message, hint=hint) from error


@dataclass(frozen=True)
class GraphsOnly:
    """A new folder for graphs that map the model's own files, which the user puts next to them.

    Only headers of the model's files are read. `resume` accepts a complete folder that is equal.
    """

    place: Place
    model: InPlace
    overwrite: bool
    resume: bool

    def check(self, plan: GraphPlan) -> None:
        """Refuses an existing folder without `overwrite`, and weights that the graphs could not map."""
        with _without_weights():
            self.model.require_mappable(plan)
        files = {tensor.path for tensor in file_tensors(self.model.checkpoint).values()}
        inputs = [*files] if self.model.home else [self.model.place]  # a new folder may be next to a file
        destination_of(self.place).require_free(self.overwrite, inputs, resume=self.resume)

    def weights(self) -> Mapping[str, Mapped]:
        """The tensors in the model's own files, as if those were in the new folder."""
        home = local_only(self.place) or Path(self.place.name)  # of an address only the names of files are used
        return {
            name: placed(tensor, home / tensor.location, tensor.location)
            for name, tensor in self.model.weights().items()
        }

    def quantized(
        self, weights: Mapping[str, QuantizedWeight], importance: Mapping[str, Array], smoothing: Smoothing
    ) -> GraphsOnly:
        """Only codes that the model's files contain as graphs read them can be mapped."""
        with _without_weights():
            return replace(self, model=self.model.quantized(weights, importance, smoothing))

    def planned(self) -> dict[str, int]:
        return {name: len(content) for name, content in self._small_files().items()}

    def missing(self) -> dict[str, int]:
        paths = {tensor.location: tensor.path for tensor in self.model.weights().values()}
        return {name: path.stat().st_size for name, path in sorted(paths.items())}

    def write(self, files: GraphFiles, step: dict[str, Any]) -> int:
        source = self.model.checkpoint
        plan = Plan(source, (), self._small_files())
        made = {**step, "options": {**step["options"], "weights": self.missing()}}
        write_new(source, plan, self.place, files, made, overwrite=self.overwrite, resume=self.resume)
        return 0

    def _small_files(self) -> dict[str, bytes]:
        """The files of a model except its weights; the index is the model's own, which names its own files."""
        checkpoint = self.model.checkpoint
        planned = {name: text for name, text in plan_checkpoint(checkpoint).small_files.items() if name != INDEX}
        planned |= self.model.model_files()
        has_index = (checkpoint.path / INDEX).is_file()
        return planned | ({INDEX: read_small(own_file(checkpoint.path, INDEX))} if has_index else {})


OutputFolder = NewFolder | InPlace | GraphsOnly
