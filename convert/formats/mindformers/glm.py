"""MindFormers' ChatGLM2 and ChatGLM3 as transformers' `glm`, which computes the same; ChatGLM-6B as its published code.

Source: mindformers `models/glm2/{glm2,glm2_config,glm2_transformer,glm2_modules,convert_weight}.py`. Both rotate
neighbors in the first half of each head; since 1.5 `use_rearrange_rope` stores even rows before odd ones. ChatGLM-6B:
`models/glm/{glm,glm_config,convert_reversed}.py`; only norms and the embedding have other names.
"""

from __future__ import annotations

import re
from typing import Any

from llmconv.convert.algebra.operations import concat, inverted, permute_rows, rename
from llmconv.convert.formats.mindformers.config import (
    CHATGLM_6B,
    EMBEDDING,
    GLM,
    HEAD,
    ConvertedModel,
    Heads,
    MindFormersModel,
    RunConfig,
    check_embedding_sizes,
    finish,
    fuse,
    heads_of,
    refuse_model,
    require_embedding,
    split_qkv,
)
from llmconv.convert.models.model_config import ModelSettings, refuse_settings
from llmconv.convert.models.own_families import chatglm, needs_code
from llmconv.convert.models.trusted_code import trusted_code
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

QKV = re.compile(r"(.+\.self_attn)\.query_key_value\.(weight|bias)")
SIDES = re.compile(r"(.+\.mlp)\.gate_proj\.weight")

FIXED = {
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "post_self_attn_layernorm": False,
    "post_mlp_layernorm": False,
}
"""Options that `glm` does not have, with the value that it implements."""


