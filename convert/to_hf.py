"""to_hf: a training checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.calls import checked, require_choice
from llmconv.checkpoint import Checkpoint
from llmconv.convert.again import open_again, refuse_options
from llmconv.convert.alone import alone
from llmconv.convert.configs import merged_configs, with_dtype
from llmconv.convert.formats import by_name, detect
from llmconv.convert.state_dict import check_complete
from llmconv.convert.torch_state.safetensors_files import is_model_folder
from llmconv.convert.unclaimed import explain
from llmconv.errors import UsageProblem
from llmconv.manifest import Manifest, step
from llmconv.packing.unpacking import unpacked
from llmconv.paths import Written
from llmconv.plan import DEFAULT_SIZE, Plan, plan_checkpoint, require_shard_size
from llmconv.progress import warn_all
from llmconv.storage import fetches, files_under, local_path, reading_safely
from llmconv.tensors import BY_NAME, FLOATS, cast
from llmconv.writer import check_output, write_checkpoint


@fetches
@checked
def to_hf(  # noqa: PLR0913 - the options of the command, by the same names
    source: str | Path,
    output: Written,
    *,
    format: str | None = None,
    config: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    base: str | Path | None = None,
    drop: bool = False,
    qkv_layout: str | None = None,
    adapter: str | None = None,
    root: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Plan:
    """Converts `source` into the Hugging Face folder `output` and returns what was (or would be) written.

    Args:
        source, output: a checkpoint, its URI or hub id, or a Hugging Face folder to change; the folder to make.
        format: name of the training format; detected by content when None.
        config, tokenizer: JSON or YAML files whose fields are added to the checkpoint's own configuration, later ones
            winning; a tokenizer file or folder to use instead of the checkpoint's own.
        base: the model that training started from, where the checkpoint holds only what was trained.
        drop: leave out parts of the model that no model of transformers can hold, instead of refusing it.
        qkv_layout: order of fused matrices in a MindFormers file: `plain` up to 1.4, `interleaved` since 1.5.
        adapter: what becomes of a LoRA adapter in a Composer checkpoint: `merge` or `split`; merged when None.
        root: keys, joined with dots, under which a distributed checkpoint holds the model, where it holds several.
        dtype, max_shard_size: `keep` or the float type of the weights; largest safetensors file, `5GB` when None.
        overwrite, resume, dry_run: replace what llmconv made; continue an interrupted run; write nothing.

    Raises:
        InputRefused, UsageProblem, OutputFailed: the checkpoint, an option or the disk is at fault.
    """
    _require_words(dtype, qkv_layout, adapter)
    size = DEFAULT_SIZE if max_shard_size is None else max_shard_size
    require_shard_size(size)
    configs = tuple(local_path(path) for path in config)
    words = local_path(tokenizer) if tokenizer else None
    base = local_path(base) if base else None
    options = {"base": base, "drop": drop or None, "qkv_layout": qkv_layout, "adapter": adapter, "root": root}
    changes = dtype != "keep" or max_shard_size is not None or bool(configs or words)
    checkpoint = open_training(source, format, configs, words, options, rewrite=changes)
    warn_all(checkpoint.warnings)
    plan = plan_checkpoint(_with_dtype(checkpoint, dtype), size)
    check_output(plan, Path(output), overwrite, [path for path in (checkpoint.path, base) if path], resume=resume)
    if not dry_run:
        named = {name: path.name if path else None for name, path in (("tokenizer", words), ("base", base))}
        told = {**options, **named, "config": [path.name for path in configs] or None, "dtype": dtype}
        done = _write(plan, Path(output), base, told, overwrite=overwrite, resume=resume)
        plan = replace(plan, found=done.found)
    return plan


def _require_words(dtype: str, qkv_layout: str | None, adapter: str | None) -> None:
    """Refuses words that mean nothing; any of them would pass for the default."""
    check_dtype(dtype)
    require_choice(qkv_layout or "plain", ("plain", "interleaved"), "qkv_layout")
    require_choice(adapter or "merge", ("merge", "split"), "adapter")


def _write(
    plan: Plan, output: Path, base: Path | None, told: Mapping[str, Any], *, overwrite: bool, resume: bool
) -> Manifest:
    source = plan.checkpoint.path
    steps = [step("to-hf", source, format=plan.checkpoint.format, **told)]
    sources = [file for path in (source, base) if path for file in files_under(path, output)]
    return write_checkpoint(plan, output, steps=steps, sources=sources, overwrite=overwrite, resume=resume)


def open_training(
    source: str | Path,
    format: str | None = None,
    config: tuple[Path, ...] = (),
    tokenizer: Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    rewrite: bool = False,
) -> Checkpoint:
    """Opens a training checkpoint of any known format, in Hugging Face names.

    Args:
        source, format, config, tokenizer: see `to_hf`.
        options: those of `to_hf` that only some formats have.
        rewrite: take a folder that already is a Hugging Face model, too.

    Raises:
        InputRefused: see `to_hf`.
    """
    with reading_safely(source):
        path = local_path(source)
        inside = unpacked(path)
        if rewrite and not format and is_model_folder(inside) and detect(inside) is None:
            return open_again(inside, path.name, config, tokenizer, options or {})
        return replace(_open(inside, path, format, config, tokenizer, options), path=path)


def _open(
    inside: Path,
    path: Path,
    format: str | None,
    config: tuple[Path, ...],
    tokenizer: Path | None,
    options: Mapping[str, Any] | None,
) -> Checkpoint:
    chosen = by_name(format) if format else detect(inside)
    if chosen is None and (file := alone(inside)) and not is_model_folder(inside):
        inside, chosen = file, detect(file)
    if chosen is None:
        raise explain(inside)
    if format and not chosen.detect(inside):
        raise UsageProblem(
            f"`{path.name}` is not of the format `{format}`", hint="leave out `--from`; formats are told by content"
        )
    given = {name: value for name, value in (options or {}).items() if value}
    refuse_options(given, chosen.options, f"the format `{chosen.name}`")
    opened = chosen.open(inside, {**merged_configs(config), **given}, tokenizer)
    if opened.tensors:  # whatever the user's fields have made of the configuration since the format checked its own
        check_complete(opened.tensors, opened.config, path.name)
    return opened


def _with_dtype(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """As `with_cast`; a configuration that is kept as it is needs no new `torch_dtype`."""
    return checkpoint if dtype == "keep" and checkpoint.format == "hf" else with_cast(checkpoint, dtype)


def check_dtype(dtype: str) -> None:
    """Refuses a name that is no element type of weights.

    Raises:
        UsageProblem: neither `keep` nor a float type.
    """
    if dtype not in ("keep", *FLOATS):
        raise UsageProblem(f"there is no dtype `{dtype}`", hint="keep, float32, float16 or bfloat16")


def with_cast(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The checkpoint with its float weights rounded to `dtype` (or kept), and a config that says what they are."""
    tensors = dict(checkpoint.tensors)
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in tensors.items()}
    adapter = checkpoint.adapter
    if adapter and dtype != "keep":
        own = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in adapter.tensors.items()}
        adapter = replace(adapter, tensors=own)
    return replace(checkpoint, tensors=tensors, config=with_dtype(checkpoint.config, tensors), adapter=adapter)
