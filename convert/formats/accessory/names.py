"""LLaMA2-Accessory's whole tensors under Hugging Face's names: permuted, fused, LoRA added, biases complete."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from llmconv.convert.adapters.weighted_sum import LoraProduct, add_products
from llmconv.convert.algebra.operations import listing, permute_rows, rename, require, rope_order, slice_rows
from llmconv.convert.algebra.row_groups import interleave_rows
from llmconv.convert.formats.accessory.config import Params
from llmconv.convert.formats.accessory.read import Tensors
from llmconv.convert.formats.meta.names import LLAMA, SUFFIX
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor

Table = dict[str, str | None]

FALCON_LINEAR = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

INTERNLM = {
    "embedding": "tok_embeddings",
    "mixer.out_proj": "attention.wo",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "mlp.w1": "feed_forward.w1",
    "mlp.w2": "feed_forward.w3",
    "mlp.w3": "feed_forward.w2",
    "head": "output",
}
"""InternLM's names for the layers of a llama; its w2 is the up projection, its w3 the down projection."""

LINEAR = re.compile(r"\.(wq|wk|wv|wo|w1|w2|w3)$")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def to_hugging_face(whole: Tensors, params: Params, source: str) -> Tensors:
    """The tensors of a model under Hugging Face's names, in file order; LoRA added, biases complete.

    Args:
        whole: joined tensors under Accessory's names.
        params: the sizes of the model.
        source: folder name for error messages.

    Raises:
        MalformedInput: a tensor is missing, unknown, or does not fit.
    """
    try:
        return _with_zero_biases(_placed(whole, params, source))
    except ValueError as error:
        raise MalformedInput(
            f"the heads of `{source}` do not fit: {error}", hint="the configuration is of another model"
        ) from error


def _placed(whole: Tensors, params: Params, source: str) -> Tensors:
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
    tensors: Tensors = {}
    for target, owner in sorted(renamed.items(), key=lambda pair: _file_order(pair[0])):
        parts = _parts(owner, whole, source)
        if order and target.endswith((".q_proj.weight", ".k_proj.weight")):
            parts = {kind: part if kind == "lora_a" else permute_rows(part, order) for kind, part in parts.items()}
        tensors[target] = _with_lora(parts, owner, source)
        if "bias" in parts:
            tensors[target.removesuffix("weight") + "bias"] = parts["bias"]
    return tensors


def table_of(params: Params) -> Table:
    """Accessory's names to Hugging Face's; of linear layers the weights only, unless they are Falcon's."""
    if params.family == "falcon":
        return _falcon_table(params)
    if params.family != "mixtral":
        return LLAMA
    kept = {name: target for name, target in LLAMA.items() if ".feed_forward." not in name}
    source, moe = "layers.{}.feed_forward.", "model.layers.{}.block_sparse_moe."
    layers = [f"experts.{number}.{layer}.weight" for number in range(params.experts) for layer in ("w1", "w2", "w3")]
    return kept | {source + name: moe + name for name in ["gate.weight", *layers]}


