"""Where each tensor of a PaddleNLP model goes: one list of rows per family.

Source: `_get_name_mappings` and `_get_tensor_parallel_mappings` in paddlenlp `transformers/<family>/modeling.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DROPPED = re.compile(r"\brotary(?:_pos)?_emb\.(?:inv_freq|cos_cached|sin_cached)$")
"""Buffers that models compute."""


@dataclass(frozen=True)
class TensorRule:
    """One Paddle tensor, or several that become one, and what they become.

    Attributes:
        sources: names in the file, `{}` for the layer's number; several are joined along their last axis.
        targets: Hugging Face names; one for each of `pieces` if there are several.
        shape: of each whole source, as it is in the file.
        split: the axis along which tensor-parallel ranks cut it; None if every rank has all of it.
        linear: (in, out) in the file, (out, in) at Hugging Face.
        pieces: sizes, along the output axis, of the parts of a fused tensor within one group.
        groups: how often these parts follow each other.
        units: things along `split` that no rank divides, where each rank has all if they do not divide (0: they do).
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    shape: tuple[int, ...]
    split: int | None = None
    linear: bool = False
    pieces: tuple[int, ...] = ()
    groups: int = 1
    units: int = 0


@dataclass(frozen=True)
class PaddleFamily:
    """The tensors of one kind of model.

    Attributes:
        prefix: what its names begin with.
        rows: `rows(config, shapes)`: the Hugging Face config, and the shapes in the first file.
        layers: the config's field for the number of layers.
        embedding: Hugging Face name of the embedding, to which the output head may be tied.
        tensor_parallel: whether split files can be joined.
    """

    prefix: str
    rows: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], list[TensorRule]]
    layers: str
    embedding: str
    tensor_parallel: bool = True


def _column(source: str, target: str, inputs: int, outputs: int) -> TensorRule:
    """A Linear weight of which ranks hold outputs."""
    return TensorRule((f"{source}.weight",), (f"{target}.weight",), (inputs, outputs), 1, True)


def _row(source: str, target: str, inputs: int, outputs: int) -> TensorRule:
    """A Linear weight of which ranks hold inputs."""
    return TensorRule((f"{source}.weight",), (f"{target}.weight",), (inputs, outputs), 0, True)


def _vector(source: str, target: str, size: int, split: int | None = None) -> TensorRule:
    return TensorRule((source,), (target,), (size,), split)


def _norm(source: str, target: str, size: int) -> list[TensorRule]:
    """A LayerNorm: weight and bias."""
    return [_vector(f"{source}.{part}", f"{target}.{part}", size) for part in ("weight", "bias")]


def _embedding(source: str, target: str, rows: int, width: int, units: int = 0) -> TensorRule:
    return TensorRule((f"{source}.weight",), (f"{target}.weight",), (rows, width), 0, units=units)


def _head(
    source: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rows: int, width: int
) -> list[TensorRule]:
    """The output head where there is one: (width, rows) as a Linear, (rows, width) if it is tied to the embedding."""
    if source not in shapes:
        return []
    shape = shapes[source]
    tied = shape[-1] == width and (shape[0] != width or bool(config.get("tie_word_embeddings", True)))
    layout, split = ((rows, width), 0) if tied else ((width, rows), 1)
    return [TensorRule((source,), ("lm_head.weight",), layout, split, not tied, units=rows)]


