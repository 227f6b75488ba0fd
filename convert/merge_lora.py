"""merge_lora: adds adapters to the weights of a base model, streaming by blocks of rows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from llmconv.argument_checks import checked
from llmconv.background import prefetch
from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint
from llmconv.convert.adapters.adapter import Adapter, is_zero
from llmconv.convert.adapters.base_checks import SampleCheck, check_written, warn_of_origin
from llmconv.convert.adapters.combining import DEFAULTS, MergeOptions, Recipe, recipe_of, sha256_of
from llmconv.convert.adapters.edits import Edits
from llmconv.convert.adapters.merging import merged
from llmconv.convert.algebra import equal
from llmconv.convert.models.code_model import with_copied_code
from llmconv.convert.models.completeness import check_folder, refuse_unmerged
from llmconv.convert.models.head_and_dtype import with_dtype
from llmconv.convert.opening import open_adapters, recognized
from llmconv.convert.state_dicts.files import is_model_folder
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem, listing
from llmconv.files.paths import Placed, output_place
from llmconv.files.sources import fetches, local_path, reading_safely
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import Plan, plan_checkpoint, require_shard_size
from llmconv.output.work import Part, Shards, Work, done_by, repeatable, require_possible
from llmconv.output.writer import Place, check_output, write_checkpoint
from llmconv.progress import warn_all
from llmconv.quantized_weights.packed_weight import TILE_ELEMENTS, PackedWeight, with_recent_rows
from llmconv.quantized_weights.quantized_checkpoint import FIELD, QuantizedCheckpoint, quantized_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, cast

PLAIN = ("safetensors", "torch")  # formats of which `open_checkpoint` says itself what is missing


@dataclass(frozen=True)
class Merge:
    """The plan and result of a merge; printed by `--dry-run`.

    Attributes:
        plan: the tensors and files to write.
        merged: names of the tensors with an added update.
        replaced: names of the tensors that an adapter replaces.
        added: names of the tensors that the base does not have.
        warnings: one line each.
        edits: the edits of each tensor.
        parts: name of a stored tensor to the name of its quantized weight.
        retention: how much of the update survived, if the result is quantized.
        check: result of comparing the written folder, with `--check`.
    """

    plan: Plan
    merged: tuple[str, ...]
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    warnings: tuple[str, ...]
    edits: Edits = field(repr=False)
    parts: Mapping[str, str] = field(default_factory=dict)
    retention: Retention | None = None
    check: SampleCheck | None = None

    def __repr__(self) -> str:
        counts = f"{len(self.merged)} merged, {len(self.replaced)} replaced, {len(self.added)} added"
        return f"<Merge {self.plan.checkpoint.kind}: {counts}, {self.plan.nbytes:,} bytes>"


@repeatable("base", "adapters", "output")
@fetches
@checked
def merge_lora(
    base: str | Path,
    adapters: str | Path | Sequence[str | Path],
    output: Placed,
    *,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    check: bool = False,
    work: Work | None = None,
    **options: Unpack[MergeOptions],
) -> Merge:
    """Writes `base` with adapters added, as a Hugging Face folder; other tensors are copied unchanged.

    For LoRA a weight becomes W + Σ wᵢ·sᵢ·Bᵢ·Aᵢ, summed in float64 and rounded once. Memory follows the row blocks, not
    the model.

    Args:
        base: Hugging Face folder or hub id.
        adapters: one or several folders, files (of PEFT or another program) or hub ids.
        output: folder to create.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: plan and check everything, write nothing.
        check: read a sample of the written tensors again and compare it with the sum in float64.
        work: `Part(3, 16)` of the shards, `Finish()` after all parts, `Workers(8)` or `Ray()`; None: all here.
        options: see `MergeOptions`.

    Raises:
        UsageProblem: the options contradict each other or the adapters.
        InputRefused: `output` exists, the disk is too small, or an input is missing.
        MalformedInput: an adapter for another base, incomplete, or not finite.
        UnsupportedInput: a kind of adapter or base that cannot be merged.
        OutputFailed: writing failed.
    """
    options = DEFAULTS | options
    require_possible(work, overwrite=overwrite)
    _require_possible(options, output_place(output), check=check, dry_run=dry_run)
    if check and isinstance(work, Part):
        raise UsageProblem("a part is not a model that could be checked", hint="give `--check` with `--finish`")
    paths = [adapters] if isinstance(adapters, str | Path) else adapters
    checkpoint = _open_base(base, paths)
    opened = open_adapters(paths, options["initial_adapters"], checkpoint, options["alpha"])
    recipe = recipe_of(options, opened)
    merge = plan_merge(checkpoint, opened, recipe)
    used = [_identity(adapter) for adapter in opened]
    warn_all((*warn_of_origin(checkpoint, opened, str(base)), *_again(checkpoint, used, recipe), *merge.warnings))
    inputs = [checkpoint.path, *map(Path, paths), *(file for item in opened for file in item.weights)]
    place = output_place(output)
    check_output(merge.plan, place, overwrite, inputs, resume=resume, work=work)
    if not dry_run:
        # inputs with their sha256, and options that are not the default
        initial = [_identity(adapter.initial) if adapter.initial else None for adapter in opened]
        given = recipe.provenance() | ({"initial_adapters": initial} if any(initial) else {})
        made = step("merge-lora", checkpoint.path.absolute(), adapters=used, alpha=options["alpha"], **given)
        steps = [*steps_of_weights(checkpoint.path), made]
        plan = merge.plan
        sources = sorted(path for path in checkpoint.path.iterdir() if path.suffix in (".safetensors", ".json"))
        sources += [checkpoint.path / name for name in checkpoint.side_files if name.endswith(".py")]
        every = [item for adapter in opened for item in (adapter, adapter.initial) if item]
        sources += [path for adapter in every for path in (*adapter.weights, adapter.settings)]
        asked: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "work": work}
        done = write_checkpoint(plan, place, steps=steps, sources=sources, **asked)
        merge = replace(merge, plan=done_by(work, merge.plan, done.found))
    if not check or isinstance(work, Shards):
        return merge
    summed = recipe.combination.is_sum
    return replace(merge, check=check_written(merge.plan.checkpoint, merge.edits, Path(output), summed=summed))


def _open_base(base: str | Path, adapters: Sequence[str | Path]) -> Checkpoint:
    """Opens the base; swapped arguments are refused."""
    other = next((Path(path) for path in adapters if is_model_folder(Path(path))), None)
    if other and (Path(base) / ADAPTER_CONFIG).is_file() and not is_model_folder(Path(base)):
        raise InputRefused(
            f"the arguments are swapped: BASE `{base}` is an adapter, and ADAPTER `{other}` is a model",
            hint=f"give the base first: `llmconv merge-lora {other} {base} -o OUT`",
        )
    with reading_safely(base):
        path = local_path(base, in_parts=True)
        found = recognized(path)[1] if path.exists() and not is_model_folder(path) else None
        if found and found.name not in PLAIN:
            given, name = shlex.join(map(str, adapters)), shlex.quote(str(base))
            raise InputRefused(
                f"the base `{base}` is a training checkpoint ({found.name}), not a Hugging Face model folder",
                hint=f"`llmconv to-hf {name} -o HF_BASE`, then `llmconv merge-lora HF_BASE {given} -o OUT`",
            )
        checkpoint = open_checkpoint(path)
        require_model_type(checkpoint.config, base)
        refuse_unmerged(checkpoint.tensors, checkpoint.config, checkpoint.path.name)
        return with_copied_code(checkpoint)


def _require_possible(options: MergeOptions, output: Place, *, check: bool, dry_run: bool) -> None:
    """Refuses invalid options before anything is read."""
    require_shard_size(options["max_shard_size"])
    if not check:
        return
    if dry_run:
        raise UsageProblem("a dry run writes nothing that could be checked", hint="leave out `--dry-run` or `--check`")
    if not isinstance(output, Path):
        raise UsageProblem(
            "`--check` reads the output again, from a disk", hint="leave it out, or write to a local folder"
        )
    if options["base_quant"] == "requantize":
        problem = "`--check` compares with the exact sum, which a quantized weight cannot hold"
        raise UsageProblem(problem, hint="leave out `--check`; how much of the update survives is reported anyway")


def _again(base: Checkpoint, used: Sequence[Mapping[str, str]], recipe: Recipe) -> Iterator[str]:
    """Warnings about adapters given twice, already merged into the base, or merged with weight 0."""
    options = [done.get("options") for done in steps_of_weights(base.path)]
    steps = [one.get("adapters") for one in options if isinstance(one, Mapping)]
    lists = [adapters for adapters in steps if isinstance(adapters, list)]
    merged = [one.get("sha256") for adapters in lists for one in adapters if isinstance(one, Mapping)]
    for at, adapter in enumerate(used):
        if any(adapter["sha256"] == other["sha256"] for other in used[:at]):
            yield f"the adapter `{adapter['name']}` is given twice and is added twice"
        if adapter["sha256"] in merged:
            yield f"the adapter `{adapter['name']}` is already merged into `{base.path.name}` and is added again"
        if recipe.weights[at] == 0:
            yield f"the adapter `{adapter['name']}` has weight 0 and changes nothing"


def _identity(adapter: Adapter) -> dict[str, str]:
    settings = [adapter.settings] if adapter.settings not in adapter.weights else []
    return {"name": adapter.name, "sha256": sha256_of(adapter.weights), "config_sha256": sha256_of(settings)}


def plan_merge(base: Checkpoint, adapters: Sequence[Adapter], recipe: Recipe) -> Merge:
    """Places all adapters' tensors on the base (plain or quantized), without writing; errors as in `merge_lora`."""
    # the quantized base, or None; MalformedInput: parts missing or mismatched, UnsupportedInput: unknown method
    found = quantized_checkpoint(base)
    quantized = QuantizedBase(found.stored, found.method, found.weights, found.plain) if found else None
    check_choice(recipe.base_quant, quantized, recipe.dtype)
    plain = quantized.plain if quantized else base
    result, edits = merged(plain, adapters, recipe)
    merge = Merge(
        plan_checkpoint(result, recipe.max_shard_size),
        merged=tuple(name for name in result if name in edits.changes),
        replaced=tuple(name for name in result if edits.replaces(name) and name in plain),
        added=tuple(name for name in result if name not in plain),
        warnings=(*base.warnings, *edits.warnings, *check_folder(result.tensors, result.config, base.path.name)),
        edits=edits,
    )
    merge = replace(merge, warnings=(*merge.warnings, *_without_effect(plain, result, merge, adapters)))
    return _stored(quantized, result, merge, recipe) if quantized else merge


