"""LLaMA2-Accessory's `llama_peft`: shards that hold only trained tensors: LoRA, biases and norms.

Layout (Accessory `model/peft.py`, `util/misc.py` `save_checkpoint` with `--only_save_trainable`): the shards of a model
without the untrained tensors; `lora_a` [r, in], `lora_b` [out, r], no alpha, so the update is B·A. Every linear layer
has a bias. Rows of queries and keys are in Meta's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import (
    AdapterFormat,
    ForeignPair,
    as_adapter,
    pair_up,
    renamed,
    sizes_of,
    unplaced,
)
from llmconv.convert.algebra.operations import permute_rows, rename, rope_order
from llmconv.convert.formats.accessory.config import ATTENTION, LINEAR, MLP, AccessoryParams, has_biases, table_of
from llmconv.convert.formats.accessory.read import (
    SHARD,
    holds_shards,
    is_zero,
    join,
    open_shards,
    plugin_family,
    zero_bias,
)
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor, cast

FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ab])\.weight")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj(?:\.bias)?$")
SWITCHES = {"attention_bias": ATTENTION, "mlp_bias": MLP}
DESCRIPTION = "a LLaMA2-Accessory model of the base's kind"


def open_accessory_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens what an Accessory run trained, from the folder of an epoch; LoRA pairs have no `alpha`.

    Raises InputRefused for a whole model, MalformedInput for another base, UnsupportedInput for another family, or
    biases that the base cannot have.
    """
    shards = open_shards(path)
    family = plugin_family(path, (name for shard in shards for name in shard))
    kind = str(base.config.get("model_type"))
    if (family, kind) not in (("llama", "llama"), ("llama", "mistral"), ("mixtral", "mixtral")):
        raise UnsupportedInput(
            f"`{path.name}` holds trained parameters of a {family}, the base is a {kind[:40]}",
            hint="give the base that they were trained on; `llmconv to-hf --base` takes one in Accessory's files",
        )
    whole = join(shards, (), _experts(base), path.name)
    if "tok_embeddings.weight" in whole:
        raise InputRefused(
            f"`{path.name}` holds a whole model", hint=f"convert it: `llmconv to-hf {path.name} -o OUT` merges its LoRA"
        )
    factors, others = _convert(whole, family, base, path.name)
    if alpha is not None and not factors:
        raise InputRefused(f"`{path.name}` holds no LoRA pair", hint="leave out `--alpha`")
    others, fields = _with_biases(others, base, path.name)
    ranks = {"r": rank, "lora_alpha": rank} if (rank := next((own.rank for own in factors.values()), 0)) else {}
    new = sorted(name.removesuffix(".bias") for name in others if name.endswith(".bias") and name not in base)
    files = sorted(entry for entry in path.iterdir() if SHARD.fullmatch(entry.name))
    settings = path / "config.json" if (path / "config.json").is_file() else None
    config = {**(ranks or {"lora_alpha": 1}), "bias": "all" if new else "none", "modules_to_save": new}
    adapter = as_adapter(files, settings, config, factors, alpha, others)
    return replace(adapter, fields=fields)


def _experts(base: Checkpoint) -> int:
    count = base.config.get("num_local_experts")
    return count if type(count) is int and 0 < count < 1 << 16 else 0


def _convert(
    whole: dict[str, LazyTensor], family: str, base: Checkpoint, source: str
) -> tuple[dict[str, ForeignPair], dict[str, LazyTensor]]:
    """The factors by the base's modules and the other tensors by its names, rows in its order."""
    params = AccessoryParams(family, {"moe": {"num_experts": _experts(base)}}, 0, 0, 1, 1, 0)
    names = table_of(params)
    table = {name.removesuffix(".weight"): to.removesuffix(".weight") for name, to in names.items() if to}
    biases = {f"{module}.bias": f"{to}.bias" for module, to in table.items() if LINEAR.search(module)}
    factors = renamed(pair_up(whole, FACTOR, source), table, source, DESCRIPTION)
    rest = {name: tensor for name, tensor in whole.items() if not FACTOR.fullmatch(name)}
    homes = _homes(rest, names | biases, source)
    order = rope_order(sizes_of(base).dim)
    try:
        factors = {
            module: own.with_rows(lambda rows: permute_rows(rows, order)) if QUERY_OR_KEY.search(module) else own
            for module, own in factors.items()
        }
        others = {
            target: permute_rows(rest[name], order) if QUERY_OR_KEY.search(target) else rest[name]
            for target, name in homes.items()
        }
    except ValueError as error:
        raise MalformedInput(
            f"the heads of `{source}` do not match the base's: {error}", hint="it was trained on another model"
        ) from error
    return factors, others


def _homes(rest: dict[str, LazyTensor], names: Mapping[str, str | None], source: str) -> dict[str, str]:
    """The base's tensor name to Accessory's."""
    try:
        return rename(rest, names, source)
    except MalformedInput:
        known = [name for name in rest if _is_known(name, names)]
        if not (left := sorted(rest.keys() - set(known))):
            raise
        raise unplaced(left, [name for name, target in names.items() if target], source, DESCRIPTION) from None


def _is_known(name: str, names: Mapping[str, str | None]) -> bool:
    return name in names or re.sub(r"(?<=\.)\d{1,9}(?=\.)", "{}", name, count=1) in names


def _with_biases(
    others: dict[str, LazyTensor], base: Checkpoint, source: str
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Adds zero biases to layers without one, and returns the config fields that enable biases."""
    biases = {name: tensor for name, tensor in others.items() if name.endswith(".bias")}
    if base.config.get("model_type") != "llama":
        if trained := [name for name, tensor in biases.items() if name not in base and not is_zero(tensor)]:
            raise UnsupportedInput(
                f"`{source}` holds {len(trained)} trained biases, such as `{trained[0]}`, which are unsupported in a "
                f"{base.config.get('model_type')}",
                hint="transformers has no equivalent model; train with `bias_tuning` off",
            )
        return {name: tensor for name, tensor in others.items() if name not in biases or name in base}, {}
    result, fields = dict(others), dict[str, Any]()
    for switch, layers in SWITCHES.items():
        if not has_biases(biases, layers):
            continue
        fields[switch] = True
        for weight in [name for name in base if name.endswith(tuple(f".{layer}.weight" for layer in layers))]:
            bias, tensor = weight.removesuffix("weight") + "bias", base[weight]
            if bias not in base:
                result[bias] = cast(result[bias], tensor.dtype) if bias in result else zero_bias(tensor)
    return result, fields


ADAPTER = AdapterFormat(
    title="LLaMA2-Accessory (`consolidated.NN-of-MM.model.pth` with only what was trained)",
    detect=holds_shards,
    open=open_accessory_adapter,
)
