"""LoRA pairs that a MindFormers checkpoint holds next to the weights: merged when it is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.errors import InputRefused, MalformedInput
from llmconv.tensors import LazyTensor

LORA = re.compile(r"(.+)\.(?:mindpet_delta_|tk_delta_)?lora_([ab])(?:\.weight)?", re.IGNORECASE)


IN_OUT = re.compile(r"\.(?:projection|mapping)\.weight$")
"""Weights of gpt2 and bloom that are stored as [in, out]."""


def merge_lora(run: RunConfig, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Adds `B·A·alpha/r` to the weights for which the file holds LoRA pairs (mindpet `LoRADense`).

    Returns:
        The merged weights without the pairs, and a warning if there were any.

    Raises:
        InputRefused: the file holds LoRA parameters only, or `lora_alpha` is unknown.
        MalformedInput: half a pair is missing, or its shapes do not match the weight.
    """
    pairs: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := LORA.fullmatch(name):
            pairs.setdefault(match[1] + ".weight", {})[match[2].lower()] = tensor
    plain = {name: tensor for name, tensor in tensors.items() if not LORA.fullmatch(name)}
    if not pairs:
        return plain, ()
    if not pairs.keys() & plain.keys():
        raise InputRefused(
            f"`{run.source}` holds LoRA parameters only ({len(pairs)} pairs), without the base weights",
            hint="convert the full checkpoint of the run, which holds both, or merge them into the converted base: "
            f"`llmconv merge-lora BASE {run.source} --alpha A -o OUT`",
        )
    if run.lora.get("lora_alpha") is None:
        raise InputRefused(
            f"`{run.source}` holds {len(pairs)} LoRA pairs, but its configuration has no `lora_alpha`",
            hint='give the YAML file of the run with its `pet_config`, or a JSON file such as `{"lora_alpha": 16}`',
        )
    alpha = RunConfig(run.source, run.lora, "", {}).number("lora_alpha")
    merged = {name: _merged(run, name, plain.get(name), pair, alpha) for name, pair in pairs.items()}
    return {**plain, **merged}, (f"merged {len(pairs)} LoRA pairs with `lora_alpha` {alpha:g}",)


def _merged(
    run: RunConfig, name: str, base: LazyTensor | None, pair: Mapping[str, LazyTensor], alpha: float
) -> LazyTensor:
    a, b = pair.get("a"), pair.get("b")
    if base is None or a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or IN_OUT.search(name):
        raise MalformedInput(
            f"the LoRA pair of `{name}` in `{run.source}` is incomplete or of an unsupported kind",
            hint="merge it first with MindFormers' `transform_ckpt_lora.py`",
        )
    rank = a.shape[0]
    if base.shape != (b.shape[0], a.shape[1]) or b.shape[1] != rank or run.lora.get("lora_rank") not in (None, rank):
        raise MalformedInput(
            f"shape mismatch for the LoRA pair of `{name}` in `{run.source}`: the weight is {list(base.shape)}, "
            f"B·A is {list(b.shape)}·{list(a.shape)}",
            hint="the pairs, or `lora_rank` of the configuration, belong to another run",
        )
    return add_products(base, [LoraProduct(a, b, alpha / rank)], base.dtype)
