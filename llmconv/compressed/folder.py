"""quantize: a model becomes a folder of codes for vLLM, SGLang and transformers, without a GPU or it in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmconv.argument_checks import checked
from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import Checkpoint, is_model_folder, open_checkpoint, refuse_unmerged, with_modules
from llmconv.compressed.schemes import BASE_FORMATS, IntegerOptions, Scheme, fitted, scheme_of
from llmconv.compressed.selection import INPUTS_FIRST, Selected, select
from llmconv.convert.models.blueprint import released
from llmconv.convert.models.completeness import check_folder
from llmconv.convert.models.head_and_dtype import check_dtype, plain_tensors, settled, with_cast
from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.files.paths import Placed, is_address, local_only, output_place
from llmconv.files.sources import fetches, files_of_weights, files_under, local_path, reading_safely
from llmconv.model_code import with_copied_code
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import DEFAULT_SIZE, Plan, plan_checkpoint, require_shard_size
from llmconv.output.work import Work, done_by, repeatable, require_possible
from llmconv.output.writer import check_output, write_checkpoint
from llmconv.progress import warn_all
from llmconv.quantized_weights.quantized_checkpoint import FIELD
from llmconv.tensors import LazyTensor, lists_by_key

if TYPE_CHECKING:
    from llmconv.runtime.tokenizer import CalibrationText

COMMAND = "quantize"


@dataclass(frozen=True)
class Quantized:
    """The plan and result of a quantization; printed by `--dry-run`.

    Attributes:
        plan: the tensors and files to write.
        scheme: the name of the scheme.
        weights: names of the weights that became codes.
        ignore: names of the modules that are kept, as the `quantization_config` lists them.
        warnings: one line each.
    """

    plan: Plan
    scheme: str
    weights: tuple[str, ...]
    ignore: tuple[str, ...]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.weights)} weights as {self.scheme}, {len(self.ignore)} module(s) kept"
        return f"<Quantized {self.plan.checkpoint.kind}: {counts}, {self.plan.nbytes:,} bytes>"


@repeatable("model", "output")
@fetches
@checked
def quantize(  # noqa: PLR0913 - the options of the command, by the same names
    model: str | Path,
    output: Placed,
    *,
    scheme: str,
    adapters: str | Path | Sequence[str | Path] = (),
    quant_block: int | None = None,
    quant_exclude: str | Sequence[str] = (),
    method: str | None = None,
    calibrate: str | Path | None = None,
    base_format: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = DEFAULT_SIZE,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    work: Work | None = None,
) -> Quantized:
    """Writes `model` with its matrices as codes and scales, as compressed-tensors stores them; returns what it wrote.

    Matrices of layers are rounded, block of rows by block of rows. Routers, heads, embeddings, norms, MTP heads, towers
    of images and sound, and matrices that the scheme's blocks do not divide are kept bit for bit.

    Args:
        model: a Hugging Face folder, or a training checkpoint as for `to_hf`; also a URI or hub id.
        output: the folder to make.
        scheme: one of `llmconv.compressed.schemes.SCHEMES`.
        adapters: adapters that are merged first, as by `merge_lora`.
        quant_block: columns that share a scale, of `w4a16` and `w4a16-asym`; 128 when None.
        quant_exclude: patterns of names of weights that are kept, too.
        method: of the same schemes: `rtn` (when None, without a text) for scales from the extreme values, `search`
            (when None, with one) for those with the least squared error, or with `calibrate` also `gptq` (error
            feedback) and `awq` (scaled norms and columns).
        calibrate: of the same schemes: a text file, or `default` for the text that ships with llmconv; columns of a
            weight count as much as what they are multiplied with on this text.
        base_format: of the same schemes: `awq` or `gptq` for the form of AutoAWQ or GPTQ.
        dtype: `keep`, or the float type of what is kept, to which weights are rounded before they become codes.
        max_shard_size: largest safetensors file.
        overwrite: replace what llmconv made.
        resume: continue an interrupted run.
        dry_run: return the plan, and write nothing.
        work: `Part(3, 16)` of the shards, `Finish()` after all parts, `Workers(8)` or `Ray()`; None: all here.

    Raises:
        UsageProblem: an unknown scheme, an option of another one, or options that exclude or need each other.
        UnsupportedInput: a model that is quantized already, of which no matrix can be quantized, or which the text
            cannot run through.
        InputRefused, MalformedInput, OutputFailed: the model, a weight that is not finite, or the disk is at fault.
    """
    check_dtype(dtype)
    require_possible(work, overwrite=overwrite)
    require_shard_size(max_shard_size)
    integers = IntegerOptions(quant_block, method, calibrate, base_format)
    chosen = scheme_of(scheme, integers)
    method = integers.rounding if chosen.integers else None
    exclude = (quant_exclude,) if isinstance(quant_exclude, str) else tuple(quant_exclude)
    paths = [adapters] if isinstance(adapters, str | Path) else list(adapters)
    source, used = opened(model, paths, in_parts=calibrate is None)
    source = with_cast(source, dtype) if dtype != "keep" else source
    chosen = fitted(chosen, source.config)
    selected, planned = plan_quantized(source, chosen, exclude)
    plan = plan_checkpoint(planned, max_shard_size, together=_groups(planned, selected))
    text = _text(calibrate, source, selected, dtype, work)
    warnings = (*source.warnings, *_notes(selected, chosen))
    warn_all(warnings)
    place = output_place(output)
    inputs = [source.path, *(Path(path) for path in paths if not is_address(path))]
    check_output(plan, place, overwrite, inputs, resume=resume, work=work)
    done = Quantized(plan, scheme, tuple(selected.weights), selected.ignore, warnings)
    if dry_run:
        return done
    if text:
        from llmconv.compressed.calibrated import with_text  # noqa: PLC0415 - traces the model

        measured = with_text(source, selected, chosen, method, text, place)
        together = _groups(planned, selected)
        plan = plan_checkpoint(_planned(source, measured, chosen), max_shard_size, together=together)
        plan = replace(plan, measured=measured.measured)
    options = {"scheme": scheme, "quant_block": quant_block, "quant_exclude": list(exclude), "method": method}
    options |= {"calibrate": text.sha256 if text else None, "base_format": base_format}
    made = step(COMMAND, source.path.absolute(), **options, dtype=dtype, adapters=used)
    sources = _files(source, local_only(place)) + [file for path in paths for file in files_under(local_path(path))]
    asked: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "work": work}
    found = write_checkpoint(plan, place, steps=[*_steps(source), made], sources=sources, **asked).found
    return replace(done, plan=done_by(work, plan, found))


def _text(
    calibrate: str | Path | None, source: Checkpoint, selected: Selected, dtype: str, work: Work | None
) -> CalibrationText | None:
    """The text of `calibrate`; UsageProblem or UnsupportedInput where it cannot run through the weights."""
    if calibrate is None:
        return None
    if work:
        raise UsageProblem(
            "`--calibrate` measures activations in one process, and the work is divided between several",
            hint="leave out `--workers`, `--part` and `--engine`, or `--calibrate`",
        )
    from llmconv.compressed.calibrated import require_plain_files  # noqa: PLC0415 - traces the model
    from llmconv.runtime.tokenizer import CalibrationText  # noqa: PLC0415 - most runs have no text

    require_plain_files(source, selected, dtype)
    return CalibrationText.read(calibrate)


def opened(
    model: str | Path, adapters: Sequence[str | Path] = (), *, in_parts: bool = True
) -> tuple[Checkpoint, list[dict[str, str]]]:
    """A model of any format in plain weights, with adapters merged, and each adapter's name and sha256.

    `in_parts`: files of an address are fetched as they are read, which graphs that map them do not see.

    Raises UnsupportedInput: it is quantized; else as `to_hf` and `merge_lora`.
    """
    with reading_safely(model):
        path = local_path(model, in_parts=in_parts)
        if is_model_folder(path):
            checkpoint = open_checkpoint(path)
            require_model_type(checkpoint.config, model)
            refuse_unmerged(checkpoint.tensors, checkpoint.config, path.name)
            plain_tensors(checkpoint)  # refuses codes
            notes = check_folder(checkpoint.tensors, checkpoint.config, path.name)
            checkpoint = with_copied_code(replace(with_modules(checkpoint), warnings=(*checkpoint.warnings, *notes)))
        else:
            from llmconv.convert.opening import open_training  # noqa: PLC0415 - most models are Hugging Face folders

            checkpoint = with_cast(settled(open_training(model)), "keep")
            plain_tensors(checkpoint)
    if str(checkpoint.config.get("model_type")) not in INPUTS_FIRST:  # whose stacks `select` takes apart by itself
        checkpoint = replace(checkpoint, tensors=released(checkpoint.tensors, checkpoint.config))
    if not adapters:
        return settled(checkpoint), []
    from llmconv.convert.adapters.combining import DEFAULTS, recipe_of  # noqa: PLC0415 - most models have no adapter
    from llmconv.convert.merge import identity, plan_merge  # noqa: PLC0415 - as above
    from llmconv.convert.opening_adapters import open_adapters  # noqa: PLC0415 - as above

    found = open_adapters(adapters, (), checkpoint, None)
    merge = plan_merge(checkpoint, found, recipe_of(DEFAULTS, found))
    return replace(merge.plan.checkpoint, warnings=merge.warnings), [identity(one) for one in found]


def plan_quantized(source: Checkpoint, scheme: Scheme, exclude: Sequence[str] = ()) -> tuple[Selected, Checkpoint]:
    """What becomes of each tensor, and the checkpoint with codes in place of weights; nothing is read."""
    selected = select(source.tensors, source.config, scheme, exclude)
    if scheme.format in BASE_FORMATS:
        _require_distinct(selected)
    return selected, _planned(source, selected, scheme)


def _require_distinct(selected: Selected) -> None:
    """Raises UnsupportedInput: AWQ's list of kept modules is of parts of names, one of which a quantized module has."""
    stems = [name.removesuffix(".weight") for name in selected.weights]
    for kept in selected.ignore:
        if other := next((stem for stem in stems if kept in stem), None):
            raise UnsupportedInput(
                f"`{kept}` is kept, and engines would not quantize `{other}` either, whose name contains it",
                hint="leave out `--base-format`",
            )


