"""Converts LLaMA2-Accessory's joined tensors to Hugging Face's: reorders, fuses, adds LoRA and missing biases."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.algebra.operations import interleave_rows, permute_rows, rename, require, rope_order, slice_rows
from llmconv.convert.formats.accessory.config import (
    ATTENTION,
    INTERNLM,
    LINEAR,
    MLP,
    AccessoryParams,
    has_biases,
    table_of,
)
from llmconv.convert.formats.meta.read import SUFFIX, file_order
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor


def to_hugging_face(whole: dict[str, LazyTensor], params: AccessoryParams, source: str) -> dict[str, LazyTensor]:
    """The tensors of a model in Hugging Face's names, in file order, with LoRA added and missing biases as zeros.

    `whole` are joined tensors in Accessory's names; MalformedInput for wrong keys or shapes.
    """
    try:
        return _with_zero_biases(_renamed(whole, params, source))
    except ValueError as error:
        raise MalformedInput(
            f"the heads of `{source}` do not match its configuration: {error}",
            hint="the configuration belongs to another model",
        ) from error


def _renamed(whole: dict[str, LazyTensor], params: AccessoryParams, source: str) -> dict[str, LazyTensor]:
    if params.family == "internlm":
        whole = _internlm_as_llama(whole, params)
    if params.family == "falcon":
        whole = _fuse_falcon(whole, params)
    _check_layers(whole, params.layers, source)
    table = table_of(params)
    renamed = rename(dict.fromkeys(map(_owner, whole)), table, source)
    expected = [target.format(layer) for target in table.values() if target for layer in range(params.layers)]
    require(dict.fromkeys(expected), renamed, source)
    order = rope_order(params.head_dim) if params.family in ("llama", "mixtral") else ()
    tensors: dict[str, LazyTensor] = {}
    for target, owner in sorted(renamed.items(), key=lambda pair: file_order(pair[0])):
        parts = _parts(owner, whole, source)
        if order and target.endswith((".q_proj.weight", ".k_proj.weight")):
            parts = {kind: part if kind == "lora_a" else permute_rows(part, order) for kind, part in parts.items()}
        tensors[target] = _with_lora(parts, owner, source)
        if "bias" in parts:
            tensors[target.removesuffix("weight") + "bias"] = parts["bias"]
    return tensors


def _owner(name: str) -> str:
    """The name of the weight that a Llama's bias or LoRA matrix belongs to; any other name unchanged."""
    suffix = SUFFIX.search(name)
    layer = name[: suffix.start()] if suffix else ""
    return f"{layer}.weight" if LINEAR.search(layer) else name


def _check_layers(whole: dict[str, LazyTensor], layers: int, source: str) -> None:
    """Refuses missing biases or LoRA matrices: upstream adds them to a linear layer of every block or of none."""
    counts: dict[str, int] = {}
    for name in whole:
        if _owner(name) != name:
            kind = re.sub(r"\.\d+\.", ".{}.", name, count=1)
            counts[kind] = counts.get(kind, 0) + 1
    if partial := [kind for kind, count in counts.items() if count != layers]:
        raise MalformedInput(
            f"missing keys: `{source}` has these only in some of its {layers} layers: {listing(partial)}",
            hint="the checkpoint is incomplete; copy the folder again",
        )


