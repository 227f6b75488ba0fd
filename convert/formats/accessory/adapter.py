"""LLaMA2-Accessory's `llama_peft`: shards that hold only what was trained, LoRA, biases and norms.

Layout (Accessory `model/peft.py`, `util/misc.py` `save_checkpoint` with `--only_save_trainable`): the shards of a whole
model with less in them; `lora_a` (r×in), `lora_b` (out×r), no alpha, so the update is B·A. Biases are on every linear
layer. Rows of queries and keys are in Meta's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import AdapterFormat
from llmconv.convert.adapters.other_tools.factors import ForeignPair, as_adapter, pair_up, renamed, unplaced
from llmconv.convert.adapters.other_tools.layer_sizes import sizes_of
from llmconv.convert.algebra.operations import permute_rows, rename, rope_order
from llmconv.convert.formats.accessory.config import Params
from llmconv.convert.formats.accessory.names import ATTENTION, LINEAR, MLP, has_biases, table_of
from llmconv.convert.formats.accessory.plugins import plugin_family
from llmconv.convert.formats.accessory.read import DELTA_FILE, SHARD, Tensors, join, open_shards
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor, cast

FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[ab])\.weight")
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj(?:\.bias)?$")
SWITCHES = {"attention_bias": ATTENTION, "mlp_bias": MLP}
WHAT = "a LLaMA2-Accessory model of the base's kind"


def is_accessory_adapter(path: Path) -> bool:
    """Whether `path` is a folder of Accessory's shards; whether they are a whole model shows when it is opened."""
    if not path.is_dir():
        return False
    return any(SHARD.fullmatch(entry.name) or DELTA_FILE.fullmatch(entry.name) for entry in path.iterdir())


def open_accessory_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens the trained parameters of an Accessory run.

    Args:
        path: the folder of an epoch.
        base: the model to merge into, a llama or a mixtral.
        alpha: none; Accessory has no such factor.

    Raises:
        InputRefused: a whole model.
        MalformedInput: names or shapes that the base has not.
        UnsupportedInput: of another plugin, or trained biases in a model that has no place for them.
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
    factors, others = _placed(whole, family, base, path.name)
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


def _placed(whole: Tensors, family: str, base: Checkpoint, source: str) -> tuple[dict[str, ForeignPair], Tensors]:
    """The factors by module and the other tensors by name, both the base's, rows in its order."""
    params = Params(family, {"moe": {"num_experts": _experts(base)}}, 0, 0, 1, 1, 0)
    names = table_of(params)
    table = {name.removesuffix(".weight"): to.removesuffix(".weight") for name, to in names.items() if to}
    biases = {f"{module}.bias": f"{to}.bias" for module, to in table.items() if LINEAR.search(module)}
    factors = renamed(pair_up(whole, FACTOR, source), table, source, WHAT)
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
            f"the heads of `{source}` do not fit the base's: {error}", hint="it was trained on another model"
        ) from error
    return factors, others


def _homes(rest: Tensors, names: Mapping[str, str | None], source: str) -> dict[str, str]:
    """The base's name to Accessory's."""
    try:
        return rename(rest, names, source)
    except MalformedInput:
        known = [name for name in rest if _is_known(name, names)]
        left = sorted(rest.keys() - set(known))
        if not left:
            raise
        raise unplaced(left, [name for name, target in names.items() if target], source, WHAT) from None


def _is_known(name: str, names: Mapping[str, str | None]) -> bool:
    return name in names or re.sub(r"(?<=\.)\d{1,9}(?=\.)", "{}", name, count=1) in names


def _with_biases(others: Tensors, base: Checkpoint, source: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors with zeros where another layer of the same switch has a bias, and the switches of the config."""
    biases = {name: tensor for name, tensor in others.items() if name.endswith(".bias")}
    if base.config.get("model_type") != "llama":
        trained = [name for name, tensor in biases.items() if name not in base and not _is_zero(tensor)]
        if trained:
            raise UnsupportedInput(
                f"`{source}` holds {len(trained)} trained biases, such as `{trained[0]}`, for which a "
                f"{base.config.get('model_type')} has no place",
                hint="there is no equal model of transformers; train with `bias_tuning` off",
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
                result[bias] = cast(result[bias], tensor.dtype) if bias in result else _zeros(tensor)
    return result, fields


def _is_zero(tensor: LazyTensor) -> bool:
    return not any(tensor.rows(*block).any() for block in tensor.blocks())


def _zeros(weight: LazyTensor) -> LazyTensor:
    return LazyTensor(
        weight.dtype, weight.shape[:1], lambda start, stop: np.zeros(stop - start, dtype=weight.dtype.numpy)
    )


ADAPTER = AdapterFormat(
    title="LLaMA2-Accessory (`consolidated.NN-of-MM.model.pth` with only what was trained)",
    detect=is_accessory_adapter,
    open=open_accessory_adapter,
)