def _planned(source: Checkpoint, selected: Selected, scheme: Scheme) -> Checkpoint:
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in selected.tensors.items():
        tensors |= scheme.parts(selected.weights[name]) if name in selected.weights else {name: tensor}
    config = {**source.config, FIELD: scheme.settings(selected.ignore)}
    return replace(source, tensors=tensors, config=config, files={})


def _groups(planned: Checkpoint, selected: Selected) -> list[list[str]]:
    """Names of the tensors of each weight, which are computed together."""
    stems = {name.removesuffix("weight") for name in selected.weights}
    found = lists_by_key((name[: name.rfind(".") + 1], name) for name in planned if not name.endswith(".bias"))
    return [names for stem, names in found.items() if stem in stems]


def _notes(selected: Selected, scheme: Scheme) -> list[str]:
    notes = []
    if selected.unfit:
        unit = "×".join(map(str, scheme.unit))
        kept = f"{len(selected.unfit)} matrices are kept, whose shapes are not multiples of {unit}"
        notes.append(f"{kept}: {listing(selected.unfit)}")
    fused = [name for name in selected.weights if FUSED.search(name)]
    if fused and scheme.weights["strategy"] == "tensor_group":
        problem = "vLLM leaves global scales unset of matrices that a model stores joined (its issue 39764)"
        notes.append(f"{problem}: {listing(fused)}; `--quant-exclude` keeps them")
    return notes


FUSED = re.compile(r"\.(?:qkv_proj|gate_up_proj|query_key_value|Wqkv|W_pack|attn_qkv)\.weight$")
"""Matrices that vLLM builds of several, and some models store as one."""


def _steps(source: Checkpoint) -> list[dict[str, Any]]:
    return list(steps_of_weights(source.path)) if source.path.is_dir() else []


def _files(source: Checkpoint, output: Path | None) -> list[Path]:
    """The files that decide the output: of a Hugging Face folder those with weights, settings and code."""
    if not is_model_folder(source.path):
        return files_of_weights(source.path, output)
    files = sorted(path for path in source.path.iterdir() if path.suffix in (".safetensors", ".json"))
    return [*files, *(source.path / name for name in source.side_files if name.endswith(".py"))]