def _without_effect(base: Checkpoint, result: Checkpoint, merge: Merge, adapters: Sequence[Adapter]) -> Iterator[str]:
    """Warnings about adapters, or a merge, that change no weight; reading stops at the first that differs."""
    idle = [adapter for adapter in adapters if is_zero(adapter)]
    for adapter in idle:
        yield f"the adapter `{adapter.name}` changes nothing: its factors are zero, as before training"
    changed = [name for name in (*merge.merged, *merge.replaced) if name in result]
    if not (idle or merge.added) and all(equal(cast(base[name], result[name].dtype), result[name]) for name in changed):
        yield "the merge changes nothing: every weight is that of the base"


def _stored(base: QuantizedBase, result: Checkpoint, merge: Merge, recipe: Recipe) -> Merge:
    """The merge of a quantized base, with its plan by `--base-quant`; reads the weights if they are requantized."""
    if recipe.base_quant == "dequantize":
        plan = plan_checkpoint(base.dequantized(result, recipe.dtype), recipe.max_shard_size)
        kind = PLAIN_TYPE.name if recipe.dtype == "keep" else recipe.dtype
        note = f"{len(base.weights)} quantized weights ({base.method.name}) become plain {kind}"
        return replace(merge, plan=plan, warnings=(*merge.warnings, note))
    checkpoint, changed = base.requantized(result)
    retention = measure(base.plain, result, changed)
    return replace(
        merge,
        plan=plan_checkpoint(checkpoint, recipe.max_shard_size),
        parts=base.changed_parts(changed),
        warnings=(*merge.warnings, *retention.require()),
        retention=retention,
    )


