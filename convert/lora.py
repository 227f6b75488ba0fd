"""merge_lora: PEFT LoRA adapters added to the weights of a base, streamed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.checkpoint import Checkpoint, open_checkpoint, read_side_files
from llmconv.convert.adapters.low_rank import add_low_rank
from llmconv.convert.adapters.placement import HEAD, Edits
from llmconv.convert.adapters.reading import Adapter, open_adapter
from llmconv.convert.adapters.vocabulary import find_embedding, fit_vocabulary, says_tied, untie
from llmconv.convert.configs import with_dtype
from llmconv.convert.paddle.lora import is_paddle_adapter, open_paddle_adapter
from llmconv.convert.quantization.base import QuantizedBase, check_choice, quantized_base
from llmconv.convert.quantization.retention import Retention, measure
from llmconv.convert.to_hf import check_dtype
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.manifest import step, steps_of_weights
from llmconv.progress import warn_all
from llmconv.storage import local_path, reading_safely
from llmconv.tensors import BLOCK_BYTES, BY_NAME, FLOATS, LazyTensor, cast
from llmconv.writer import Plan, check_output, plan_checkpoint, write_checkpoint

TOKENIZER = ("tokenizer", "special_", "added_", "vocab", "merges", "spiece", "sentencepiece", "chat_template")
"""How the side files begin that belong to a vocabulary."""


@dataclass(frozen=True)
class Merge:
    """What a merge does; printed by `--dry-run`.

    Attributes:
        plan: the tensors and files to write.
        merged: names of the tensors that a low-rank update is added to.
        replaced: names of the tensors that an adapter replaces whole.
        added: names of the tensors that the base does not have.
        warnings: what a user should know, one line each.
        retention: how much of the update survived, where the base is quantized and the result is too.
    """

    plan: Plan
    merged: tuple[str, ...]
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    warnings: tuple[str, ...]
    retention: Retention | None = None


def merge_lora(  # noqa: PLR0913 - the options of the command, by the same names
    base: str | Path,
    adapters: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] = (),
    alpha: float | None = None,
    dtype: str = "keep",
    base_quant: str | None = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Merge:
    """Writes `base` with Σ wᵢ·sᵢ·Bᵢ·Aᵢ added, as a Hugging Face folder; tensors that no adapter names pass unchanged.

    The sum is made in float32 and rounded once. Memory follows the row blocks, not the model.

    Args:
        base: Hugging Face folder or hub id.
        adapters: LoRA folders of PEFT or PaddleNLP, or hub ids; s = alpha/r, or alpha/√r with `use_rslora` (PEFT
            `LoraLayer.scaling`, PaddleNLP `LoRALinear.scaling`).
        output: the folder to make.
        weights: w, one per adapter; all 1 by default.
        alpha: `lora_alpha` where an adapter's config does not carry it.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the output's floating-point tensors.
        base_quant: what becomes of a quantized base: `dequantize` (plain weights, bfloat16 where `dtype` is `keep`) or
            `requantize` (stored as it is, refused where too little of the update survives).
        max_shard_size: largest safetensors file, such as `5GB`.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: plan and check everything, write nothing.

    Raises:
        UsageProblem: the options contradict each other or the adapters.
        InputRefused: `output` exists, the disk is too small, or an input is missing.
        MalformedInput: an adapter for another base, incomplete, or not finite.
        UnsupportedInput: a kind of adapter or base that this formula does not fit.
        OutputFailed: writing failed.
    """
    check_dtype(dtype)
    with reading_safely(base):
        checkpoint = open_checkpoint(local_path(base))
    opened = [_open(adapter, alpha) for adapter in adapters]
    merge = plan_merge(checkpoint, opened, _checked_weights(weights, opened), dtype, max_shard_size, base_quant)
    warn_all(merge.warnings)
    check_output(merge.plan, Path(output), overwrite, [checkpoint.path, *(item.path for item in opened)])
    if not dry_run:
        options = {"weights": list(weights), "alpha": alpha, "dtype": None if dtype == "keep" else dtype}
        options["base_quant"] = base_quant
        done = step("merge-lora", checkpoint.path.absolute(), adapters=[_identity(item) for item in opened], **options)
        steps, sources = [*steps_of_weights(checkpoint.path), done], _sources(checkpoint, opened)
        write_checkpoint(merge.plan, Path(output), steps=steps, sources=sources, overwrite=overwrite, resume=resume)
    return merge


def _open(adapter: str | Path, alpha: float | None) -> Adapter:
    with reading_safely(adapter):
        path = local_path(adapter)
        return open_paddle_adapter(path, alpha) if is_paddle_adapter(path) else open_adapter(path, alpha)


def _checked_weights(weights: Sequence[float], adapters: Sequence[Adapter]) -> list[float]:
    if not adapters:
        raise UsageProblem("no adapter is given", hint="give at least one: `llmconv merge-lora BASE ADAPTER -o OUT`")
    if weights and len(weights) != len(adapters):
        raise UsageProblem(
            f"{len(weights)} weight(s) for {len(adapters)} adapter(s)", hint="give `--weight` once per adapter"
        )
    if not all(map(math.isfinite, weights)):
        raise UsageProblem("a weight is not finite", hint="give numbers such as `--weight 0.5`")
    return list(weights) or [1.0] * len(adapters)


def _identity(adapter: Adapter) -> dict[str, str]:
    digest = hashlib.sha256()
    for path in adapter.weights:
        with open(path, "rb") as file:
            while chunk := file.read(BLOCK_BYTES):
                digest.update(chunk)
    return {"name": adapter.name, "sha256": digest.hexdigest()}


def _sources(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> list[Path]:
    files = sorted(path for path in checkpoint.path.iterdir() if path.suffix in (".safetensors", ".json"))
    return files + [path for adapter in adapters for path in (*adapter.weights, adapter.settings)]


def plan_merge(
    base: Checkpoint,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    dtype: str,
    max_shard_size: str | int,
    base_quant: str | None = None,
) -> Merge:
    """Places every tensor of every adapter and makes the lazy result; see `merge_lora` for arguments and errors."""
    _refuse_other_types(base, adapters)
    quantized = quantized_base(base)
    check_choice(base_quant, quantized, dtype)
    plain = quantized.plain if quantized else base
    result, edits = merged(plain, adapters, weights, dtype)
    merge = Merge(
        plan_checkpoint(result, max_shard_size),
        merged=tuple(name for name in result if name in edits.changes),
        replaced=tuple(name for name in result if name in edits.whole and name in plain),
        added=tuple(name for name in result if name not in plain),
        warnings=tuple(edits.warnings),
    )
    return _stored(quantized, result, merge, dtype, max_shard_size, base_quant) if quantized else merge


def _stored(
    base: QuantizedBase, result: Checkpoint, merge: Merge, dtype: str, max_shard_size: str | int, choice: str | None
) -> Merge:
    """The merge of a quantized base, as the choice stores it; reads the weights where they are quantized again."""
    if choice == "dequantize":
        plan = plan_checkpoint(base.dequantized(result, dtype), max_shard_size)
        return replace(merge, plan=plan, warnings=(*merge.warnings, base.dequantizing(dtype)))
    checkpoint, changed = base.requantized(result)
    retention = measure(base.plain, result, changed)
    parts = base.changed_parts(changed)
    return replace(
        merge,
        plan=plan_checkpoint(checkpoint, max_shard_size),
        merged=tuple(name for name in checkpoint if parts.get(name, name) in merge.merged),
        replaced=tuple(name for name in checkpoint if parts.get(name, name) in merge.replaced),
        warnings=(*merge.warnings, *retention.require()),
        retention=retention,
    )


def _refuse_other_types(base: Checkpoint, adapters: Sequence[Adapter]) -> None:
    """Shapes of another architecture may fit by chance."""
    own = base.config.get("model_type")
    other = next((adapter for adapter in adapters if adapter.model_type not in ("", own)), None)
    if other:
        raise MalformedInput(
            f"`{other.name}` was trained on a {other.model_type}, the base is a {own}",
            hint="give the base that the adapter was trained on",
        )


def merged(
    base: Checkpoint, adapters: Sequence[Adapter], weights: Sequence[float], dtype: str = "keep"
) -> tuple[Checkpoint, Edits]:
    """The lazy result, and what was done to the base; see `merge_lora` for arguments and errors."""
    if base.config.get("quantization_config"):
        raise UnsupportedInput(
            "the base is quantized", hint="merge into the unquantized model the adapter was trained on, then quantize"
        )
    embedding = find_embedding(base)
    shared = embedding is not None and HEAD not in base and says_tied(base.config)
    edits = Edits(dict(base.tensors), base.config)
    if shared and embedding:
        edits.tensors[HEAD] = base[embedding]
    for adapter, weight in zip(adapters, weights, strict=True):
        edits.place(adapter, weight)
    config = deepcopy(base.config)
    resized = fit_vocabulary(edits, embedding, config, shared=shared)
    untie(edits, embedding, config, shared=shared, stay=resized or any(item.config.tied for item in adapters))
    tensors = {name: _result(edits, name, dtype) for name in edits.tensors}
    if dtype != "keep":
        config = with_dtype(config, tensors)
    side_files = _side_files(base, adapters if resized else ())
    return replace(base, tensors=tensors, config=config, side_files=side_files), edits


def _result(edits: Edits, name: str, dtype: str) -> LazyTensor:
    """The lazy output: of the base's element type, unless another one is asked for."""
    kept = edits.tensors[name].dtype
    target = BY_NAME[dtype] if dtype != "keep" and kept.name in ("float64", *FLOATS) else kept
    if name in edits.changes:
        return add_low_rank(edits.current(name), edits.changes[name], target)
    return cast(edits.current(name), target)


def _side_files(base: Checkpoint, adapters: Sequence[Adapter]) -> dict[str, bytes]:
    """The base's, or the adapter's tokenizer where the vocabulary is the adapter's."""
    for adapter in adapters:
        own = {name: data for name, data in read_side_files(adapter.path).items() if name.startswith(TOKENIZER)}
        if own:
            others = {name: data for name, data in base.side_files.items() if not name.startswith(TOKENIZER)}
            return others | own
    return dict(base.side_files)
