"""LLaMA2-Accessory's tensor names to Hugging Face's: one table per family, built from the model's sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmconv.convert.formats.accessory.config import AccessoryParams
from llmconv.convert.formats.meta.read import LLAMA

NameTable = dict[str, str | None]

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
"""InternLM's names for a Llama's layers; its w2 is the up projection, its w3 the down projection."""

LINEAR = re.compile(r"\.(wq|wk|wv|wo|w1|w2|w3)$")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def table_of(params: AccessoryParams) -> NameTable:
    """Accessory's names to Hugging Face's; biases of linear layers are included for Falcon only."""
    if params.family == "falcon":
        return _falcon_table(params)
    if params.family != "mixtral":
        return LLAMA
    kept = {name: target for name, target in LLAMA.items() if ".feed_forward." not in name}
    source, moe = "layers.{}.feed_forward.", "model.layers.{}.block_sparse_moe."
    layers = [f"experts.{number}.{layer}.weight" for number in range(params.experts) for layer in ("w1", "w2", "w3")]
    return kept | {source + name: moe + name for name in ["gate.weight", *layers]}


def _falcon_table(params: AccessoryParams) -> NameTable:
    newer, parallel = (params.fields.get(name, True) for name in ("new_decoder_architecture", "parallel_attn"))
    norms = ["ln_attn", "ln_mlp"] if newer else ["input_layernorm"]
    norms += [] if newer or parallel else ["post_attention_layernorm"]
    names = [f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")]
    names += [f"{layer}.weight" for layer in FALCON_LINEAR]
    names += [f"{layer}.bias" for layer in FALCON_LINEAR] if params.fields.get("bias") else []
    ends = {name: f"transformer.{name}" for name in ("word_embeddings.weight", "ln_f.weight", "ln_f.bias")}
    layers = {f"layers.{{}}.{name}": f"transformer.h.{{}}.{name}" for name in names}
    return {**ends, **layers, "output.weight": "lm_head.weight"}


def has_biases(tensors: Iterable[str], layers: Iterable[str]) -> bool:
    """Whether any of the `layers` (`ATTENTION` or `MLP`) has a bias."""
    endings = tuple(f".{layer}.bias" for layer in layers)
    return any(name.endswith(endings) for name in tensors)
