"""merge_lora: adds adapters to the weights of a base model, streaming by blocks of rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import (
    ADAPTER_CONFIG,
    Checkpoint,
    is_model_folder,
    open_checkpoint,
    with_modules,
)
from llmconv.convert.adapters.adapter import Adapter, is_zero
from llmconv.convert.adapters.base_checks import SampleCheck, check_written, warn_of_origin
from llmconv.convert.adapters.combining import DEFAULTS, METHODS, MergeOptions, Recipe, recipe_of, sha256_of
from llmconv.convert.adapters.edits import Edits
from llmconv.convert.adapters.merging import merged
from llmconv.convert.algebra import equal
from llmconv.convert.models.completeness import check_folder
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening_adapters import open_adapters
from llmconv.errors import InputRefused, UsageProblem, word
from llmconv.files.paths import Placed, output_place
from llmconv.files.sources import fetches, local_path, reading_safely
from llmconv.model_code import with_copied_code
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import Plan, plan_checkpoint, require_shard_size
from llmconv.output.work import Part, Shards, Work, done_by, repeatable, require_possible
from llmconv.output.writer import Place, check_output, write_checkpoint
from llmconv.progress import warn_all
from llmconv.tensors import cast

if TYPE_CHECKING:
    from llmconv.convert.quantized_bases import QuantizedBase, Retention

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
    used = [identity(adapter) for adapter in opened]
    warn_all(
        (*warn_of_origin(checkpoint, opened, str(base)), *_again(checkpoint, opened, used, recipe), *merge.warnings)
    )
    inputs = [checkpoint.path, *map(Path, paths), *(file for item in opened for file in item.weights)]
    place = output_place(output)
    check_output(merge.plan, place, overwrite, inputs, resume=resume, work=work)
    if not dry_run:
        # inputs with their sha256, and options that are not the default
        initial = [identity(adapter.initial) if adapter.initial else None for adapter in opened]
        given = recipe.provenance() | ({"initial_adapters": initial} if any(initial) else {})
        made = step("merge-lora", checkpoint.path.absolute(), adapters=used, alpha=options["alpha"], **given)
        steps = [*steps_of_weights(checkpoint.path), made]
        sources = sorted(path for path in checkpoint.path.iterdir() if path.suffix in (".safetensors", ".json"))
        sources += [checkpoint.path / name for name in checkpoint.side_files if name.endswith(".py")]
        every = [item for adapter in opened for item in (adapter, adapter.initial) if item]
        sources += [path for adapter in every for path in (*adapter.weights, adapter.settings)]
        asked: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "work": work}
        done = write_checkpoint(merge.plan, place, steps=steps, sources=sources, **asked)
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
            hint=f"give the base first: `llmconv merge-lora {word(other)} {word(base)} -o OUT`",
        )
    with reading_safely(base):
        path = local_path(base, in_parts=True)
        if path.exists() and not is_model_folder(path) and (found := _training_format(path)) not in (None, *PLAIN):
            given = shlex.join(map(str, adapters))
            raise InputRefused(
                f"the base `{base}` is a training checkpoint ({found}), not a Hugging Face model folder",
                hint=f"`llmconv to-hf {word(base)} -o HF_BASE`, then `llmconv merge-lora HF_BASE {given} -o OUT`",
            )
        checkpoint = open_checkpoint(path)
        require_model_type(checkpoint.config, base)
        return with_copied_code(with_modules(checkpoint))


def _training_format(path: Path) -> str | None:
    from llmconv.convert.opening import recognized  # noqa: PLC0415 - only for a refusal

    found = recognized(path)[1]
    return found.name if found else None


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


def _again(
    base: Checkpoint, adapters: Sequence[Adapter], used: Sequence[Mapping[str, str]], recipe: Recipe
) -> Iterator[str]:
    """Warnings about adapters given twice, already merged into the base, or merged with weight 0.

    `used` are their identities.
    """
    options = [done.get("options") for done in steps_of_weights(base.path)]
    steps = [one.get("adapters") for one in options if isinstance(one, Mapping)]
    lists = [adapters for adapters in steps if isinstance(adapters, list)]
    merged = [one.get("sha256") for adapters in lists for one in adapters if isinstance(one, Mapping)]
    for at, adapter in enumerate(used):
        if any(adapter["sha256"] == other["sha256"] for other in used[:at]):
            yield f"the adapter `{adapter['name']}` is given twice and is added twice"
        if adapter["sha256"] in merged:
            yield f"the adapter `{adapter['name']}` is already merged into `{base.path.name}` and is added again"
        if recipe.weights[at] == 0 and not (adapters[at].whole or adapters[at].tokens):  # of which `Edits` tells
            elects = METHODS[recipe.combination.method].elects  # before the weights, as PEFT does
            effect = "counts only where signs are elected" if elects else "changes nothing"
            yield f"the adapter `{adapter['name']}` has weight 0 and {effect}"


def identity(adapter: Adapter) -> dict[str, str]:
    """The name of an adapter, and hashes of its weights and of its settings."""
    settings = [adapter.settings] if adapter.settings not in adapter.weights else []
    return {"name": adapter.name, "sha256": sha256_of(adapter.weights), "config_sha256": sha256_of(settings)}


def plan_merge(base: Checkpoint, adapters: Sequence[Adapter], recipe: Recipe) -> Merge:
    """Places all adapters' tensors on the base (plain or quantized), without writing; errors as in `merge_lora`."""
    quantized = _quantized(base, recipe)
    plain = quantized.plain if quantized else base
    result, edits = merged(plain, adapters, recipe)
    result = settled(result)
    merge = Merge(
        plan_checkpoint(result, recipe.max_shard_size),
        merged=tuple(name for name in result if name in edits.changes),
        replaced=tuple(name for name in result if name in {**edits.whole, **edits.tokens} and name in plain),
        added=tuple(name for name in result if name not in plain),
        warnings=(*result.warnings, *edits.warnings, *_checked(result, base, edits, adapters)),
        edits=edits,
    )
    notes = (*_of_same_weights(adapters), *_without_effect(plain, result, merge, adapters))
    merge = replace(merge, warnings=(*merge.warnings, *notes))
    return _stored(quantized, result, merge, recipe) if quantized else merge


