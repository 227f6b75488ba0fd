"""MindFormers' tensor names to Hugging Face's: one table per family, `{}` for the layer number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llmconv.convert.algebra.operations import concat, interleave_rows, pick_rows
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.formats.mindformers.converted_model import Heads
from llmconv.errors import InputRefused, MalformedInput
from llmconv.tensors import LazyTensor

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


LAYOUTS = ("plain", "interleaved")


FUSED = (
    (re.compile(r"(.+\.attention)\.(?:w_qkv|w)\.(weight|bias)"), ("wq", "wk", "wv")),
    (re.compile(r"(.+\.feed_forward)\.w_gate_hidden\.(weight|bias)"), ("w1", "w3")),
    (re.compile(r"(.+\.self_attention)\.linear_qkv\.(weight|bias)"), ("linear_q", "linear_k", "linear_v")),
    (re.compile(r"(.+\.mlp)\.linear_fc1\.(weight|bias)"), ("gating", "hidden")),
)
"""Names of the fused matrices, with those of their parts: queries, keys and values, or gate and up."""


def unfuse(run: RunConfig, tensors: Mapping[str, LazyTensor], heads: Heads) -> dict[str, LazyTensor]:
    """Splits the `FUSED` tensors, such as `w_qkv` (in 1.0 `w`) into `wq`, `wk` and `wv`; the others stay.

    Until 1.4 the parts follow each other; since 1.5 each key/value head follows its queries, and gate and up rows
    alternate (mindformers `utils/convert_utils.py`, `qkv_concat_hf2mg`, `ffn_concat_hf2mg`), under the same names. If
    names do not decide, the run's `qkv_layout` does (else InputRefused); MalformedInput for a wrong number of rows.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        found = next(((match, parts) for sign, parts in FUSED if (match := sign.fullmatch(name))), None)
        if found is None:
            result[name] = tensor
            continue
        match, parts = found
        layout = layout_of(run, name)
        try:
            rows = split_qkv(tensor, heads, layout) if len(parts) == 3 else split_gate(tensor, layout)
        except ValueError as error:
            raise MalformedInput(
                f"`{name}` of `{run.source}` cannot be split: {error}",
                hint="the configuration belongs to another model",
            ) from error
        result |= {f"{match[1]}.{part}.{match[2]}": tensor for part, tensor in zip(parts, rows, strict=True)}
    return result


def layout_of(run: RunConfig, name: str) -> str:
    """`plain` or `interleaved`, from names, the class of the model, or the user's `qkv_layout` (else InputRefused)."""
    if ".linear_" in name:  # Megatron's names exist since 1.6 only
        return "interleaved"
    if ".attention.w." in name and run.arch:  # Llama's in 1.0 only; InternLM2 has its own order, which never changed
        return "interleaved" if run.arch.startswith("InternLM2") else "plain"
    asked = run.fields.get("qkv_layout")
    if asked in LAYOUTS:
        return str(asked)
    raise InputRefused(
        f"`{run.source}` holds fused matrices (`{name}`), and the file does not contain the order of their rows",
        hint="give `--qkv-layout plain` if MindFormers up to 1.4 wrote it, `--qkv-layout interleaved` since 1.5",
    )


def split_qkv(tensor: LazyTensor, heads: Heads, layout: str) -> list[LazyTensor]:
    """Queries, keys and values of a fused tensor [(queries + 2 keys) * dim, …]; ValueError for other sizes.

    `layout` is one of `LAYOUTS`.
    """
    rows = [heads.queries * heads.dim, heads.keys * heads.dim, heads.keys * heads.dim]
    if tensor.num_rows != sum(rows):
        raise ValueError(f"expected {sum(rows)} rows, got {tensor.num_rows}")
    counts = rows if layout == "plain" else [count // heads.keys for count in rows]
    return [pick_rows(tensor, sum(counts), sum(counts[:part]), counts[part]) for part in range(3)]


def split_gate(tensor: LazyTensor, layout: str) -> list[LazyTensor]:
    """The gate and up rows of a fused matrix; ValueError if the number of rows is odd."""
    count = tensor.num_rows // 2 if layout == "plain" else 1
    return [pick_rows(tensor, 2 * count, part * count, count) for part in range(2)]


def fuse(
    tensors: dict[str, LazyTensor], parts: Sequence[str], whole: str, counts: Sequence[int] | None = None
) -> dict[str, LazyTensor]:
    """Joins the modules `parts` of each layer into `whole` (last components of names); the reverse of `unfuse`.

    `counts` are the rows taken in turn from each part; None joins whole parts one after the other. Raises ValueError if
    a part is missing, or the numbers of rows do not match.
    """
    ends = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    fused = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for name in tensors:
        root, _, kind = name.rpartition(f".{parts[0]}.")
        if root and kind in ("weight", "bias"):
            found = [tensors.get(f"{root}.{part}.{kind}") for part in parts]
            present = [tensor for tensor in found if tensor is not None]
            if len(present) < len(parts):
                raise ValueError(f"`{name}` is present without one of {', '.join(parts[1:])}")
            fused[f"{root}.{whole}.{kind}"] = interleave_rows(present, counts) if counts else concat(present, 0)
    return fused
