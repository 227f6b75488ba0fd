"""to_hf: a training checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmconv.checkpoint import Checkpoint
from llmconv.convert.configs import merged_configs, with_dtype
from llmconv.convert.formats import by_name, detect
from llmconv.convert.unclaimed import explain
from llmconv.errors import UsageProblem
from llmconv.manifest import step
from llmconv.progress import warn
from llmconv.storage import local_path
from llmconv.tensors import BY_NAME, cast
from llmconv.writer import Plan, plan_checkpoint, write_checkpoint


def to_hf(  # noqa: PLR0913 - the options of the command, by the same names
    source: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    config: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    qkv_layout: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Plan:
    """Converts `source` into the Hugging Face folder `output` and returns what was (or would be) written.

    Args:
        source: a checkpoint file or folder, or its URI or hub id.
        output: the folder to make.
        format: name of the training format; detected by content when None.
        config: JSON or YAML files whose fields are added to the checkpoint's own configuration, later ones winning.
        tokenizer: a tokenizer file or folder to use instead of the checkpoint's own.
        qkv_layout: order of fused matrices in a MindFormers file: `plain` up to 1.4, `interleaved` since 1.5.
        dtype: `keep`, `float32`, `float16` or `bfloat16`.
        max_shard_size: largest safetensors file, in bytes or as `5GB`.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: write nothing.

    Raises:
        UsageProblem: an option has an impossible value.
        InputRefused: the checkpoint is malformed, hostile, incomplete or of an unknown kind, or `output` exists.
        OutputFailed: writing failed.
    """
    if dtype != "keep" and dtype not in BY_NAME:
        raise UsageProblem(f"there is no dtype `{dtype}`", hint="keep, float32, float16 or bfloat16")
    configs = tuple(Path(path) for path in config)
    options = {"qkv_layout": qkv_layout} if qkv_layout else {}
    checkpoint = open_training(source, format, configs, Path(tokenizer) if tokenizer else None, options)
    for warning in checkpoint.warnings:
        warn(warning)
    plan = plan_checkpoint(with_cast(checkpoint, dtype), max_shard_size)
    if not dry_run:
        done = step(
            "to-hf",
            checkpoint.path,
            format=checkpoint.format,
            dtype=None if dtype == "keep" else dtype,
            max_shard_size=str(max_shard_size),
            config=[path.name for path in configs] or None,
            tokenizer=Path(tokenizer).name if tokenizer else None,
            **options,
        )
        sources = _files(checkpoint.path)
        write_checkpoint(plan, Path(output), steps=[done], sources=sources, overwrite=overwrite, resume=resume)
    return plan


def open_training(
    source: str | Path,
    format: str | None = None,
    config: tuple[Path, ...] = (),
    tokenizer: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Opens a training checkpoint of any known format, in Hugging Face names.

    Raises:
        InputRefused: see `to_hf`.
    """
    path = local_path(source)
    chosen = by_name(format) if format else detect(path)
    if chosen is None:
        raise explain(path)
    if format and not chosen.detect(path):
        raise UsageProblem(
            f"`{path.name}` is not of the format `{format}`", hint="leave out `--from`; formats are told by content"
        )
    foreign = sorted({*(options or {})} - {*chosen.options})
    if foreign:
        raise UsageProblem(
            f"`--{foreign[0].replace('_', '-')}` means nothing for the format `{chosen.name}`", hint="leave it out"
        )
    return chosen.open(path, {**merged_configs(config), **(options or {})}, tokenizer)


def with_cast(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """The checkpoint with its float weights rounded to `dtype` (or kept), and a config that says what they are."""
    tensors = dict(checkpoint.tensors)
    if dtype != "keep":
        tensors = {name: cast(tensor, BY_NAME[dtype]) for name, tensor in tensors.items()}
    return replace(checkpoint, tensors=tensors, config=with_dtype(checkpoint.config, tensors))


def _files(path: Path) -> list[Path]:
    """The files whose size and time guard `--resume`, those of rank folders included."""
    entries = [path] if path.is_file() else [*path.iterdir(), *path.glob("rank_*/*")]
    return sorted(entry for entry in entries if entry.is_file())
