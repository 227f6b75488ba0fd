"""apply_delta and extract_delta: a tuned model from its base and a delta, and the delta of two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import Checkpoint, is_model_folder, open_checkpoint, with_modules
from llmconv.convert.deltas import DELTA_FILE, arithmetic
from llmconv.convert.deltas.exact import open_exact, plan_exact
from llmconv.convert.deltas.low_rank import LowRankDelta, plan_low_rank
from llmconv.convert.formats import delta_formats, detect
from llmconv.convert.models.head_and_dtype import check_dtype, settled, with_cast
from llmconv.convert.models.model_config import SHARD_LIMIT
from llmconv.convert.opening import open_training
from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.files.paths import Placed, local_only, output_place
from llmconv.files.sources import fetches, files_of_weights, local_path, reading_safely
from llmconv.model_code import with_copied_code
from llmconv.not_a_model_folder import adapter_or_delta
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import KEEP, Plan, plan_checkpoint, require_shard_size
from llmconv.output.writer import Place, check_output, write_checkpoint
from llmconv.progress import warn_all


@dataclass(frozen=True)
class Applied:
    """What `apply_delta` wrote, or would write.

    Attributes:
        plan: the tensors and files of the tuned model.
        kind: `exact`, `difference` (tuned − base, as FastChat has it) or `accessory`.
    """

    plan: Plan
    kind: str

    def __repr__(self) -> str:
        return f"<Applied {self.kind} delta: {self.plan!r}>"


@dataclass(frozen=True)
class Extracted:
    """What `extract_delta` wrote, or would write.

    Attributes:
        plan: the files of the delta.
        kind: `exact`, `low-rank`, or the format of another tool, such as `fastchat`.
        nbytes: bytes of the files with weights; None in a dry run, where they are not known.
        captured: of a low-rank delta, the tensor's name to ‖B·A‖ / ‖tuned − base‖, 0 to 1; empty in a dry run.
        captured_overall: the same of all these tensors together.
        whole: names of the tensors that a low-rank delta holds whole.
        elements: of all tensors of another tool's delta.
        inexact: how many of them are not the tuned model's, to the bit, when that tool adds the delta to the base; None
            for other deltas, in a dry run, and if the run was resumed.
        inexact_tensors: the same by the names of the tensors that have any.
    """

    plan: Plan
    kind: str
    nbytes: int | None = None
    captured: Mapping[str, float] = field(default_factory=dict)
    captured_overall: float | None = None
    whole: tuple[str, ...] = ()
    elements: int = 0
    inexact: int | None = None
    inexact_tensors: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = "a dry run" if self.nbytes is None else f"{self.nbytes:,} bytes"
        return f"<Extracted {self.kind} delta: {size}>"


@fetches
@checked
def apply_delta(  # noqa: PLR0913 - the options of the command, by the same names
    base: str | Path,
    delta: str | Path,
    output: Placed,
    *,
    dtype: str = "keep",
    new_rows: str | None = None,
    max_shard_size: str | int = KEEP,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Applied:
    """Writes the model that `delta` makes of `base`, as a Hugging Face folder.

    An exact delta gives back the tuned model bit for bit; any base but its own is refused, and nothing is made. The sum
    with other tools' deltas is made in float32 and rounded once.

    Args:
        base: a Hugging Face folder, or a checkpoint that `to-hf` reads (Meta's shards, …); path, URI or hub id.
        delta: of `extract_delta`, of FastChat (a Hugging Face folder of tuned − base), or of LLaMA2-Accessory.
        output: the folder to make.
        dtype: `keep` (an exact delta: the tuned model's; a sum: the base's, or the delta's where that has more bits),
            `float32`, `float16` or `bfloat16`.
        new_rows: what the rows of new tokens in a tuned − base are added to: `mean` (of the base's rows, Stanford
            Alpaca) or `zeros` (FastChat); by default what the delta tells, or an error where nothing does.
        max_shard_size: `keep` (the files of the base), or the largest safetensors file, such as `5GB`.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: return the plan, and write nothing.

    Raises:
        InputRefused: the base is another one than the delta was made from, or an input is malformed or unsupported.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    check_dtype(dtype)
    if new_rows not in (None, *arithmetic.NEW_ROWS):
        raise UsageProblem(f"`new_rows` is `{new_rows}`", hint=f"one of: {', '.join(arithmetic.NEW_ROWS)}")
    require_shard_size(max_shard_size)
    model = settled(open_model(base))
    with reading_safely(delta):
        path = local_path(delta, in_parts=True)
        kind, tuned, checksum = _tuned(model, path, dtype, new_rows or "", whole=dry_run)
        require_model_type(tuned.config, path)
    warn_all(tuned.warnings)
    plan = plan_checkpoint(tuned, max_shard_size)
    place = output_place(output)
    check_output(plan, place, overwrite, [model.path, path], resume=resume)
    if not dry_run:
        options = {"delta": path.absolute().name, "kind": kind, "dtype": None if dtype == "keep" else dtype}
        options |= {"new_rows": new_rows}
        steps = [*steps_of_weights(model.path), step("delta-apply", model.path.absolute(), **options)]
        sources = _sources(place, model.path, path)
        done = write_checkpoint(plan, place, steps=steps, sources=sources, overwrite=overwrite, resume=resume)
        if done.found:
            return Applied(replace(plan, found=True), kind)
        warn_all(checksum.problems() if checksum else ())
    return Applied(plan, kind)


def _tuned(
    base: Checkpoint, path: Path, dtype: str, new_rows: str, *, whole: bool
) -> tuple[str, Checkpoint, arithmetic.WeightSum | None]:
    """What kind of delta lies at `path`, the model that it makes, and its checksum; `whole` reads all of the base."""
    named = "exact" if (path / DELTA_FILE).is_file() else ""
    named = named or next((name for name, one in delta_formats().items() if one.detect(path)), "")
    if named and new_rows:
        raise UsageProblem(
            f"`--new-rows` is for FastChat's and Stanford Alpaca's deltas, not for one that is {named}",
            hint="leave it out",
        )
    if named == "exact":
        delta = open_exact(path)
        tuned = delta.over(base)
        delta.check_base(base, whole=whole)
        return "exact", with_cast(tuned, dtype) if dtype != "keep" else tuned, None
    if problem := adapter_or_delta(path):
        raise problem
    if named:
        return named, delta_formats()[named].apply(base, path, dtype), None
    return "difference", *arithmetic.plus_difference(base, arithmetic.open_difference(path), dtype, new_rows)


@fetches
@checked
def extract_delta(  # noqa: PLR0913 - the options of the command, by the same names
    base: str | Path,
    tuned: str | Path,
    output: Placed,
    *,
    rank: int | None = None,
    to: str | None = None,
    shards: int | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Extracted:
    """Writes what `tuned` is over `base`: an exact delta, a LoRA adapter that comes close, or another tool's delta.

    Args:
        base: Hugging Face folder, or a training checkpoint that `to-hf` reads; a path, URI or hub id.
        tuned: the tuned model, in the same forms.
        output: the folder to make.
        rank: of the adapter, whose products are the best of that rank up to a thousandth or so of their norm (exact up
            to a million elements); None for an exact delta.
        to: `accessory`, `alpaca` or `fastchat`: that tool's format, whose sums are inexact in the type it computes in.
        shards: number of model-parallel parts of Accessory's delta; None: as many as the base has.
        dtype: `keep` or the float type that the tuned weights are rounded to first, or that the adapter gets
            (whose factors are float32 with `keep`); `keep` alone with `to`.
        max_shard_size: bytes of tuned weights that one file encodes; Accessory's has one file per part.
        overwrite: replace an existing folder.
        resume: continue an interrupted run.
        dry_run: return the plan, and write nothing.

    Raises:
        InputRefused: an input is malformed, or the adapter or the other tool's format cannot say what changed.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    check_dtype(dtype)
    require_shard_size(max_shard_size)
    _check_kind(rank, to, shards, dtype)
    below, above = settled(open_model(base)), settled(open_model(tuned))
    made: Plan | LowRankDelta | arithmetic.WrittenDelta
    if to:
        kind, save = to, None if to in arithmetic.SCRIPTS else delta_formats()[to].save
        script = arithmetic.plan_script_delta
        made = save(below, above, shards) if save else script(below, above, to, max_shard_size)
    elif rank is not None:
        kind, made = "low-rank", plan_low_rank(below, above, rank, dtype)
    else:
        exact = with_cast(above, dtype) if dtype != "keep" else above
        kind, made = "exact", plan_exact(below, exact, max_shard_size)
    plan = made if isinstance(made, Plan) else made.plan
    warnings = [*below.warnings, *above.warnings, *plan.warnings]
    if not any(name in below and below[name].shape == tensor.shape for name, tensor in above.items()):
        types = f"{below.config.get('model_type')} and {above.config.get('model_type')}"
        warnings.append(
            f"no tensor of the tuned model has the name and shape of one of the base ({types}): is it its base?"
        )
    warn_all(warnings)
    place = output_place(output)
    check_output(plan, place, overwrite, [below.path, above.path], resume=resume)
    whole = made.whole if isinstance(made, LowRankDelta) else ()
    elements = made.differences.elements if isinstance(made, arithmetic.WrittenDelta) else 0
    if dry_run:
        return Extracted(plan, kind, whole=whole, elements=elements)
    options = {"tuned": above.path.absolute().name, "rank": rank, "dtype": None if dtype == "keep" else dtype, "to": to}
    steps = [step("delta-extract", below.path.absolute(), **options)]
    sources = _sources(place, below.path, above.path)
    manifest = write_checkpoint(plan, place, steps=steps, sources=sources, overwrite=overwrite, resume=resume)
    size = sum(manifest.files[shard.name]["bytes"] for shard in plan.shards)
    result = Extracted(replace(plan, found=manifest.found), kind, size, whole=whole, elements=elements)
    if isinstance(made, LowRankDelta) and not manifest.found:
        return replace(result, captured=made.captured(), captured_overall=made.captured_overall())
    if isinstance(made, arithmetic.WrittenDelta) and not manifest.found:
        return _counted(result, made.differences)
    return result


def _counted(result: Extracted, differences: arithmetic.Differences) -> Extracted:
    """With what the other tool does not restore, and a warning about it."""
    inexact, elements = differences.inexact(), result.elements
    named = differences.inexact_tensors() if inexact else {}
    if inexact is None:
        note = f"what the sum of the {result.kind} delta does not restore was not counted, because the run was resumed"
    else:
        note = (
            f"the sum of the base and the {result.kind} delta differs from the tuned model in {inexact:,} of "
            f"{elements:,} elements ({inexact / elements if elements else 0:.3%}), since the tool rounds: in "
            f"{listing(list(named))}; for a delta that restores all of them, leave out `--to` and use `llmconv delta "
            "apply`"
        )
    warn_all([note] if inexact != 0 else [])
    return replace(result, inexact=inexact, inexact_tensors=named)


def writable_deltas() -> list[str]:
    return sorted([*arithmetic.SCRIPTS, *(name for name, found in delta_formats().items() if found.save)])


def _check_kind(rank: int | None, to: str | None, shards: int | None, dtype: str) -> None:
    """Raises UsageProblem where two options exclude each other."""
    if to is not None and to not in writable_deltas():
        raise UsageProblem(
            f"deltas of `{to}` cannot be written", hint=f"`--to` is one of: {', '.join(writable_deltas())}"
        )
    if to and rank is not None:
        raise UsageProblem(
            "`--to` and `--rank` exclude each other", hint="leave out one of them: `--rank` writes an adapter of PEFT"
        )
    if to and dtype != "keep":
        raise UsageProblem(
            f"`--dtype {dtype}` with `--to {to}`: the format has its own element type", hint="leave it out"
        )
    if shards is not None and (to is None or to in arithmetic.SCRIPTS):
        raise UsageProblem("only a delta with model-parallel parts has `--shards`", hint="give `--to accessory`")
    if shards is not None and not 1 <= shards <= SHARD_LIMIT:
        raise UsageProblem(f"{shards} shards are not possible", hint=f"`--shards` is 1 to {SHARD_LIMIT}")


def _sources(output: Place, *paths: Path) -> list[Path]:
    return [file for path in paths for file in files_of_weights(path, local_only(output))]


def open_model(name: str | Path) -> Checkpoint:
    """A Hugging Face folder, or what `to-hf` reads (path, URI, id), lazy; InputRefused for anything else."""
    with reading_safely(name):
        path = local_path(name, in_parts=True)
        if problem := adapter_or_delta(path):
            raise problem
        if is_model_folder(path) and detect(path) is None:  # which no training format claims
            model = open_checkpoint(path)
            require_model_type(model.config, path)
            return with_copied_code(with_modules(model))
        opened = open_training(path)
        if not opened.tensors:
            raise UnsupportedInput(
                f"`{path}` contains an adapter alone, not a model", hint="convert it with `llmconv to-hf --base` first"
            )
        return replace(with_cast(opened, "keep"), path=path)