def build_glm(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """ChatGLM2 or ChatGLM3 as `glm`; UnsupportedInput for an option, MalformedInput for names or shapes."""
    changed = [name for name, usual in FIXED.items() if run.fields.get(name) not in (None, usual)]
    if changed or run.fields.get("pre_seq_len"):
        raise refuse_model(run, f"a ChatGLM with `{(changed or ['pre_seq_len'])[0]}` set", "`glm` has no such option")
    renamed = {target: tensors[source] for target, source in rename(tensors, GLM, run.source).items()}
    embedding = require_embedding(run, renamed.get(EMBEDDING))
    hidden = embedding.shape[1]
    heads = _heads(run, hidden)
    parts = _transformers_tensors(run, renamed, heads)
    gate_up = parts.get("model.layers.0.mlp.gate_up_proj.weight")
    bias = "model.layers.0.self_attn.q_proj.bias" in parts
    config = {
        "model_type": "glm",
        "vocab_size": embedding.num_rows,
        "hidden_size": run.integer("hidden_size", default=hidden),
        "intermediate_size": gate_up.num_rows // 2 if gate_up else 0,
        "num_hidden_layers": run.integer("num_layers", default=28),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.dim,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "attention_bias": bias,
        "max_position_embeddings": run.integer("seq_length", default=2048),
        "rms_norm_eps": run.number("layernorm_epsilon", default=1e-5),
        "rope_theta": 10000.0 * run.number("rope_ratio", default=1.0),
        **run.tokens(bos_token_id=None, eos_token_id=2, pad_token_id=0),
    }
    return finish(run, parts, _shapes(config, heads), config, HEAD)


def _heads(run: RunConfig, hidden: int) -> Heads:
    fields = {"num_attention_heads": 32, "kv_channels": 128, **run.fields}
    multi = run.fields.get("multi_query_attention", True)
    keys = fields.get("multi_query_group_num", 2) if multi else fields["num_attention_heads"]
    known = {**fields, "num_key_value_heads": keys, "n_kv_heads": keys}
    return heads_of(RunConfig(run.source, known, run.arch, run.lora), hidden)


def _transformers_tensors(run: RunConfig, renamed: dict[str, LazyTensor], heads: Heads) -> dict[str, LazyTensor]:
    """Splits queries, keys and values, joins gate and up, and puts rows in transformers' order."""
    parts: dict[str, LazyTensor] = {}
    try:
        for name, tensor in renamed.items():
            fused, left = QKV.fullmatch(name), SIDES.fullmatch(name)
            if fused:
                split = zip("qkv", split_qkv(tensor, heads, "plain"), strict=True)
                parts |= {f"{fused[1]}.{one}_proj.{fused[2]}": rows for one, rows in split}
            elif left and (right := renamed.get(f"{left[1]}.up_proj.weight")):
                parts[f"{left[1]}.gate_up_proj.weight"] = concat([tensor, right], 0)
            elif not name.endswith(".mlp.up_proj.weight"):
                parts[name] = tensor
        if run.flag("use_rearrange_rope"):
            parts = {name: _interleaved_pairs(name, tensor, heads.dim) for name, tensor in parts.items()}
    except ValueError as error:
        raise MalformedInput(
            f"the layers of `{run.source}` cannot be split: {error}",
            hint="the configuration belongs to another model",
        ) from error
    return parts


def _interleaved_pairs(name: str, tensor: LazyTensor, dim: int) -> LazyTensor:
    """Takes row `2i + j` of a query or key head from row `j·D/2 + i`, which undoes `rearrange_w`."""
    if not re.search(r"\.[qk]_proj\.", name):
        return tensor
    return permute_rows(tensor, [row % 2 * (dim // 2) + row // 2 for row in range(dim)])


def store_glm(settings: ModelSettings, tensors: dict[str, LazyTensor], source: str) -> MindFormersModel:
    """`glm` as ChatGLM3, with whole queries, keys, values; UnsupportedInput for a setting that it does not have."""
    held = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 0.5, "rope_scaling": None}
    refuse_settings(source, settings, held, "MindFormers")
    parts = fuse(tensors, tuple(f"{one}_proj" for one in "qkv"), "query_key_value")
    renamed = {target: parts[name] for target, name in rename(parts, inverted(GLM), source).items()}
    fields = {
        "type": "ChatGLM2Config",
        "num_layers": settings["num_hidden_layers"],
        "vocab_size": settings["vocab_size"],
        "padded_vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "ffn_hidden_size": settings["intermediate_size"],
        "kv_channels": settings["head_dim"],
        "num_attention_heads": settings["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": settings["num_key_value_heads"],
        "seq_length": settings["max_position_embeddings"],
        "layernorm_epsilon": settings["rms_norm_eps"],
        "rope_ratio": settings["rope_theta"] / 10000.0,
        "add_qkv_bias": settings["attention_bias"],
        "tie_word_embeddings": settings["tie_word_embeddings"],
        **FIXED,
    }
    return MindFormersModel(renamed, "ChatGLM2ForConditionalGeneration", fields)


def _shapes(config: dict[str, Any], heads: Heads) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    rows = {"q": heads.queries * heads.dim, "k": heads.keys * heads.dim, "v": heads.keys * heads.dim}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden)}
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        for one, count in rows.items():
            shapes[f"{layer}.self_attn.{one}_proj.weight"] = (count, hidden)
            if config["attention_bias"]:
                shapes[f"{layer}.self_attn.{one}_proj.bias"] = (count,)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (hidden, rows["q"]),
            f"{layer}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), HEAD: (vocabulary, hidden)}


def build_chatglm_6b(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """ChatGLM-6B in its code's names; UnsupportedInput: no code, a prefix; MalformedInput: wrong names."""
    reason = "it has two rotary positions per token, which no model of transformers has"
    code = needs_code(trusted_code(run.fields), run.source, "a ChatGLM-6B", reason)
    if run.fields.get("pre_seq_len"):
        raise UnsupportedInput(
            f"`{run.source}` is a ChatGLM-6B with a prefix (`pre_seq_len`)", hint="convert the model without the prefix"
        )
    renamed = {target: tensors[name] for target, name in rename(tensors, CHATGLM_6B, run.source).items()}
    embedding = require_embedding(run, renamed.get("transformer.word_embeddings.weight"))
    up = renamed.get("transformer.layers.0.mlp.dense_h_to_4h.weight")
    heads = run.integer("num_heads", "num_attention_heads", default=32)
    if embedding.shape[1] % (4 * heads):
        raise MalformedInput(
            f"the hidden size {embedding.shape[1]} of `{run.source}` is not a multiple of four times {heads} heads",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )
    fields = {
        **check_embedding_sizes(run, embedding),
        "num_layers": run.integer("num_layers", "num_hidden_layers", default=28),
        "num_attention_heads": heads,
        "inner_hidden_size": up.num_rows if up else 0,
        "max_sequence_length": run.integer("seq_length", default=2048),
        "layernorm_epsilon": run.number("layernorm_epsilon", default=1e-5),
        "position_encoding_2d": True,
        **run.tokens(bos_token_id=None, eos_token_id=None, pad_token_id=None, gmask_token_id=None),
    }
    return ConvertedModel(*chatglm(renamed, fields, code, run.source))
