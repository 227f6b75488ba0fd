"""MindFormers' tensor names to Hugging Face's: one table per family, `{}` for the layer number."""

from __future__ import annotations

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _llama_names(root: str, embedding: str, norm: str, gate: str, up: str) -> dict[str, str | None]:
    """The table of one Llama-like model; the models differ in a few words only."""
    layer, target = f"{root}.layers.{{}}", "model.layers.{}"
    names: dict[str, str | None] = {
        f"{root}.{embedding}.embedding_weight": EMBEDDING,
        f"{root}.{embedding}.embedding_table": EMBEDDING,
        f"{layer}.attention_norm.weight": f"{target}.input_layernorm.weight",
        f"{layer}.ffn_norm.weight": f"{target}.post_attention_layernorm.weight",
        f"{layer}.feed_forward.{gate}.weight": f"{target}.mlp.gate_proj.weight",
        f"{layer}.feed_forward.{up}.weight": f"{target}.mlp.up_proj.weight",
        f"{layer}.feed_forward.w2.weight": f"{target}.mlp.down_proj.weight",
        f"{root}.{norm}.weight": "model.norm.weight",
        "lm_head.weight": HEAD,
    }
    for kind in ("weight", "bias"):
        names |= {f"{layer}.attention.w{part}.{kind}": f"{target}.self_attn.{part}_proj.{kind}" for part in "qkvo"}
    return names


LLAMA = _llama_names("model", "tok_embeddings", "norm_out", "w1", "w3")


# Qwen computes w1(x)·silu(w3(x)): its gate is w3 (research/qwen/qwen_model.py, QwenFeedForward)
QWEN = _llama_names("transformer", "wte", "ln_f", "w3", "w1")


CORE: dict[str, str | None] = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
    "decoder.layers.{}.input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
    "decoder.layers.{}.pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "decoder.layers.{}.self_attention.q_layernorm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "decoder.layers.{}.self_attention.k_layernorm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "decoder.layers.{}.mlp.gating.weight": "model.layers.{}.mlp.gate_proj.weight",
    "decoder.layers.{}.mlp.hidden.weight": "model.layers.{}.mlp.up_proj.weight",
    "decoder.layers.{}.mlp.linear_fc2.weight": "model.layers.{}.mlp.down_proj.weight",
    **{
        f"decoder.layers.{{}}.self_attention.linear_{source}.{kind}": f"model.layers.{{}}.self_attn.{part}_proj.{kind}"
        for source, part in (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "o"))
        for kind in ("weight", "bias")
    },
}
"""Names since 1.6, which are Megatron's (`toolkit/weight_convert/qwen3`)."""

GLM_LAYER = "transformer.encoder.layers.{}"
GLM: dict[str, str | None] = {
    "transformer.embedding.embedding_weight": EMBEDDING,
    "transformer.embedding.embedding_table": EMBEDDING,
    "transformer.embedding.word_embeddings.embedding_weight": EMBEDDING,
    "transformer.embedding.word_embeddings.embedding_table": EMBEDDING,
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": HEAD,
    f"{GLM_LAYER}.input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
    f"{GLM_LAYER}.post_attention_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    f"{GLM_LAYER}.self_attention.dense.weight": "model.layers.{}.self_attn.o_proj.weight",
    f"{GLM_LAYER}.mlp.dense_h_to_4h.weight": "model.layers.{}.mlp.gate_up_proj.weight",
    f"{GLM_LAYER}.mlp.dense_left.weight": "model.layers.{}.mlp.gate_proj.weight",
    f"{GLM_LAYER}.mlp.dense_right.weight": "model.layers.{}.mlp.up_proj.weight",
    f"{GLM_LAYER}.mlp.dense_4h_to_h.weight": "model.layers.{}.mlp.down_proj.weight",
}
for _kind in ("weight", "bias"):
    GLM[f"{GLM_LAYER}.self_attention.query_key_value.{_kind}"] = f"model.layers.{{}}.self_attn.query_key_value.{_kind}"
    for _part in "qkv":
        GLM[f"{GLM_LAYER}.self_attention.w{_part}.{_kind}"] = f"model.layers.{{}}.self_attn.{_part}_proj.{_kind}"

DENSE = ("dense1", "dense2", "dense3")
"""Queries, keys and values."""


def _linear_names(root: str, modules: dict[str, str]) -> dict[str, str | None]:
    """A table for modules that all have a weight and a bias (`gamma` and `beta` where they are norms)."""
    names: dict[str, str | None] = {}
    for source, target in modules.items():
        pairs = (("gamma", "weight"), ("beta", "bias")) if "norm" in source or "ln_f" in source else ()
        for old, new in pairs or (("weight", "weight"), ("bias", "bias")):
            names[f"{root}{source}.{old}"] = f"{target}.{new}"
    return names


GPT2 = _linear_names(
    "backbone.",
    {
        "blocks.{}.layernorm1": "transformer.h.{}.ln_1",
        "blocks.{}.layernorm2": "transformer.h.{}.ln_2",
        **{f"blocks.{{}}.attention.{part}": f"transformer.h.{{}}.attn.{part}" for part in DENSE},
        "blocks.{}.attention.projection": "transformer.h.{}.attn.c_proj",
        "blocks.{}.output.mapping": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.output.projection": "transformer.h.{}.mlp.c_proj",
        "layernorm": "transformer.ln_f",
    },
) | {
    "backbone.embedding.word_embedding.embedding_table": "transformer.wte.weight",
    "backbone.embedding.position_embedding.embedding_table": "transformer.wpe.weight",
}

BLOOM = _linear_names(
    "",
    {
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "blocks.{}.layernorm1": "transformer.h.{}.input_layernorm",
        "blocks.{}.layernorm2": "transformer.h.{}.post_attention_layernorm",
        **{f"blocks.{{}}.attention.{part}": f"transformer.h.{{}}.self_attention.{part}" for part in DENSE},
        "blocks.{}.attention.projection": "transformer.h.{}.self_attention.dense",
        "blocks.{}.output.mapping": "transformer.h.{}.mlp.dense_h_to_4h",
        "blocks.{}.output.projection": "transformer.h.{}.mlp.dense_4h_to_h",
        "ln_f": "transformer.ln_f",
    },
) | {"embedding.word_embedding.embedding_table": "transformer.word_embeddings.weight"}


CHATGLM_6B: dict[str, str | None] = {
    "transformer.word_embeddings.embedding_table": "transformer.word_embeddings.weight",
    "transformer.word_embeddings.weight": "transformer.word_embeddings.weight",
    "lm_head.weight": HEAD,
    **{
        f"transformer.{norm}.{old}": f"transformer.{norm}.{new}"
        for norm in ("layers.{}.input_layernorm", "layers.{}.post_attention_layernorm", "final_layernorm")
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    },
    **{
        name: name
        for part in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        for name in (f"transformer.layers.{{}}.{part}.weight", f"transformer.layers.{{}}.{part}.bias")
    },
    "transformer.layers.{}.attention.rotary_emb.inv_freq": None,
}
"""ChatGLM-6B (`models/glm/convert_reversed.py`); the rotary frequencies are computed."""
