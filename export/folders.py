"""Where an export writes: into the model folder whose weights the graphs map, or into a new folder with the weights."""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.export.clients import FileContent
from llmconv.export.graph_files import GraphFiles, GraphPlan
from llmconv.export.graph_names import existing_files, files_of
from llmconv.export.graph_spec import FLOAT32
from llmconv.export.quantization.block_rounding import NONE
from llmconv.export.quantization.products import side_by_side
from llmconv.export.quantization.selection import QuantizedWeight
from llmconv.export.quantization.smoothing import Smoothing
from llmconv.files.paths import local_only
from llmconv.files.safe_folder import Folder, Link, WritableContent, make_temporary_folder, remove_temporary_folder
from llmconv.files.safetensors_file import FileTensor, encode_header
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import MANIFEST, Manifest, file_entry, link_entry, read_manifest, steps_of_weights
from llmconv.output.plan import MODEL, Plan, Shard, failing_safely, json_bytes, plan_checkpoint
from llmconv.output.store_folder import refuse_links
from llmconv.output.writer import Place, check_output, destination_of, write_checkpoint
from llmconv.progress import say, warn
from llmconv.runtime.eager.torch_runner import require_causal_model
from llmconv.tensors import BY_NAME, Array, DType, Flushed, LazyTensor, cast

QUANTIZED = "quantized"  # beginning of the names of weight files that a Hugging Face model cannot be loaded from


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
        return replace(self, parts=parts)

    def weights(self) -> Mapping[str, FileTensor]:
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
        return plan_checkpoint(checkpoint, self.max_shard_size, QUANTIZED if self.codes else MODEL, self.parts)


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


def file_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, FileTensor]:
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
    if shard.copy_of:
        return shard.copy_of.stat().st_size
    return len(encode_header({name: (t.dtype, t.shape) for name, t in shard.tensors.items()})) + shard.nbytes


def sources_of(checkpoint: Checkpoint) -> list[Path]:
    small = [checkpoint.path / name for name in ("config.json", *checkpoint.side_files)]
    weights = {tensor.path for tensor in file_tensors(checkpoint).values()}
    return sorted({*weights, *(path for path in small if path.is_file())})


BLOCK = 4096  # block size of most file systems, in bytes; every file takes a multiple of it


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
        return self

    def planned(self) -> dict[str, int]:
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
    if isinstance(content, Link):
        return path.is_symlink() and os.readlink(path) == content.target
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


def _entry(content: FileContent) -> dict[str, Any]:
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


@contextmanager
def checkpoint_in_memory(model: Any) -> Iterator[Checkpoint]:
    """The checkpoint that `save_pretrained` would write for a causal language model on any device.

    Its configuration is in a temporary folder, no weight is. Raises InputRefused: transformers does not save its
    configuration; UsageProblem: its weights are not plain tensors in memory, or have an adapter around them.
    """
    model = _require_plain(model)
    folder = make_temporary_folder()
    try:
        try:
            config = copy.deepcopy(model.config)
            config.architectures, config.dtype = [type(model).__name__], model.dtype
            config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        except (ValueError, TypeError, OSError) as error:
            raise InputRefused(
                f"transformers cannot save the configuration: {first_line(error)}", hint="fix `generation_config`"
            ) from error
        tensors = {name: _lazy(name, tensor) for name, tensor in _stored(model).items()}
        yield Checkpoint(folder, "hf", tensors, read_json(folder / "config.json"), read_side_files(folder))
    finally:
        remove_temporary_folder(folder)


def require_output(output: object, *, graphs_only: bool) -> None:
    """Raises UsageProblem if a model that has no folder gets no place for its weights."""
    if output is None:
        raise UsageProblem(
            "a model in memory needs `output`, a new folder for its weights", hint="`export(model, OUT)`"
        )
    if graphs_only:
        raise UsageProblem(
            "`graphs_only` needs a model folder, not one in memory", hint="leave it out, or save the model first"
        )


def _require_plain(model: Any) -> PreTrainedModel:
    """The model, if its weights are in memory, and are all of it."""
    if type(model).__module__.partition(".")[0] == "peft" or getattr(model, "_hf_peft_config_loaded", False):
        raise UsageProblem(
            "the model has an adapter that is not merged",
            hint="give `model.merge_and_unload()`, or save both and run `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    if getattr(getattr(model, "config", None), "auto_map", None):
        raise UsageProblem(
            "the model has code of its own, which is not in memory",
            hint="save it: `model.save_pretrained(FOLDER)`; then `export(FOLDER, OUT, trust_remote_code=True)`",
        )
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        raise UsageProblem(
            f"`model` is {type(model).__name__} around a {type(inner).__name__}", hint="give `model.module`"
        )
    model = require_causal_model(model)
    _require_known_class(model)
    _require_tied_head(model)
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise UsageProblem(
            "the weights of the model are quantized",
            hint="save it: `model.save_pretrained(FOLDER)`; then export FOLDER",
        )
    if odd := next((name for name, tensor in model.named_parameters() if type(tensor.data) is not torch.Tensor), None):
        raise UsageProblem(
            f"`{odd}` is divided between processes or has a layout of its own",
            hint="save it: `trainer.save_model(FOLDER)`; then export FOLDER",
        )
    return model


def _require_known_class(model: PreTrainedModel) -> None:
    """Refuses a class of the user's own, which may compute something else than the one that its config names."""
    kind, known = type(model), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    if kind.__module__.partition(".")[0] != "transformers" and kind not in (
        known if isinstance(known, tuple) else (known,)
    ):
        raise UsageProblem(
            f"the model's class `{kind.__name__}` is not of transformers, and its code is not in `config.json`",
            hint="register it: `AutoModelForCausalLM.register(ConfigClass, ModelClass)`; see docs/adding-a-family.md",
        )


def _require_tied_head(model: PreTrainedModel) -> None:
    """Refuses a head of its own where the config ties it to the embedding: graphs would read the embedding."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own, shared = getattr(head, "weight", None), getattr(table, "weight", None)
    if own is None or shared is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    if own is not shared and (own.shape != shared.shape or not torch.equal(own, shared.to(own))):
        raise UsageProblem(
            "`config.tie_word_embeddings` is true, and the output head differs from the embedding",
            hint="set `model.config.tie_word_embeddings = False`, or call `model.tie_weights()`",
        )


def _stored(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` stores, by their names there; of tied ones the first alone."""
    whole = remove_tied_weights_from_state_dict(model.state_dict(), model)
    return dict(revert_weight_conversion(model, whole))


def _lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    """A torch tensor of which only the rows that are asked for are copied; UsageProblem for an unsupported dtype."""
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise UsageProblem(f"`{name}` has the dtype {tensor.dtype}", hint="convert the model: `model.float()`")
    return LazyTensor(dtype, tuple(tensor.shape), partial(_rows, tensor.detach(), dtype))


def _rows(tensor: torch.Tensor, dtype: DType, start: int, stop: int) -> Array:
    rows = (tensor if tensor.ndim else tensor.reshape(1))[start:stop].cpu().contiguous()
    return rows.view(torch.uint8).numpy().view(dtype.numpy).reshape(rows.shape)
