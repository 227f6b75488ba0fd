"""merge_lora: PEFT LoRA adapters added to the weights of a base, streamed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, open_checkpoint, read_side_files
from llmconv.convert.adapters.checking import Check, check_written
from llmconv.convert.adapters.combining import SUMS, Combination
from llmconv.convert.adapters.opening import open_adapters
from llmconv.convert.adapters.placement import Edits
from llmconv.convert.adapters.reading import Adapter
from llmconv.convert.adapters.replication import replicated
from llmconv.convert.adapters.task_vectors import TaskVectors
from llmconv.convert.adapters.vocabulary import (
    find_embedding,
    find_head,
    fit_vocabulary,
    follow_tokens,
    says_tied,
    untie,
)
from llmconv.convert.configs import with_dtype
from llmconv.convert.to_hf import check_dtype
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.layout import KEEP
from llmconv.manifest import step, steps_of_weights
from llmconv.progress import warn_all
from llmconv.storage import local_path, reading_safely
from llmconv.tensors import BLOCK_BYTES, BY_NAME, FLOATS, LazyTensor
from llmconv.writer import Plan, check_output, plan_checkpoint, write_checkpoint

LINEAR = Combination()
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
        edits: what is done to which tensor.
        check: what comparing the written folder gave, when that was asked for.
    """

    plan: Plan
    merged: tuple[str, ...]
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    warnings: tuple[str, ...]
    edits: Edits = field(repr=False)
    check: Check | None = None


def merge_lora(  # noqa: PLR0913 - the options of the command, by the same names
    base: str | Path,
    adapters: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] = (),
    alpha: float | None = None,
    initial_adapters: Sequence[str | Path] = (),
    combine: str = "linear",
    densities: Sequence[float] = (),
    seed: int = 0,
    rank: int | None = None,
    majority_sign: str = "total",
    dtype: str = "keep",
    max_shard_size: str | int = KEEP,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    check: bool = False,
) -> Merge:
    """Writes `base` with Σ wᵢ·sᵢ·Bᵢ·Aᵢ added, as a Hugging Face folder; tensors that no adapter names pass unchanged.

    The sum is made in float64 and rounded once. Memory follows the row blocks, not the model.

    Args:
        base: Hugging Face folder or hub id.
        adapters: LoRA folders of PEFT or PaddleNLP, or hub ids; s = alpha/r, or alpha/√r with `use_rslora` (PEFT
            `LoraLayer.scaling`, PaddleNLP `LoRALinear.scaling`).
        output: the folder to make.
        weights: w, one per adapter; all 1 by default.
        alpha: `lora_alpha` where an adapter's config does not carry it.
        initial_adapters: one per adapter, as it was before training, where that took it out of the base (PiSSA, OLoRA,
            CorDA, LoRA-GA): its product is subtracted. `-` for an adapter without one.
        combine: how several adapters become one, one of `METHODS` of `adapters.combining`, which defines them.
        densities: for a `combine` that prunes, the share of each adapter's change to keep; one, or one per adapter.
        seed: for a `combine` that draws; with a tensor's name and the adapter's content it decides what is drawn.
        rank: for `svd`; the largest rank of the adapters by default.
        majority_sign: how `ties` and `dare_ties` elect signs: by `total` or `frequency`.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the output's floating-point tensors.
        max_shard_size: `keep` (the files of the base), or the largest safetensors file, such as `5GB`.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: plan and check everything, write nothing.
        check: read a sample of the written tensors again and compare it with the sum in float64.

    Raises:
        UsageProblem: the options contradict each other or the adapters.
        InputRefused: `output` exists, the disk is too small, or an input is missing.
        MalformedInput: an adapter for another base, incomplete, or not finite.
        UnsupportedInput: a kind of adapter or base that this formula does not fit.
        OutputFailed: writing failed.
    """
    check_dtype(dtype)
    if check and dry_run:
        raise UsageProblem("a dry run writes nothing that could be checked", hint="leave `--dry-run` or `--check` away")
    with reading_safely(base):
        checkpoint = open_checkpoint(local_path(base))
    opened = open_adapters(adapters, initial_adapters, checkpoint, alpha)
    factors = _checked_weights(weights, opened)
    combination = _combination(Combination(combine, tuple(densities), seed, rank, majority_sign), opened)
    merge = plan_merge(checkpoint, opened, factors, dtype, max_shard_size, combination)
    warn_all(merge.warnings)
    check_output(merge.plan, Path(output), overwrite, [checkpoint.path, *(item.path for item in opened)])
    if not dry_run:
        options: dict[str, Any] = {} if combine == "linear" else {"combination": asdict(combination)}
        if initial_adapters:
            options["initial_adapters"] = [_identity(item.initial) if item.initial else None for item in opened]
        options |= {"weights": list(weights), "alpha": alpha, "dtype": None if dtype == "keep" else dtype}
        done = step("merge-lora", checkpoint.path.absolute(), adapters=[_identity(item) for item in opened], **options)
        steps, sources = [*steps_of_weights(checkpoint.path), done], _sources(checkpoint, opened)
        write_checkpoint(merge.plan, Path(output), steps=steps, sources=sources, overwrite=overwrite, resume=resume)
    if not check:
        return merge
    summed = combination.method in SUMS
    return replace(merge, check=check_written(merge.plan.checkpoint, merge.edits, Path(output), summed=summed))


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


