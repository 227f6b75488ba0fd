"""LitGPT's tensor names to Hugging Face's, one table per family.

Source: litgpt `model.py`, `scripts/convert_lit_checkpoint.py`. Rows of `attn.qkv` are all queries, all keys, all
values; of `attn.attn`, its name until the end of 2024, the queries, key and value of one group after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.convert.formats.litgpt.read_config import LitConfig

LAYER = "transformer.h.{}"


def _table(layer: str, modules: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str | None]:
    """Names of the weights and biases of a layer's modules, and of those outside the layers."""
    pairs = {f"{LAYER}.{source}": f"{layer}.{target}" for source, target in modules.items()} | dict(outer)
    return {f"{source}.{kind}": f"{target}.{kind}" for source, target in pairs.items() for kind in ("weight", "bias")}


MLP = {"mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
QKV = {f"attn.{one}": f"self_attn.{one}_proj" for one in "qkv"}
NORMS = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
OUTER = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
LLAMA = _table(
    "model.layers.{}",
    {
        **NORMS,
        **QKV,
        **MLP,
        "attn.proj": "self_attn.o_proj",
        "attn.norm_q": "self_attn.q_norm",
        "attn.norm_k": "self_attn.k_norm",
        "mlp.gate": "block_sparse_moe.gate",
    },
    OUTER,
)
GEMMA2 = LLAMA | {
    f"{LAYER}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    f"{LAYER}.norm_2.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    f"{LAYER}.post_mlp_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
PHI3 = LLAMA | {
    f"{LAYER}.attn.qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
    f"{LAYER}.mlp.fc.weight": "model.layers.{}.mlp.gate_up_proj.weight",
}
PHI = _table(
    "model.layers.{}",
    {
        **QKV,
        "norm_1": "input_layernorm",
        "attn.proj": "self_attn.dense",
        "mlp.fc": "mlp.fc1",
        "mlp.proj": "mlp.fc2",
    },
    OUTER | {"transformer.ln_f": "model.final_layernorm"},
)
DENSE = {"mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}
NEOX = _table(
    "gpt_neox.layers.{}",
    {**NORMS, **DENSE, "attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense"},
    {"transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
)
FALCON_ATTENTION = {"attn.qkv": "self_attention.query_key_value", "attn.proj": "self_attention.dense"}
FALCON_OUTER = {
    "transformer.wte": "transformer.word_embeddings",
    "transformer.ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
}
FALCON = _table(LAYER, {**DENSE, **FALCON_ATTENTION, "norm_1": "input_layernorm"}, FALCON_OUTER)
FALCON_40B = _table(LAYER, {**DENSE, **FALCON_ATTENTION, "norm_1": "ln_attn", "norm_2": "ln_mlp"}, FALCON_OUTER)

TABLES = {"gemma2": GEMMA2, "phi3": PHI3, "phi": PHI, "gpt_neox": NEOX, "falcon": FALCON}


def table_of(lit: LitConfig, family: str) -> dict[str, str | None]:
    """LitGPT's names to those of `family`, with the experts of `lit`."""
    if family == "falcon" and not lit.shared_attention_norm:
        return FALCON_40B
    table, moe = TABLES.get(family, LLAMA), "model.layers.{}.block_sparse_moe"
    experts: dict[str, str | None] = {
        f"{LAYER}.mlp.experts.{number}.{source}.weight": f"{moe}.experts.{number}.{target}.weight"
        for number in range(lit.n_expert)
        for source, target in (("fc_1", "w1"), ("fc_2", "w3"), ("proj", "w2"))
    }
    return table | experts