CHOICES = ("dequantize", "requantize")
NUMBER = r"(?<=\.)\d+(?=\.)"
PLAIN_TYPE = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class QuantizedBase(QuantizedCheckpoint):
    """The base of a merge; a merge into `plain` rounds once."""

    def dequantized(self, merged: Checkpoint, dtype: str) -> Checkpoint:
        """The result of merging into `plain`, with quantized weights rounded once: to bfloat16 for `keep`."""
        if dtype != "keep":
            return merged
        tensors = {
            name: cast(tensor, PLAIN_TYPE) if self._was_quantized(name) else tensor for name, tensor in merged.items()
        }
        return replace(merged, tensors=tensors, config=with_dtype(merged.config, tensors))

    def _was_quantized(self, name: str) -> bool:
        """Whether a merged tensor comes from a quantized weight, also as a copy of a layer."""
        if name in self.plain:
            return name in self.weights
        return re.sub(NUMBER, "{}", name) in {re.sub(NUMBER, "{}", weight) for weight in self.weights}

    def requantized(self, merged: Checkpoint) -> tuple[Checkpoint, dict[str, PackedWeight]]:
        """The result in the base's format, and changed weights; UnsupportedInput if weights moved or were resized."""
        names = {id(tensor): name for name, tensor in self.plain.items()}
        moved = [name for name, tensor in merged.items() if name in self.plain and names.get(id(tensor), name) != name]
        moved += [
            name for name, weight in self.weights.items() if name not in merged or merged[name].shape != weight.shape
        ]
        moved += [name for name in merged if name not in self.plain and self._was_quantized(name)]
        if moved:
            raise UnsupportedInput(
                f"the merge moves or resizes weights of the base, {listing(moved)} among them, which stay quantized",
                hint="give `--base-quant dequantize`",
            )
        changed = {
            name: weight.requantized(with_recent_rows(merged[name]))
            for name, weight in self.weights.items()
            if merged[name] is not self.plain[name]
        }
        home = {part: name for name, weight in self.weights.items() for part in weight.parts}
        tensors = {}
        for name, tensor in self.stored.items():
            if home.get(name) in changed:
                tensors[name] = changed[home[name]].parts[name]
            elif name in home or name not in self.plain:
                tensors[name] = tensor
            elif name in merged:
                tensors[name] = merged[name]
        tensors |= {name: merged[name] for name in merged if name not in tensors and name not in self.weights}
        return replace(merged, tensors=tensors, config={**merged.config, FIELD: self.stored.config[FIELD]}), changed

    def changed_parts(self, changed: Mapping[str, PackedWeight]) -> dict[str, str]:
        """Names of the changed tensors in the files, with the plain name of their weight."""
        return {
            part: name
            for name, weight in changed.items()
            for part, tensor in weight.parts.items()
            if tensor is not self.stored[part]
        }