def _combination(combination: Combination, adapters: Sequence[Adapter]) -> Combination:
    """Checked, with the rank that was not given."""
    combination.check(len(adapters))
    if combination.method != "svd" or combination.rank is not None:
        return combination
    ranks = [pair.rank for adapter in adapters for pair in adapter.pairs.values()]
    if not ranks:
        raise UsageProblem("no adapter has a rank", hint="give the rank of the result: `--rank R`")
    return replace(combination, rank=max(ranks))


def _identity(adapter: Adapter) -> dict[str, str]:
    digest = hashlib.sha256()
    for path in adapter.weights:
        with open(path, "rb") as file:
            while chunk := file.read(BLOCK_BYTES):
                digest.update(chunk)
    return {"name": adapter.name, "sha256": digest.hexdigest()}


def _sources(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> list[Path]:
    files = sorted(path for path in checkpoint.path.iterdir() if path.suffix in (".safetensors", ".json"))
    every = [item for adapter in adapters for item in (adapter, adapter.initial) if item]
    return files + [path for adapter in every for path in (*adapter.weights, adapter.settings)]


def plan_merge(
    base: Checkpoint,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    dtype: str,
    max_shard_size: str | int,
    combination: Combination = LINEAR,
) -> Merge:
    """Places every tensor of every adapter and makes the lazy result; see `merge_lora` for arguments and errors."""
    _refuse_other_types(base, adapters)
    checkpoint, edits = merged(base, adapters, weights, dtype, combination)
    return Merge(
        plan_checkpoint(checkpoint, max_shard_size),
        merged=tuple(name for name in checkpoint if name in edits.changes),
        replaced=tuple(name for name in checkpoint if edits.replaces(name) and name in base),
        added=tuple(name for name in checkpoint if name not in base),
        warnings=tuple(edits.warnings),
        edits=edits,
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
    base: Checkpoint,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    dtype: str = "keep",
    combination: Combination = LINEAR,
) -> tuple[Checkpoint, Edits]:
    """The lazy result, and what was done to the base; see `merge_lora` for arguments and errors."""
    if base.config.get("quantization_config"):
        raise UnsupportedInput(
            "the base is quantized", hint="merge into the unquantized model the adapter was trained on, then quantize"
        )
    base = replicated(base, adapters)
    embedding = find_embedding(base)
    head = find_head(base, embedding)
    edits = Edits(dict(base.tensors), base.config)
    if embedding and head not in base and says_tied(base.config):
        edits.tensors[head] = base[embedding]
        edits.tied = (embedding, head)
    vectors = TaskVectors(edits, adapters, weights, combination)
    for number in vectors.order:
        edits.place(adapters[number], weights[number])
    follow_tokens(edits, embedding, head)
    config = deepcopy(base.config)
    for adapter in adapters:
        config |= adapter.fields
    resized = fit_vocabulary(edits, embedding, head, config)
    untie(edits, embedding, head, config)
    tensors = {name: _result(edits, vectors, name, dtype) for name in edits.tensors}
    if dtype != "keep":
        config = with_dtype(config, tensors)
    side_files = _side_files(base, adapters if resized else ())
    return replace(base, tensors=tensors, config=config, side_files=side_files), edits


def _result(edits: Edits, vectors: TaskVectors, name: str, dtype: str) -> LazyTensor:
    """The lazy output: of the base's element type, unless another one is asked for."""
    kept = edits.tensors[name].dtype
    target = BY_NAME[dtype] if dtype != "keep" and kept.name in ("float64", *FLOATS) else kept
    if name in edits.changes and not vectors.summed:
        return vectors.combined(name, edits.current(name), target)
    return edits.result(name, target)


def _side_files(base: Checkpoint, adapters: Sequence[Adapter]) -> dict[str, bytes]:
    """The base's, or the adapter's tokenizer where the vocabulary is the adapter's."""
    for adapter in adapters:
        own = {name: data for name, data in read_side_files(adapter.path).items() if name.startswith(TOKENIZER)}
        if own:
            others = {name: data for name, data in base.side_files.items() if not name.startswith(TOKENIZER)}
            return others | own
    return dict(base.side_files)