def _decoder(prefix: str) -> Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], list[TensorRule]]:
    """Rows of Llama and its kin, fused or not."""

    def rows(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
        hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head = config.get("head_dim", hidden // heads)
        old, new = f"{prefix}layers.{{}}.", "model.layers.{}."
        return [
            _embedding(f"{prefix}embed_tokens", "model.embed_tokens", words, hidden, words),
            _vector(f"{old}input_layernorm.weight", f"{new}input_layernorm.weight", hidden),
            *_attention(old + "self_attn.", new + "self_attn.", hidden, (heads, kv_heads, head), shapes),
            _row(f"{old}self_attn.o_proj", f"{new}self_attn.o_proj", heads * head, hidden),
            _vector(f"{old}post_attention_layernorm.weight", f"{new}post_attention_layernorm.weight", hidden),
            *_gate_up(old + "mlp.", new + "mlp.", hidden, inner, shapes),
            _row(f"{old}mlp.down_proj", f"{new}mlp.down_proj", inner, hidden),
            _vector(f"{prefix}norm.weight", "model.norm.weight", hidden),
            *_head("lm_head.weight", config, shapes, words, hidden),
        ]

    return rows


def _attention(
    old: str, new: str, hidden: int, sizes: tuple[int, int, int], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorRule]:
    """Query, key and value with their biases; fused ones lie per key/value head: its queries, key, value."""
    heads, kv_heads, head = sizes
    outputs = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
    rows: list[TensorRule] = []
    for part, shape, split in (("weight", (hidden,), 1), ("bias", (), 0)):
        targets = tuple(f"{new}{name}.{part}" for name in outputs)
        if _has(shapes, f"{old}qkv_proj.{part}"):
            pieces = (heads // kv_heads * head, head, head)
            whole = (*shape, sum(outputs.values()))
            rows.append(
                TensorRule((f"{old}qkv_proj.{part}",), targets, whole, split, part == "weight", pieces, kv_heads)
            )
        elif part == "weight" or _has(shapes, f"{old}q_proj.{part}"):
            rows += [
                TensorRule(
                    (f"{old}{name}.{part}",),
                    (f"{new}{name}.{part}",),
                    (*shape, size),
                    split,
                    part == "weight",
                    units=heads if name == "q_proj" else kv_heads,
                )
                for name, size in outputs.items()
            ]
    return rows


def _gate_up(old: str, new: str, hidden: int, inner: int, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    if not _has(shapes, f"{old}gate_up_fused_proj.weight"):
        return [_column(f"{old}{name}", f"{new}{name}", hidden, inner) for name in ("gate_proj", "up_proj")]
    targets = (f"{new}gate_proj.weight", f"{new}up_proj.weight")
    return [TensorRule((f"{old}gate_up_fused_proj.weight",), targets, (hidden, 2 * inner), 1, True, (inner, inner))]


def _has(shapes: Mapping[str, tuple[int, ...]], template: str) -> bool:
    """Whether any layer has this tensor."""
    pattern = re.compile(re.escape(template).replace(r"\{\}", r"\d+"))
    return any(pattern.fullmatch(name) for name in shapes)


def _qwen(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    old, new = "qwen.h.{}.", "model.layers.{}."
    thirds = (hidden, hidden, hidden)
    parts = [f"{new}self_attn.{name}_proj" for name in "qkv"]
    weights, biases = tuple(f"{name}.weight" for name in parts), tuple(f"{name}.bias" for name in parts)
    return [
        _embedding("qwen.wte", "model.embed_tokens", words, hidden),
        _vector(f"{old}ln_1.weight", f"{new}input_layernorm.weight", hidden),
        TensorRule((f"{old}attn.c_attn.weight",), weights, (hidden, 3 * hidden), 1, True, thirds),
        TensorRule((f"{old}attn.c_attn.bias",), biases, (3 * hidden,), 0, False, thirds),
        _row(f"{old}attn.c_proj", f"{new}self_attn.o_proj", hidden, hidden),
        _vector(f"{old}ln_2.weight", f"{new}post_attention_layernorm.weight", hidden),
        _column(f"{old}mlp.w2", f"{new}mlp.gate_proj", hidden, inner),
        _column(f"{old}mlp.w1", f"{new}mlp.up_proj", hidden, inner),
        _row(f"{old}mlp.c_proj", f"{new}mlp.down_proj", inner, hidden),
        _vector("qwen.ln_f.weight", "model.norm.weight", hidden),
        *_head("lm_head.weight", config, shapes, words, hidden),
    ]


def _bloom(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, words = config["hidden_size"], config["vocab_size"]
    old, new = "bloom.h.{}.", "transformer.h.{}."
    qkv, dense = "self_attention.query_key_value", "self_attention.dense"
    up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
    return [
        _embedding("bloom.word_embeddings", "transformer.word_embeddings", words, hidden),
        *_norm("bloom.word_embeddings_layernorm", "transformer.word_embeddings_layernorm", hidden),
        *_norm(f"{old}input_layernorm", f"{new}input_layernorm", hidden),
        _column(old + qkv, new + qkv, hidden, 3 * hidden),
        _vector(f"{old}{qkv}.bias", f"{new}{qkv}.bias", 3 * hidden, 0),
        _row(old + dense, new + dense, hidden, hidden),
        _vector(f"{old}{dense}.bias", f"{new}{dense}.bias", hidden),
        *_norm(f"{old}post_attention_layernorm", f"{new}post_attention_layernorm", hidden),
        _column(old + up, new + up, hidden, 4 * hidden),
        _vector(f"{old}{up}.bias", f"{new}{up}.bias", 4 * hidden, 0),
        _row(old + down, new + down, 4 * hidden, hidden),
        _vector(f"{old}{down}.bias", f"{new}{down}.bias", hidden),
        *_norm("bloom.ln_f", "transformer.ln_f", hidden),
        *_head("lm_head.decoder_weight", config, shapes, words, hidden),
    ]


def _gpt(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    """GPT keeps (in, out), as transformers' Conv1D does; a fused qkv lies per head: query, key, value."""
    hidden, inner, words, heads = config["n_embd"], config["n_inner"], config["vocab_size"], config["n_head"]
    old, new = "gpt.decoder.layers.{}.", "transformer.h.{}."
    rows = [
        _embedding("gpt.embeddings.word_embeddings", "transformer.wte", words, hidden),
        TensorRule(
            ("gpt.embeddings.position_embeddings.weight",),
            ("transformer.wpe.weight",),
            (config["n_positions"], hidden),
        ),
        *_norm(f"{old}norm1", f"{new}ln_1", hidden),
    ]
    for part, shape, split in (("weight", (hidden,), 1), ("bias", (), 0)):
        target = (f"{new}attn.c_attn.{part}",)
        if _has(shapes, f"{old}self_attn.qkv_proj.{part}"):
            fused, pieces = f"{old}self_attn.qkv_proj.{part}", (hidden // heads,) * 3
            rows.append(TensorRule((fused,), target, (*shape, 3 * hidden), split, pieces=pieces, groups=heads))
        else:
            sources = tuple(f"{old}self_attn.{name}_proj.{part}" for name in "qkv")
            rows.append(TensorRule(sources, target, (*shape, hidden), split))
    for source, name, inputs, outputs, axis in (
        ("self_attn.out_proj", "attn.c_proj", hidden, hidden, 0),
        ("linear1", "mlp.c_fc", hidden, inner, 1),
        ("linear2", "mlp.c_proj", inner, hidden, 0),
    ):
        rows.append(TensorRule((f"{old}{source}.weight",), (f"{new}{name}.weight",), (inputs, outputs), axis))
        rows.append(_vector(f"{old}{source}.bias", f"{new}{name}.bias", outputs, 0 if axis else None))
    rows += [*_norm(f"{old}norm2", f"{new}ln_2", hidden), *_norm("gpt.decoder.norm", "transformer.ln_f", hidden)]
    return [*rows, *_head("lm_head.weight", config, shapes, words, hidden)]


def _chatglm(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    old, new = "chatglm_v2.encoder.layers.{}.", "model.layers.{}."
    pieces = (heads * head, kv_heads * head, kv_heads * head)
    parts = [f"{new}self_attn.{name}_proj" for name in "qkv"]
    weights, biases = tuple(f"{name}.weight" for name in parts), tuple(f"{name}.bias" for name in parts)
    qkv = f"{old}self_attention.query_key_value"
    bias = (
        [TensorRule((f"{qkv}.bias",), biases, (sum(pieces),), None, False, pieces)] if config["attention_bias"] else []
    )
    return [
        _embedding("chatglm_v2.embedding.word_embeddings", "model.embed_tokens", words, hidden),
        _vector(f"{old}input_layernorm.weight", f"{new}input_layernorm.weight", hidden),
        TensorRule((f"{qkv}.weight",), weights, (hidden, sum(pieces)), None, True, pieces),
        *bias,
        _row(f"{old}self_attention.dense", f"{new}self_attn.o_proj", heads * head, hidden),
        _vector(f"{old}post_attention_layernorm.weight", f"{new}post_attention_layernorm.weight", hidden),
        _column(f"{old}mlp.dense_h_to_4h", f"{new}mlp.gate_up_proj", hidden, 2 * inner),
        _row(f"{old}mlp.dense_4h_to_h", f"{new}mlp.down_proj", inner, hidden),
        _vector("chatglm_v2.encoder.final_layernorm.weight", "model.norm.weight", hidden),
        _column("chatglm_v2.output_layer", "lm_head", hidden, words),
    ]


WORDS = "model.embed_tokens.weight"

FAMILIES: dict[str, PaddleFamily] = {
    "llama": PaddleFamily("llama.", _decoder("llama."), "num_hidden_layers", WORDS),
    "baichuan": PaddleFamily("llama.", _decoder("llama."), "num_hidden_layers", WORDS),
    "qwen2": PaddleFamily("qwen2.", _decoder("qwen2."), "num_hidden_layers", WORDS),
    "mistral": PaddleFamily("mistral.", _decoder("mistral."), "num_hidden_layers", WORDS),
    "qwen": PaddleFamily("qwen.", _qwen, "num_hidden_layers", WORDS),
    "bloom": PaddleFamily("bloom.", _bloom, "n_layer", "transformer.word_embeddings.weight"),
    "gpt": PaddleFamily("gpt.", _gpt, "n_layer", "transformer.wte.weight"),
    "chatglm_v2": PaddleFamily("chatglm_v2.", _chatglm, "num_hidden_layers", WORDS, tensor_parallel=False),
}
"""By Paddle's `model_type`."""