def check_choice(choice: str | None, base: QuantizedBase | None, dtype: str) -> None:
    """Raises UnsupportedInput for a quantized base without `--base-quant` (`choice`), UsageProblem for conflicts."""
    if choice is not None and choice not in CHOICES:
        raise UsageProblem(f"invalid `--base-quant {choice}`", hint=f"one of: {', '.join(CHOICES)}")
    if base is None and choice is not None:
        raise UsageProblem(f"`--base-quant {choice}` is given, but the base is not quantized", hint="leave it out")
    if base is not None and choice is None:
        raise UnsupportedInput(
            f"the base is quantized ({base.method.name})",
            hint="give `--base-quant dequantize` for plain bfloat16 weights, or `--base-quant requantize` to store the "
            "result as the base is, where enough of the update survives; better: merge into the unquantized model",
        )
    if choice == "requantize" and dtype != "keep":
        raise UsageProblem(
            f"`--dtype {dtype}` is given with `--base-quant requantize`, which keeps the types of the base",
            hint="leave `--dtype` out, or give `--base-quant dequantize`",
        )


ENOUGH = 0.5
"""Minimum retention and cosine. On a uniform grid both are about one half for updates of a quarter of a step; below,
most of the update is lost, or most of the change is rounding."""


class UpdateSums(NamedTuple):
    """Sums over elements of ΔW² (`wanted`), the change after quantization squared (`found`), products (`common`)."""

    wanted: float
    found: float
    common: float

    @property
    def retention(self) -> float:
        """‖W'_q - W_q‖ / ‖ΔW‖."""
        return sqrt(self.found / self.wanted) if self.wanted else 1.0

    @property
    def cosine(self) -> float:
        """The cosine between the two; 0 if nothing changed."""
        if not self.wanted:
            return 1.0
        return self.common / sqrt(self.wanted * self.found) if self.found else 0.0

    @property
    def enough(self) -> bool:
        return min(self.retention, self.cosine) >= ENOUGH