def _parts(owner: str, whole: dict[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """`weight`, and if present `bias`, `lora_a` and `lora_b`, of one layer."""
    if owner not in whole:
        raise MalformedInput(
            f"missing key `{owner}`: `{source}` holds a bias or LoRA of this weight, but not the weight itself",
            hint="give the folder that training started from with `--base`",
        )
    layer = owner.removesuffix(".weight")
    if not LINEAR.search(layer):
        return {"weight": whole[owner]}
    names = {"weight": owner, "bias": f"{layer}.bias"}
    names |= {kind: f"{layer}.{kind}.weight" for kind in ("lora_a", "lora_b")}
    return {kind: whole[name] for kind, name in names.items() if name in whole}


def _with_lora(parts: dict[str, LazyTensor], owner: str, source: str) -> LazyTensor:
    """W + B·A, rounded once; Accessory's LoRA has no alpha (`peft.py`, LoraColumnParallelLinear)."""
    weight = parts["weight"]
    if "lora_a" not in parts and "lora_b" not in parts:
        return weight
    a, b = (parts[kind].shape if kind in parts else () for kind in ("lora_a", "lora_b"))
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != weight.shape:
        raise MalformedInput(
            f"shape mismatch for the LoRA of `{owner}` in `{source}`: {list(b)} times {list(a)} for "
            f"{list(weight.shape)}",
            hint="the base belongs to another model, or a matrix is missing; copy the folder again",
        )
    changes = [LoraProduct(parts["lora_a"], parts["lora_b"], 1.0)]
    merged = add_products(weight, changes, weight.dtype)
    return replace(merged, recast=lambda dtype: add_products(weight, changes, dtype))


def _with_zero_biases(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Adds zero biases to layers without one: `attention_bias` and `mlp_bias` of transformers apply to all layers."""
    complete: dict[str, LazyTensor] = {}
    wanted = {layer for layers in (ATTENTION, MLP) for layer in layers if has_biases(tensors, layers)}
    for name, tensor in tensors.items():
        complete[name] = tensor
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in wanted and f"{layer}.bias" not in tensors:
            complete[f"{layer}.bias"] = zero_bias(tensor)
    return complete


def zero_bias(weight: LazyTensor) -> LazyTensor:
    """A bias of zeros for a weight, [rows], in its dtype."""
    return LazyTensor(
        weight.dtype, weight.shape[:1], lambda start, stop: np.zeros(stop - start, dtype=weight.dtype.numpy)
    )


def _internlm_as_llama(whole: dict[str, LazyTensor], params: AccessoryParams) -> dict[str, LazyTensor]:
    """Renames InternLM's tensors to a Llama's with half-split rope; `Wqkv` holds all rows of q, then k, then v."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in whole.items():
        match = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name)
        block, layer, kind = match.groups("") if match else ("", "", "")
        if layer == "mixer.Wqkv" and tensor.num_rows == 3 * params.dim:
            for number, part in enumerate(("wq", "wk", "wv")):
                rows = slice_rows(tensor, number * params.dim, (number + 1) * params.dim)
                tensors[f"{block}attention.{part}.{kind}"] = rows
        else:
            tensors[f"{block}{INTERNLM[layer]}.{kind}" if layer in INTERNLM else name] = tensor
    return tensors


def _fuse_falcon(whole: dict[str, LazyTensor], params: AccessoryParams) -> dict[str, LazyTensor]:
    """Joins q, k and v into the one matrix that transformers has."""
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in whole.items():
        match = re.fullmatch(r"(layers\.\d+\.self_attention)\.w([qkv])\.(weight|bias)", name)
        if not match:
            tensors[name] = tensor
            continue
        trio = [whole.get(f"{match[1]}.w{letter}.{match[3]}") for letter in "qkv"]
        if match[2] == "q" and trio[1] and trio[2]:
            tensors[f"{match[1]}.query_key_value.{match[3]}"] = _interleave(tensor, trio[1], trio[2], params.head_dim)
    return tensors


def _interleave(query: LazyTensor, key: LazyTensor, value: LazyTensor, head_dim: int) -> LazyTensor:
    """Joins query heads, key and value of each key/value head (transformers `modeling_falcon.py`, `_split_heads`).

    Raises ValueError if the numbers of rows do not match.
    """
    groups = key.num_rows // head_dim
    if not groups or key.num_rows % head_dim or query.num_rows % groups or value.shape != key.shape:
        raise ValueError(f"{query.num_rows}, {key.num_rows} and {value.num_rows} rows for heads of size {head_dim}")
    return interleave_rows((query, key, value), (query.num_rows // groups, head_dim, head_dim))
