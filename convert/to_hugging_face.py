"""to_hf: a training checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked, require_choice
from llmconv.convert.models.config_file import OPTION, TrustedCode, config_file
from llmconv.convert.models.head_and_dtype import check_dtype, settled, with_cast, with_stated_type
from llmconv.convert.opening import open_training
from llmconv.convert.tokenizers import beyond_rows
from llmconv.errors import UsageProblem
from llmconv.files.paths import Placed, is_address, local_only, output_place
from llmconv.files.sources import fetches, files_of_weights, local_path, source_name
from llmconv.output.manifest import step
from llmconv.output.plan import DEFAULT_SIZE, Plan, plan_checkpoint, require_shard_size
from llmconv.output.work import Work, done_by, repeatable, require_possible
from llmconv.output.writer import check_output, write_checkpoint
from llmconv.progress import warn_all


@repeatable("source", "output")
@fetches
@checked
def to_hf(  # noqa: PLR0913 - the options of the command, by the same names
    source: str | Path,
    output: Placed,
    *,
    format: str | None = None,
    config: Sequence[str | Path] = (),
    tokenizer: str | Path | None = None,
    base: str | Path | None = None,
    drop: bool = False,
    qkv_layout: str | None = None,
    adapter: str | None = None,
    root: str | None = None,
    strategy: str | Path | None = None,
    code: str | Path | None = None,
    trust_remote_code: bool = False,
    quant: str | None = None,
    dtype: str = "keep",
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    work: Work | None = None,
) -> Plan:
    """Converts `source` into the Hugging Face folder `output` and returns what was (or would be) written.

    Args:
        source: a checkpoint, its URI or hub id, or a Hugging Face folder to change.
        output: the folder to make.
        format: name of the training format; detected by content when None.
        config: JSON or YAML files whose fields are added to the checkpoint's own configuration, later ones winning.
        tokenizer: a tokenizer file or folder to use instead of the checkpoint's own.
        base: the model that training started from, where the checkpoint holds only what was trained.
        drop: leave out parts of the model that no model of transformers can hold, instead of refusing it.
        qkv_layout: order of fused matrices in a MindFormers file: `plain` up to 1.4, `interleaved` since 1.5.
        adapter: what becomes of a LoRA adapter in a training checkpoint: `merge` or `split`; merged when None.
        root: keys, joined with dots, under which a distributed checkpoint holds the model, where it holds several.
        strategy: file or folder of a MindFormers run's strategy, where it is not next to the rank folders.
        code: a local folder with the model's own Python files and its `config.json`, if they are not next to the
            checkpoint's or the given configuration.
        trust_remote_code: copy the model's own code, and run it to compare the weights with the model that it builds.
        quant: what becomes of the codes of a GGUF file: `dequantize` (when None), or `keep` where they are exact, as
            those of compressed-tensors. A quantized Hugging Face folder keeps its codes,
            unless `dequantize` takes their values.
        dtype: `keep`, or the float type of the weights; `keep` rounds values of codes in a folder to the type that its
            configuration states.
        max_shard_size: largest safetensors file; `5GB` when None.
        overwrite: replace what llmconv made.
        resume: continue an interrupted run.
        dry_run: return the plan, and write nothing.
        work: `Part(3, 16)` of the shards, `Finish()` after all parts, `Workers(8)` or `Ray()`; None: all here.

    Raises:
        InputRefused, UsageProblem, OutputFailed: the checkpoint, an option or the disk is at fault.
    """
    check_dtype(dtype)
    require_choice(qkv_layout or "plain", ("plain", "interleaved"), "qkv_layout")
    require_choice(adapter or "merge", ("merge", "split"), "adapter")
    require_choice(quant or "keep", ("keep", "dequantize"), "quant")
    if quant == "keep" and dtype != "keep":
        raise UsageProblem("codes that are kept have no other element type", hint="leave out `--dtype` or `--quant`")
    require_possible(work, overwrite=overwrite)
    require_shard_size(size := DEFAULT_SIZE if max_shard_size is None else max_shard_size)
    configs = tuple(local_path(path) for path in config)
    own_code = _trusted(code, trust_remote_code)
    words, base = (local_path(path, in_parts=True) if path else None for path in (tokenizer, base))
    strategy = local_path(strategy) if strategy else None
    options: dict[str, Any] = {"base": base, "drop": drop or None, "qkv_layout": qkv_layout, "adapter": adapter}
    options |= {"root": root, "strategy": strategy, "quant": quant}
    chosen = {**options, **({OPTION: own_code} if own_code else {})}
    changes = bool(quant) or dtype != "keep" or max_shard_size is not None or bool(configs or words or code or drop)
    checkpoint = settled(open_training(source, format, configs, words, chosen, rewrite=changes))
    warn_all((*checkpoint.warnings, *beyond_rows(checkpoint.side_files, checkpoint.config)))
    # a configuration that is kept as it is needs no new `torch_dtype`
    is_stored = checkpoint.format == "hf" or "quantization_config" in checkpoint.config or checkpoint.dequantized
    kept = dtype == "keep" and bool(is_stored)
    checkpoint = with_stated_type(checkpoint) if kept and checkpoint.dequantized else checkpoint
    plan = plan_checkpoint(checkpoint if kept else with_cast(checkpoint, dtype), size)
    plan = replace(plan, measured=_digest(*map(config_file, configs), *checkpoint.settings))
    place = output_place(output)
    check_output(plan, place, overwrite, [path for path in (checkpoint.path, base) if path], resume=resume, work=work)
    paths = (("tokenizer", words), ("base", base), ("strategy", strategy), ("code", own_code and own_code.given))
    named = {name: source_name(path) if path else None for name, path in paths}
    given = {**options, **named, OPTION: trust_remote_code, "dtype": dtype}
    given |= {"config": [path.name for path in configs] or None}
    if dry_run:
        return plan
    steps = [step("to-hf", checkpoint.path, format=checkpoint.format, **given)]
    sources = [file for path in (checkpoint.path, base) if path for file in files_of_weights(path, local_only(place))]
    asked: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "work": work}
    return done_by(work, plan, write_checkpoint(plan, place, steps=steps, sources=sources, **asked).found)


def _digest(*files: Path) -> str:
    """A hash of the content of files that say how tensors are read; empty without any."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else ""


def _trusted(code: str | Path | None, trust_remote_code: bool) -> TrustedCode | None:
    """The consent to run the model's own code, or None; UsageProblem for a folder without it, or not a local one."""
    if code is not None and not trust_remote_code:
        raise UsageProblem(
            "`--code` names code that would run, to compare the weights with the model that it builds",
            hint="read the code; if you trust it, add `--trust-remote-code`",
        )
    if code is not None and (is_address(code) or not Path(code).is_dir()):
        raise UsageProblem(
            f"`--code` is not a local folder: `{code}`", hint="copy the model's `config.json` and Python files into one"
        )
    return TrustedCode(Path(code) if code is not None else None) if trust_remote_code else None