@dataclass(frozen=True)
class Retention:
    """How much of an update survived, per weight by plain name, and in total."""

    weights: Mapping[str, UpdateSums]

    @property
    def total(self) -> UpdateSums:
        """Over all weights."""
        return _sum(self.weights.values())

    def summary(self) -> dict[str, Any]:
        rows = {"total": self.total, **self.weights}
        return {name: {"retention": change.retention, "cosine": change.cosine} for name, change in rows.items()}

    def require(self) -> tuple[str, ...]:
        """Warnings about the lost part of the update; UnsupportedInput if too little of it survived."""
        total = self.total
        found = f"retention {total.retention:.2f}, cosine {total.cosine:.2f}"
        if not total.enough:
            raise UnsupportedInput(
                f"requantized, the base keeps too little of the update: {found}, minimum {ENOUGH}",
                hint="give `--base-quant dequantize`; the update is finer than the grid, or leaves its range",
            )
        poor = sorted((change.cosine, name) for name, change in self.weights.items() if not change.enough)
        lines = [f"{len(self.weights)} merged weights are quantized again, which changes the update: {found}"]
        if poor:
            lines.append(f"{len(poor)} weights keep less than {ENOUGH} of their update, least `{poor[0][1]}`")
        return tuple(lines)


def measure(
    before: Mapping[str, LazyTensor], merged: Mapping[str, LazyTensor], after: Mapping[str, PackedWeight]
) -> Retention:
    """Reads every weight of `after` once; the sums do not depend on the number of threads.

    `before` and `merged` are the plain weights (float32) of the base and of the result before quantization; `after` are
    the changed weights of the result.
    """
    found = {}
    for name, weight in after.items():
        rows = with_recent_rows(merged[name])
        spans = rows.blocks(TILE_ELEMENTS * rows.dtype.itemsize)
        found[name] = _sum(prefetch(partial(_change, before[name], rows, weight.plain, *span) for span in spans))
    return Retention(found)


def _change(before: LazyTensor, merged: LazyTensor, after: LazyTensor, start: int, stop: int) -> UpdateSums:
    old = before.rows(start, stop).astype(np.float64)
    wanted = merged.rows(start, stop) - old
    found = after.rows(start, stop) - old
    return UpdateSums(float((wanted * wanted).sum()), float((found * found).sum()), float((wanted * found).sum()))


def _sum(changes: Iterable[UpdateSums]) -> UpdateSums:
    total = UpdateSums(0.0, 0.0, 0.0)
    for change in changes:
        total = UpdateSums(*(one + other for one, other in zip(total, change, strict=True)))
    return total