def _checked(result: Checkpoint, base: Checkpoint, edits: Edits, adapters: Sequence[Adapter]) -> list[str]:
    """As `check_folder`; what an adapter has brought is not called the base's."""
    brought = any(edits.whole[name].shape != base[name].shape for name in edits.whole if name in base)
    names = [base.path.name, *(adapter.name for adapter in adapters if brought)]
    return check_folder(result.tensors, result.config, " with ".join(names))


FLOATS = {"float64", "float32", "bfloat16", "float16"}  # element types of weights that are no codes


def _quantized(base: Checkpoint, recipe: Recipe) -> QuantizedBase | None:
    if recipe.base_quant is None and not base.config.get("quantization_config"):
        if {tensor.dtype.name for tensor in base.values()} - FLOATS:
            from llmconv.not_a_model_folder import refuse_unexplained_codes  # noqa: PLC0415 - most bases are plain

            refuse_unexplained_codes(base, base.config)
        return None
    from llmconv.convert.quantized_bases import open_quantized  # noqa: PLC0415 - most bases are plain

    return open_quantized(base, recipe)


def _without_effect(base: Checkpoint, result: Checkpoint, merge: Merge, adapters: Sequence[Adapter]) -> Iterator[str]:
    """Warnings about adapters, or a merge, that change no weight; reading stops at the first that differs."""
    idle = [adapter for adapter in adapters if is_zero(adapter)]
    for adapter in idle:
        yield f"the adapter `{adapter.name}` changes nothing: its factors are zero, as before training"
    changed = [name for name in (*merge.merged, *merge.replaced) if name in result]
    if not (idle or merge.added) and all(equal(cast(base[name], result[name].dtype), result[name]) for name in changed):
        yield "the merge changes nothing: every weight is that of the base"


def _of_same_weights(adapters: Sequence[Adapter]) -> Iterator[str]:
    """Warnings about updates that depend on a weight (DoRA, IA3 …) which an adapter before them changes, too.

    PEFT with both active applies the later one to the result of the earlier one; the merge is the sum of both updates
    of the base's weights.
    """
    for at, later in enumerate(adapters):
        own = {module for module, pair in later.pairs.items() if pair.magnitude is not None}
        own |= later.learned.keys() if later.tuner and later.tuner.of_weight else set()
        for earlier in adapters[:at]:
            if shared := own & (earlier.pairs.keys() | earlier.learned.keys()):
                yield (
                    f"`{earlier.name}` and `{later.name}` change {len(shared)} of the same modules, and the update of "
                    "the second depends on the weight: their sum on the base is not what PEFT computes with both "
                    "active; to apply the second to the result of the first, merge it in a second run"
                )


def _stored(base: QuantizedBase, result: Checkpoint, merge: Merge, recipe: Recipe) -> Merge:
    """The merge of a quantized base, with its plan by `--base-quant`; reads the weights if they are requantized."""
    if recipe.base_quant == "dequantize":
        plan = plan_checkpoint(base.dequantized(result, recipe.dtype), recipe.max_shard_size)
        kind = "bfloat16" if recipe.dtype == "keep" else recipe.dtype
        note = f"{len(base.weights)} quantized weights ({base.method.name}) become plain {kind}"
        return replace(merge, plan=plan, warnings=(*merge.warnings, note))
    checkpoint, changed = base.requantized(result)
    retention = base.retention(result, changed)
    return replace(
        merge,
        plan=plan_checkpoint(checkpoint, recipe.max_shard_size),
        parts=base.changed_parts(changed),
        warnings=(*merge.warnings, *retention.require()),
        retention=retention,
    )
