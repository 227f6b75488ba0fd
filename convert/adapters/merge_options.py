"""The options of `merge-lora`, and Recipe: the same, checked against each other and the adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.combining import Combination
from llmconv.convert.models.dtype import check_dtype
from llmconv.errors import UsageProblem
from llmconv.files.hub import source_name
from llmconv.files.sources import local_path
from llmconv.output.plan import KEEP


class MergeOptions(TypedDict, total=False):
    """The options of a merge, by the names that the command has for them.

    Attributes:
        weights: w, one per adapter; all 1 by default.
        alpha: `lora_alpha` if an adapter's files do not contain it.
        initial_adapters: one per adapter, as it was before training, if training subtracted it from the base (PiSSA,
            OLoRA, CorDA, LoRA-GA): its product is subtracted. `-` for an adapter without one.
        combine: how to combine adapters; one of `METHODS` in `adapters.combining.methods`.
        densities: share of each adapter's update to keep, for a method that prunes; one, or one per adapter.
        seed: random seed of `dare_*`, used together with the tensor's name and the adapter's content.
        rank: of `svd` (default: the largest rank of the adapters).
        majority_sign: how `ties` and `dare_ties` elect signs: by `total` or `frequency`.
        dtype: `keep`, `float32`, `float16` or `bfloat16`: element type of the floating-point tensors written.
        base_quant: for a quantized base: `dequantize` (write plain weights, bfloat16 if `dtype` is `keep`) or
            `requantize` (keep its format; refused if too little of the update survives).
        max_shard_size: `keep` (the shards of the base), or the size of the largest safetensors file, such as `5GB`.
        tokenizer: a tokenizer file or folder to use instead of the base's.
    """

    weights: Sequence[float]
    alpha: float | None
    initial_adapters: Sequence[str | Path]
    combine: str
    densities: Sequence[float]
    seed: int
    rank: int | None
    majority_sign: str
    dtype: str
    base_quant: str | None
    max_shard_size: str | int
    tokenizer: str | Path | None


DEFAULTS: MergeOptions = {
    "weights": (),
    "alpha": None,
    "initial_adapters": (),
    "combine": "linear",
    "densities": (),
    "seed": 0,
    "rank": None,
    "majority_sign": "total",
    "dtype": "keep",
    "base_quant": None,
    "max_shard_size": KEEP,
    "tokenizer": None,
}


@dataclass(frozen=True)
class Recipe:
    """The checked options of a merge; attributes as in `MergeOptions`."""

    weights: tuple[float, ...]
    combination: Combination = Combination()
    dtype: str = "keep"
    base_quant: str | None = None
    max_shard_size: str | int = KEEP
    tokenizer: Path | None = None

    def provenance(self) -> dict[str, Any]:
        """The options that are not the default, for the manifest; the tokenizer by its file name."""
        options: dict[str, Any] = {"weights": list(self.weights)}
        if self.combination.method != "linear":
            options["combination"] = asdict(self.combination)
        if self.dtype != "keep":
            options["dtype"] = self.dtype
        if self.tokenizer:
            options["tokenizer"] = source_name(self.tokenizer)
        return options | ({"base_quant": self.base_quant} if self.base_quant else {})


def plain_sum(adapters: Sequence[Adapter]) -> Recipe:
    """The recipe for the sum of all adapters with weight 1."""
    return Recipe((1.0,) * len(adapters))


def recipe_of(options: MergeOptions, adapters: Sequence[Adapter]) -> Recipe:
    """The recipe for merging these adapters; UsageProblem if options contradict each other or the adapters."""
    options = DEFAULTS | options
    check_dtype(options["dtype"])
    signs, densities = options["majority_sign"], tuple(options["densities"])
    combination = Combination(options["combine"], densities, options["seed"], options["rank"], signs)
    return Recipe(
        _weights(options["weights"], adapters),
        _ranked(combination, adapters),
        options["dtype"],
        options["base_quant"],
        options["max_shard_size"],
        local_path(options["tokenizer"], in_parts=True) if options["tokenizer"] else None,
    )


def _weights(weights: Sequence[float], adapters: Sequence[Adapter]) -> tuple[float, ...]:
    if not adapters:
        raise UsageProblem("no adapter is given", hint="give at least one: `llmconv merge-lora BASE ADAPTER -o OUT`")
    if weights and len(weights) != len(adapters):
        raise UsageProblem(
            f"{len(weights)} weight(s) for {len(adapters)} adapter(s)", hint="give `--weight` once per adapter"
        )
    if odd := [weight for weight in weights if not math.isfinite(weight)]:
        raise UsageProblem(f"the weight {odd[0]} is not finite", hint="give numbers such as `--weight 0.5`")
    return tuple(weights) or (1.0,) * len(adapters)


def _ranked(combination: Combination, adapters: Sequence[Adapter]) -> Combination:
    """The combination, checked, with the default rank of `svd` filled in."""
    combination.check(len(adapters))
    if combination.method != "svd" or combination.rank is not None:
        return combination
    ranks = [pair.rank for adapter in adapters for pair in adapter.pairs.values()]
    if not ranks:
        raise UsageProblem("no adapter has a rank", hint="give the rank of the result: `--rank R`")
    return replace(combination, rank=max(ranks))
