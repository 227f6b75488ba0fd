"""apply_delta and extract_delta: a tuned model from its base and a delta, and the delta of two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.deltas.alpaca import WeightSum
from llmconv.convert.deltas.arithmetic import open_difference, plus_difference, require_difference
from llmconv.convert.deltas.exact import open_exact, plan_exact
from llmconv.convert.deltas.low_rank import LowRankDelta, plan_low_rank
from llmconv.convert.formats import delta_formats
from llmconv.convert.models.dtype import check_dtype, with_cast
from llmconv.convert.models.tied_head import settled
from llmconv.convert.opening.delta_models import open_model
from llmconv.errors import UnsupportedInput
from llmconv.files.paths import Placed, local_only, output_place
from llmconv.files.sources import fetches, files_under, local_path, reading_safely
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import Plan, plan_checkpoint, require_shard_size
from llmconv.output.sharding import KEEP
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
        kind: `exact` or `low-rank`.
        nbytes: bytes of the files with weights; None in a dry run, where they are not known.
        captured: of a low-rank delta, the tensor's name to ‖B·A‖ / ‖tuned − base‖, 0 to 1; empty in a dry run.
        captured_overall: the same of all these tensors together.
        whole: names of the tensors that a low-rank delta holds whole.
    """

    plan: Plan
    kind: str
    nbytes: int | None = None
    captured: Mapping[str, float] = field(default_factory=dict)
    captured_overall: float | None = None
    whole: tuple[str, ...] = ()

    def __repr__(self) -> str:
        size = "a dry run" if self.nbytes is None else f"{self.nbytes:,} bytes"
        return f"<Extracted {self.kind} delta: {size}>"


@fetches
@checked
def apply_delta(
    base: str | Path,
    delta: str | Path,
    output: Placed,
    *,
    dtype: str = "keep",
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
        max_shard_size: `keep` (the files of the base), or the largest safetensors file, such as `5GB`.
        overwrite, resume, dry_run: replace an existing model folder; continue an interrupted run; check, write nothing.

    Raises:
        InputRefused: the base is another one than the delta was made from, or an input is malformed or unsupported.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    _check_options(dtype, max_shard_size)
    model = settled(open_model(base))
    with reading_safely(delta):
        path = local_path(delta, in_parts=True)
        kind, tuned, checksum = _tuned(model, path, dtype, whole=dry_run)
        require_model_type(tuned.config, path)
    warn_all(tuned.warnings)
    plan = plan_checkpoint(tuned, max_shard_size)
    place = output_place(output)
    check_output(plan, place, overwrite, [model.path, path], resume=resume)
    if not dry_run:
        options = {"delta": path.absolute().name, "kind": kind, "dtype": None if dtype == "keep" else dtype}
        steps = [*steps_of_weights(model.path), step("delta-apply", model.path.absolute(), **options)]
        sources = _sources(place, model.path, path)
        done = write_checkpoint(plan, place, steps=steps, sources=sources, overwrite=overwrite, resume=resume)
        if done.found:
            return Applied(replace(plan, found=True), kind)
        warn_all(checksum.problems() if checksum else ())
    return Applied(plan, kind)


def _tuned(base: Checkpoint, path: Path, dtype: str, *, whole: bool) -> tuple[str, Checkpoint, WeightSum | None]:
    """What kind of delta lies at `path`, the model that it makes, and its checksum; `whole` reads all of the base."""
    if (path / DELTA_FILE).is_file():
        delta = open_exact(path)
        tuned = delta.over(base)
        delta.check_base(base, whole=whole)
        return "exact", with_cast(tuned, dtype) if dtype != "keep" else tuned, None
    if (path / ADAPTER_CONFIG).is_file():
        raise UnsupportedInput(f"`{path}` is an adapter", hint="use `llmconv merge-lora BASE ADAPTER -o OUT`")
    for name, delta_format in delta_formats().items():
        if delta_format.detect(path):
            return name, delta_format.apply(base, path, dtype), None
    require_difference(path)
    return "difference", *plus_difference(base, open_difference(path), dtype)


@fetches
@checked
def extract_delta(  # noqa: PLR0913 - the options of the command, by the same names
    base: str | Path,
    tuned: str | Path,
    output: Placed,
    *,
    rank: int | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Extracted:
    """Writes what `tuned` is over `base`: an exact delta, or with `rank` a LoRA adapter that comes close to it.

    Args:
        base, tuned: Hugging Face folders, or training checkpoints that `to-hf` reads; paths, URIs or hub ids.
        output: the folder to make.
        rank: of the adapter, whose products are the best of that rank up to a thousandth or so of their norm (exact up
            to a million elements); None for an exact delta.
        dtype: `keep` or the float type that the tuned weights are rounded to first, or that the adapter gets
            (whose factors are float32 with `keep`).
        max_shard_size: bytes of tuned weights that one file of an exact delta encodes.
        overwrite, resume, dry_run: replace an existing folder; continue an interrupted run; write nothing.

    Raises:
        InputRefused: an input is malformed, or the adapter cannot say what changed.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    _check_options(dtype, max_shard_size)
    below, above = settled(open_model(base)), settled(open_model(tuned))
    low_rank: LowRankDelta | None = None
    if rank is None:
        plan = plan_exact(below, with_cast(above, dtype) if dtype != "keep" else above, max_shard_size)
    else:
        low_rank = plan_low_rank(below, above, rank, dtype)
        plan = low_rank.plan
    warn_all((*below.warnings, *above.warnings, *plan.warnings, *_unlike(below, above)))
    kind = "low-rank" if low_rank else "exact"
    place = output_place(output)
    check_output(plan, place, overwrite, [below.path, above.path], resume=resume)
    if dry_run:
        return Extracted(plan, kind, whole=low_rank.whole if low_rank else ())
    options = {"tuned": above.path.absolute().name, "rank": rank, "dtype": None if dtype == "keep" else dtype}
    steps = [step("delta-extract", below.path.absolute(), **options)]
    sources = _sources(place, below.path, above.path)
    manifest = write_checkpoint(plan, place, steps=steps, sources=sources, overwrite=overwrite, resume=resume)
    size = sum(manifest.files[shard.name]["bytes"] for shard in plan.shards)
    plan = replace(plan, found=manifest.found)
    if low_rank is None or manifest.found:
        return Extracted(plan, kind, size, whole=low_rank.whole if low_rank else ())
    return Extracted(plan, kind, size, low_rank.captured(), low_rank.captured_overall(), low_rank.whole)


def _unlike(base: Checkpoint, tuned: Checkpoint) -> list[str]:
    """A warning where the tuned model cannot come from this base."""
    if any(name in base and base[name].shape == tensor.shape for name, tensor in tuned.items()):
        return []
    kinds = f"{base.config.get('model_type')} and {tuned.config.get('model_type')}"
    return [f"no tensor of the tuned model has the name and shape of one of the base ({kinds}): is it its base?"]


def _check_options(dtype: str, max_shard_size: str | int) -> None:
    """Raises UsageProblem where one means nothing."""
    check_dtype(dtype)
    require_shard_size(max_shard_size)


def _sources(output: Place, *paths: Path) -> list[Path]:
    return [file for path in paths for file in files_under(path, local_only(output))]