def _falcon_table(params: Params) -> Table:
    newer, parallel = (params.fields.get(name, True) for name in ("new_decoder_architecture", "parallel_attn"))
    norms = ["ln_attn", "ln_mlp"] if newer else ["input_layernorm"]
    norms += [] if newer or parallel else ["post_attention_layernorm"]
    names = [f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")]
    names += [f"{layer}.weight" for layer in FALCON_LINEAR]
    names += [f"{layer}.bias" for layer in FALCON_LINEAR] if params.fields.get("bias") else []
    ends = {name: f"transformer.{name}" for name in ("word_embeddings.weight", "ln_f.weight", "ln_f.bias")}
    layers = {f"layers.{{}}.{name}": f"transformer.h.{{}}.{name}" for name in names}
    return {**ends, **layers, "output.weight": "lm_head.weight"}


def _owner(name: str) -> str:
    """The weight that a llama's bias or LoRA matrix belongs to; any other name stands for itself."""
    suffix = SUFFIX.search(name)
    layer = name[: suffix.start()] if suffix else ""
    return f"{layer}.weight" if LINEAR.search(layer) else name


def _check_layers(whole: Tensors, layers: int, source: str) -> None:
    """What upstream adds to a linear layer (a bias, LoRA) it adds to that of every block, so a gap is a loss."""
    counts: dict[str, int] = {}
    for name in whole:
        if _owner(name) != name:
            kind = re.sub(r"\.\d+\.", ".{}.", name, count=1)
            counts[kind] = counts.get(kind, 0) + 1
    if partial := [kind for kind, count in counts.items() if count != layers]:
        raise MalformedInput(
            f"`{source}` has these not in each of its {layers} layers: {listing(partial)}",
            hint="the checkpoint is incomplete; copy the folder again",
        )


def _parts(owner: str, whole: Tensors, source: str) -> Tensors:
    """`weight`, and where there are any `bias`, `lora_a` and `lora_b`, of one layer."""
    if owner not in whole:
        raise MalformedInput(
            f"`{source}` holds parts of `{owner}`, but not the weight itself",
            hint="give the folder that training started from with `--base`",
        )
    layer = owner.removesuffix(".weight")
    if not LINEAR.search(layer):
        return {"weight": whole[owner]}
    names = {"weight": owner, "bias": f"{layer}.bias"}
    names |= {kind: f"{layer}.{kind}.weight" for kind in ("lora_a", "lora_b")}
    return {kind: whole[name] for kind, name in names.items() if name in whole}


def _with_lora(parts: Tensors, owner: str, source: str) -> LazyTensor:
    """W + B·A, rounded once; Accessory's LoRA has no alpha (`peft.py`, LoraColumnParallelLinear)."""
    weight = parts["weight"]
    if "lora_a" not in parts and "lora_b" not in parts:
        return weight
    a, b = (parts[kind].shape if kind in parts else () for kind in ("lora_a", "lora_b"))
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != weight.shape:
        raise MalformedInput(
            f"the LoRA of `{owner}` in `{source}` does not fit: {list(b)} times {list(a)} for {list(weight.shape)}",
            hint="the base is another model's, or a matrix is missing; copy the folder again",
        )
    return add_products(weight, [LoraProduct(parts["lora_a"], parts["lora_b"], 1.0)])


def _with_zero_biases(tensors: Tensors) -> Tensors:
    """Hugging Face's switches are for all layers, so one without a bias gets zeros where another has a bias."""
    complete: Tensors = {}
    wanted = {layer for layers in (ATTENTION, MLP) for layer in layers if has_biases(tensors, layers)}
    for name, tensor in tensors.items():
        complete[name] = tensor
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in wanted and f"{layer}.bias" not in tensors:
            complete[f"{layer}.bias"] = _zeros(tensor)
    return complete


def has_biases(tensors: Iterable[str], layers: Iterable[str]) -> bool:
    """Whether any of the `layers` (`ATTENTION` or `MLP`) has a bias."""
    endings = tuple(f".{layer}.bias" for layer in layers)
    return any(name.endswith(endings) for name in tensors)


def _zeros(weight: LazyTensor) -> LazyTensor:
    return LazyTensor(
        weight.dtype, weight.shape[:1], lambda start, stop: np.zeros(stop - start, dtype=weight.dtype.numpy)
    )


def _file_order(target: str) -> tuple[int, int]:
    """Embedding, layers by number, final norm, head: the order in which a loader meets them."""
    number = re.search(r"\.(\d+)\.", target)
    place = 0 if "embed" in target else 1 if number else 2 if "norm" in target or "ln_f" in target else 3
    return place, int(number[1]) if number else 0


def _internlm_as_llama(whole: Tensors, params: Params) -> Tensors:
    """InternLM's names and fused `Wqkv` (all rows of q, then k, then v) as those of a llama with half-split rope."""
    tensors: Tensors = {}
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


def _fuse_falcon(whole: Tensors, params: Params) -> Tensors:
    """q, k and v as the one matrix that transformers has."""
    tensors: Tensors = {}
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
    """For each key/value head its query heads, then the key, then the value (transformers `modeling_falcon.py`,
    `_split_heads`, whatever the architecture).

    Raises:
        ValueError: the rows do not divide so.
    """
    groups = key.num_rows // head_dim
    if not groups or key.num_rows % head_dim or query.num_rows % groups or value.shape != key.shape:
        raise ValueError(f"{query.num_rows}, {key.num_rows} and {value.num_rows} rows are not heads of {head_dim}")
    return interleave_rows((query, key, value), (query.num_rows // groups, head_dim, head_dim))
