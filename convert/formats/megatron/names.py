"""Tensor names: Megatron core's, those of older versions, and Hugging Face's for each family.

Megatron core `models/gpt/gpt_model.py`; its Transformer Engine modules contain the norm before them. Older models
(Megatron-LM 2.5 to core 0.15, `megatron/{model,legacy/model}/{language_model,transformer}.py`) nest dicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

EMBEDDING, POSITIONS, HEAD = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)
QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
EXPERT = re.compile(r"(decoder\.layers\.\d{1,9}\.mlp\.experts)\.(\d{1,9})\.(.+)")
GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,9})$")
"""Experts of Transformer Engine's grouped linear layers, numbered at the end."""

FC1 = re.compile(r"\.linear_fc1\.(?:weight|bias)$")

OLD_MODULES = {
    "attention.query_key_value": QKV,
    "self_attention.query_key_value": QKV,
    "attention.dense": PROJECTION,
    "self_attention.dense": PROJECTION,
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
WRAPPERS = re.compile(r"^(?:module\.|model\.)+")
OLD_STACK = re.compile(r"^language_model\.(?:encoder|transformer)\.")
OLD_LAYER = re.compile(r"^(decoder\.layers\.\d{1,9}\.)(.+)\.(weight|bias)$")
IGNORED = re.compile(r"(?:^|\.)(?:_extra_state(?:/.*)?|inv_freq|core_attention\..*_extra_state.*|position_ids)$")
"""Values that the model computes, or that only scale numbers of 8 bits."""

EXTRA_HEADS = re.compile(r"^mtp\.")
"""Heads that predict later tokens; the model's logits do not depend on them."""


def core_name(name: str) -> str:
    """The name of a tensor in Megatron core, from that in any version; unknown names are returned unchanged."""
    name = WRAPPERS.sub("", name)
    if name == "word_embeddings_for_head.weight" or name == "language_model.output_layer.weight":
        return HEAD
    if name.startswith("language_model.embedding."):
        return name.removeprefix("language_model.")
    if OLD_STACK.match(name):
        name = "decoder." + OLD_STACK.sub("", name)
        name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        if match := OLD_LAYER.match(name):
            return f"{match[1]}{OLD_MODULES.get(match[2], match[2])}.{match[3]}"
    for fused, apart in FUSED_NORMS.items():
        name = name.replace(fused, apart)
    name = name.replace(".mlp.experts.local_experts.", ".mlp.experts.")
    return GROUPED.sub(r".mlp.experts.\3.\1.\2", name)


def has_old_name(name: str) -> bool:
    """Whether a tensor is a fused attention matrix under its old name, whose rows `checkpoint_version` orders."""
    return name.rpartition(".")[0].endswith("attention.query_key_value")


COMMON = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
LLAMA_LAYER = {
    **COMMON,
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.q": "self_attn.q_proj",
    "self_attention.k": "self_attn.k_proj",
    "self_attention.v": "self_attn.v_proj",
    PROJECTION: "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
    "mlp.experts.{}.linear_fc2": "mlp.experts.{}.down_proj",
    "mlp.shared_experts.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared_experts.up": "mlp.shared_expert.up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate",
}
MIXTRAL_LAYER = {
    **LLAMA_LAYER,
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.linear_fc2": "block_sparse_moe.experts.{}.w2",
}
NEOX_LAYER = {
    **COMMON,
    "self_attention.qkv": "attention.query_key_value",
    PROJECTION: "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.qkv": "attn.c_attn",
    PROJECTION: "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
Table = tuple[str, Mapping[str, str], Mapping[str, str]]
LLAMA_TABLE: Table = (
    "model.layers",
    LLAMA_LAYER,
    {EMBEDDING: "model.embed_tokens.weight", "decoder.final_layernorm.": "model.norm.", HEAD: "lm_head.weight"},
)
TABLES: dict[str, Table] = {
    "mixtral": ("model.layers", MIXTRAL_LAYER, LLAMA_TABLE[2]),
    "gpt_neox": (
        "gpt_neox.layers",
        NEOX_LAYER,
        {
            EMBEDDING: "gpt_neox.embed_in.weight",
            "decoder.final_layernorm.": "gpt_neox.final_layer_norm.",
            HEAD: "embed_out.weight",
        },
    ),
    "gpt2": (
        "transformer.h",
        GPT2_LAYER,
        {
            EMBEDDING: "transformer.wte.weight",
            POSITIONS: "transformer.wpe.weight",
            "decoder.final_layernorm.": "transformer.ln_f.",
            HEAD: "lm_head.weight",
        },
    ),
}
"""By `model_type`: the stack of layers, names in a layer (modules, `{}` for an expert), and names outside."""


def hugging_face_name(name: str, model_type: str) -> str | None:
    """The name in transformers' files of a tensor with split matrices; None if the family has no such tensor.

    `name` is Megatron core's, with `self_attention.q`, `.k`, `.v` (or `.qkv`) and `mlp.gate`, `.up` after a split.
    """
    stack, layer, outside = TABLES.get(model_type, LLAMA_TABLE)
    match = LAYER.fullmatch(name)
    if not match:
        return next((target + name.removeprefix(own) for own, target in outside.items() if _is_part(name, own)), None)
    module, _, kind = match[2].rpartition(".")
    if module == "mlp.shared_experts" and kind == "gate_weight":
        module, kind = "mlp.shared_experts.gate_weight", "weight"
    expert = re.search(r"(?<=\.experts\.)\d{1,9}(?=\.)", module)
    template = re.sub(r"(?<=\.experts\.)\d{1,9}(?=\.)", "{}", module)
    if kind not in ("weight", "bias") or template not in layer:
        return None
    return f"{stack}.{match[1]}.{layer[template].format(expert[0] if expert else '')}.{kind}"


def _is_part(name: str, own: str) -> bool:
    return name == own or (own.endswith(".") and name in (f"{own}weight", f"{own}bias"))
