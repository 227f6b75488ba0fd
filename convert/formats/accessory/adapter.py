"""LLaMA2-Accessory's `llama_peft` adapters: shards with only what was trained.

With `--only_save_trainable` a rank has only what was trained, LoRA (`model/peft.py`), biases and norms: `lora_a`
[r, in], `lora_b` [out, r], no alpha, so the update is B·A. Every linear layer has a bias. Rows of queries and keys are
in Meta's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters import other_tools
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.algebra import LAYER_NUMBER, all_zero, fitting, rename, reordered, rope_order, zeros
from llmconv.convert.formats import AdapterFormat
from llmconv.convert.formats.accessory import config as configs
from llmconv.convert.formats.accessory import read
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, word
from llmconv.tensors import LazyTensor, cast

FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ab])\.weight")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj(?:\.bias)?$")
DESCRIPTION = "a LLaMA2-Accessory model of the base's kind"


def open_accessory_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens what an Accessory run trained, from the folder of an epoch; LoRA pairs have no `alpha`.

    Raises InputRefused for a whole model, MalformedInput for another base, UnsupportedInput for another family, or
    biases that the base cannot have.
    """
    shards = read.open_shards(path)
    family = read.plugin_family(path, (name for shard in shards for name in shard))
    kind = str(base.config.get("model_type"))
    if (family, kind) not in (("llama", "llama"), ("llama", "mistral"), ("mixtral", "mixtral")):
        raise UnsupportedInput(
            f"`{path.name}` holds trained parameters of a {family}, the base is a {kind[:40]}",
            hint="give the base that they were trained on; `llmconv to-hf --base` takes one in Accessory's files",
        )
    whole = read.join(shards, (), _experts(base), path.name)
    if "tok_embeddings.weight" in whole:
        raise InputRefused(
            f"`{path.name}` holds a whole model",
            hint=f"convert it: `llmconv to-hf {word(path)} -o OUT` merges its LoRA",
        )
    # the factors by the base's modules and the other tensors by its names, rows in its order
    names = configs.table_of(configs.AccessoryParams(family, {"moe": {"num_experts": _experts(base)}}, 0, 0, 1, 1, 0))
    linear = {name.removesuffix(".weight"): to.removesuffix(".weight") for name, to in names.items() if to}
    biases = {f"{module}.bias": f"{to}.bias" for module, to in linear.items() if configs.LINEAR.search(module)}
    factors = other_tools.renamed(other_tools.pair_up(whole, FACTOR, path.name), names, path.name, DESCRIPTION)
    rest = {name: tensor for name, tensor in whole.items() if not FACTOR.fullmatch(name)}
    homes = _homes(rest, names | biases, path.name)
    order = rope_order(other_tools.sizes_of(base.config, base.path.name).dim)
    with fitting(f"the heads of `{path.name}` do not match the base's", "it was trained on another model"):
        factors = other_tools.reordered(factors, QUERY_OR_KEY, order)
        others = reordered({target: rest[name] for target, name in homes.items()}, QUERY_OR_KEY, order)
    if alpha is not None and not factors:
        raise InputRefused(f"`{path.name}` holds no LoRA pair", hint="leave out `--alpha`")
    others, fields = _with_biases(others, base, path.name)
    ranks = {"r": rank, "lora_alpha": rank} if (rank := next((own.rank for own in factors.values()), 0)) else {}
    new = sorted(name.removesuffix(".bias") for name in others if name.endswith(".bias") and name not in base)
    files = sorted(entry for entry in path.iterdir() if read.SHARD.fullmatch(entry.name))
    settings = path / "config.json" if (path / "config.json").is_file() else None
    config = {**(ranks or {"lora_alpha": 1}), "bias": "all" if new else "none", "modules_to_save": new}
    return replace(other_tools.as_adapter(files, settings, config, factors, alpha, others), fields=fields)


def _experts(base: Checkpoint) -> int:
    count = base.config.get("num_local_experts")
    return count if type(count) is int and 0 < count < 1 << 16 else 0


def _homes(rest: dict[str, LazyTensor], names: Mapping[str, str | None], source: str) -> dict[str, str]:
    """The base's tensor name to Accessory's."""
    try:
        return rename(rest, names, source)
    except MalformedInput:
        known = [name for name in rest if name in names or re.sub(LAYER_NUMBER, "{}", name, count=1) in names]
        if not (left := sorted(rest.keys() - set(known))):
            raise
        raise other_tools.unplaced(
            left, [name for name, target in names.items() if target], source, DESCRIPTION
        ) from None


def _with_biases(
    others: dict[str, LazyTensor], base: Checkpoint, source: str
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Adds zero biases to layers without one, and returns the config fields that enable biases."""
    biases = {name: tensor for name, tensor in others.items() if name.endswith(".bias")}
    if base.config.get("model_type") != "llama":
        if trained := [name for name, tensor in biases.items() if name not in base and not all_zero(tensor)]:
            raise UnsupportedInput(
                f"`{source}` holds {len(trained)} trained biases, such as `{trained[0]}`, which are unsupported in a "
                f"{base.config.get('model_type')}",
                hint="transformers has no equivalent model; train with `bias_tuning` off",
            )
        return {name: tensor for name, tensor in others.items() if name not in biases or name in base}, {}
    result, fields = dict(others), dict[str, Any]()
    for switch, layers in configs.SWITCHES.items():
        if not configs.has_biases(biases, layers):
            continue
        fields[switch] = True
        for weight in [name for name in base if name.endswith(tuple(f".{layer}.weight" for layer in layers))]:
            bias, tensor = weight.removesuffix("weight") + "bias", base[weight]
            if bias not in base:
                result[bias] = (
                    cast(result[bias], tensor.dtype) if bias in result else zeros(tensor.dtype, tensor.shape[:1])
                )
    return result, fields


ADAPTER = AdapterFormat(
    "LLaMA2-Accessory (`consolidated.NN-of-MM.model.pth` with only what was trained)",
    read.holds_shards,
    open_accessory_adapter,
)
