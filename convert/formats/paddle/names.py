"""PaddleNLP's tensor names to Hugging Face's: one list of rules per family.

Source: `_get_name_mappings` and `_get_tensor_parallel_mappings` in paddlenlp `transformers/<family>/modeling.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmconv.checkpoint import transposed
from llmconv.convert.algebra import concat, pick_rows
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor

DROPPED = re.compile(r"\brotary(?:_pos)?_emb\.(?:inv_freq|cos_cached|sin_cached)$")  # buffers that models recompute


@dataclass(frozen=True)
class TensorRule:
    """How one Paddle tensor, or several, become one Hugging Face tensor or several."""

    sources: tuple[str, ...]  # names in the file, `{}` for the layer number; several are joined along their last axis
    targets: tuple[str, ...]  # Hugging Face names; one for each of `pieces` if there are several
    shape: tuple[int, ...]  # shape in the file of each whole source
    split: int | None = None  # the axis along which tensor-parallel ranks split it; None if every rank has a copy
    linear: bool = False  # whether it is [in, out] in the file and [out, in] in Hugging Face models
    pieces: tuple[int, ...] = ()  # sizes, along the output axis, of the parts of a fused tensor within one group
    groups: int = 1  # number of groups in a fused tensor
    # number of indivisible units along `split`, such as heads; if it is not a multiple of the ranks, every rank has a
    # copy. 0 if it always is
    units: int = 0


@dataclass(frozen=True)
class PaddleFamily:
    """The tensors of one model family."""

    prefix: str  # of its tensor names
    # `rules(config, shapes)` from the Hugging Face config and the shapes in the first file
    rules: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], list[TensorRule]]
    layers: str  # the config's field for the number of layers
    embedding: str  # Hugging Face name of the embedding, to which the output head may be tied
    tensor_parallel: bool = True  # whether the files of tensor-parallel ranks can be joined


def _column(source: str, target: str, inputs: int, outputs: int, split: int = 1) -> TensorRule:
    """A Linear weight that ranks split along its outputs, or with 0 along its inputs."""
    return TensorRule((f"{source}.weight",), (f"{target}.weight",), (inputs, outputs), split, True)


def _row(source: str, target: str, inputs: int, outputs: int) -> TensorRule:
    """A Linear weight that ranks split along its inputs."""
    return _column(source, target, inputs, outputs, 0)


def _vector(source: str, target: str, size: int, split: int | None = None) -> TensorRule:
    return TensorRule((source,), (target,), (size,), split)


def _norm(source: str, target: str, size: int) -> list[TensorRule]:
    return [_vector(f"{source}.{part}", f"{target}.{part}", size) for part in ("weight", "bias")]


def _embedding(source: str, target: str, rows: int, width: int, units: int = 0) -> TensorRule:
    return TensorRule((f"{source}.weight",), (f"{target}.weight",), (rows, width), 0, units=units)


def _head(
    source: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rows: int, width: int
) -> list[TensorRule]:
    """The output head, if there is one: [width, rows] as a Linear, [rows, width] if it is tied to the embedding."""
    if source not in shapes:
        return []
    shape = shapes[source]
    tied = shape[-1] == width and (shape[0] != width or bool(config.get("tie_word_embeddings", True)))
    layout, split = ((rows, width), 0) if tied else ((width, rows), 1)
    return [TensorRule((source,), ("lm_head.weight",), layout, split, not tied, units=rows)]


def _decoder(prefix: str) -> Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], list[TensorRule]]:
    """The rules of Llama-like models, fused or not."""

    def rules(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
        hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head = config.get("head_dim", hidden // heads)
        old, new = f"{prefix}layers.{{}}.", "model.layers.{}."
        sides, fused = ("gate_proj", "up_proj"), f"{old}mlp.gate_up_fused_proj.weight"
        gate_up = [_column(f"{old}mlp.{name}", f"{new}mlp.{name}", hidden, inner) for name in sides]
        if has_layered(shapes, fused):
            targets = tuple(f"{new}mlp.{name}.weight" for name in sides)
            gate_up = [TensorRule((fused,), targets, (hidden, 2 * inner), 1, True, (inner, inner))]
        return [
            _embedding(f"{prefix}embed_tokens", "model.embed_tokens", vocabulary, hidden, vocabulary),
            _vector(f"{old}input_layernorm.weight", f"{new}input_layernorm.weight", hidden),
            *_attention(old + "self_attn.", new + "self_attn.", hidden, (heads, kv_heads, head), shapes),
            _row(f"{old}self_attn.o_proj", f"{new}self_attn.o_proj", heads * head, hidden),
            _vector(f"{old}post_attention_layernorm.weight", f"{new}post_attention_layernorm.weight", hidden),
            *gate_up,
            _row(f"{old}mlp.down_proj", f"{new}mlp.down_proj", inner, hidden),
            _vector(f"{prefix}norm.weight", "model.norm.weight", hidden),
            *_head("lm_head.weight", config, shapes, vocabulary, hidden),
        ]

    return rules


def has_layered(shapes: Mapping[str, tuple[int, ...]], template: str) -> bool:
    """Whether any layer has a tensor of this name."""
    pattern = re.compile(re.escape(template).replace(r"\{\}", r"\d+"))
    return any(pattern.fullmatch(name) for name in shapes)


def _attention(
    old: str, new: str, hidden: int, sizes: tuple[int, int, int], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorRule]:
    """Query, key and value with their biases; fused ones alternate by key/value head: its queries, key, value."""
    heads, kv_heads, head = sizes
    outputs = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
    rules: list[TensorRule] = []
    for part, shape, split in (("weight", (hidden,), 1), ("bias", (), 0)):
        targets = tuple(f"{new}{name}.{part}" for name in outputs)
        if has_layered(shapes, f"{old}qkv_proj.{part}"):
            pieces = (heads // kv_heads * head, head, head)
            whole = (*shape, sum(outputs.values()))
            rules.append(
                TensorRule((f"{old}qkv_proj.{part}",), targets, whole, split, part == "weight", pieces, kv_heads)
            )
        elif part == "weight" or has_layered(shapes, f"{old}q_proj.{part}"):
            rules += [
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
    return rules


def _qwen(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    old, new = "qwen.h.{}.", "model.layers.{}."
    thirds = (hidden, hidden, hidden)
    parts = [f"{new}self_attn.{name}_proj" for name in "qkv"]
    weights, biases = tuple(f"{name}.weight" for name in parts), tuple(f"{name}.bias" for name in parts)
    return [
        _embedding("qwen.wte", "model.embed_tokens", vocabulary, hidden),
        _vector(f"{old}ln_1.weight", f"{new}input_layernorm.weight", hidden),
        TensorRule((f"{old}attn.c_attn.weight",), weights, (hidden, 3 * hidden), 1, True, thirds),
        TensorRule((f"{old}attn.c_attn.bias",), biases, (3 * hidden,), 0, False, thirds),
        _row(f"{old}attn.c_proj", f"{new}self_attn.o_proj", hidden, hidden),
        _vector(f"{old}ln_2.weight", f"{new}post_attention_layernorm.weight", hidden),
        _column(f"{old}mlp.w2", f"{new}mlp.gate_proj", hidden, inner),
        _column(f"{old}mlp.w1", f"{new}mlp.up_proj", hidden, inner),
        _row(f"{old}mlp.c_proj", f"{new}mlp.down_proj", inner, hidden),
        _vector("qwen.ln_f.weight", "model.norm.weight", hidden),
        *_head("lm_head.weight", config, shapes, vocabulary, hidden),
    ]


def _layer(old: str, new: str, attention: str, hidden: int, inner: int) -> list[TensorRule]:
    """A layer of BLOOM or ChatGLM-6B; the first matrix of `attention` and of the MLP is split by outputs."""
    rules = [*_norm(f"{old}input_layernorm", f"{new}input_layernorm", hidden)]
    for first, outputs, second, inputs in (
        (f"{attention}.query_key_value", 3 * hidden, f"{attention}.dense", hidden),
        ("mlp.dense_h_to_4h", inner, "mlp.dense_4h_to_h", inner),
    ):
        rules.append(_column(old + first, new + first, hidden, outputs))
        rules.append(_vector(f"{old}{first}.bias", f"{new}{first}.bias", outputs, 0))
        rules.append(_row(old + second, new + second, inputs, hidden))
        rules.append(_vector(f"{old}{second}.bias", f"{new}{second}.bias", hidden))
    return [*rules, *_norm(f"{old}post_attention_layernorm", f"{new}post_attention_layernorm", hidden)]


def _bloom(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    return [
        _embedding("bloom.word_embeddings", "transformer.word_embeddings", vocabulary, hidden),
        *_norm("bloom.word_embeddings_layernorm", "transformer.word_embeddings_layernorm", hidden),
        *_layer("bloom.h.{}.", "transformer.h.{}.", "self_attention", hidden, 4 * hidden),
        *_norm("bloom.ln_f", "transformer.ln_f", hidden),
        *_head("lm_head.decoder_weight", config, shapes, vocabulary, hidden),
    ]


def _gpt(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    """GPT stores [in, out], as transformers' Conv1D does; a fused qkv alternates by head: query, key, value."""
    hidden, inner, vocabulary, heads = config["n_embd"], config["n_inner"], config["vocab_size"], config["n_head"]
    old, new = "gpt.decoder.layers.{}.", "transformer.h.{}."
    rules = [
        _embedding("gpt.embeddings.word_embeddings", "transformer.wte", vocabulary, hidden),
        TensorRule(
            ("gpt.embeddings.position_embeddings.weight",), ("transformer.wpe.weight",), (config["n_positions"], hidden)
        ),
        *_norm(f"{old}norm1", f"{new}ln_1", hidden),
    ]
    for part, shape, split in (("weight", (hidden,), 1), ("bias", (), 0)):
        target = (f"{new}attn.c_attn.{part}",)
        if has_layered(shapes, f"{old}self_attn.qkv_proj.{part}"):
            fused, pieces = f"{old}self_attn.qkv_proj.{part}", (hidden // heads,) * 3
            rules.append(TensorRule((fused,), target, (*shape, 3 * hidden), split, pieces=pieces, groups=heads))
        else:
            sources = tuple(f"{old}self_attn.{name}_proj.{part}" for name in "qkv")
            rules.append(TensorRule(sources, target, (*shape, hidden), split))
    for source, name, inputs, outputs, axis in (
        ("self_attn.out_proj", "attn.c_proj", hidden, hidden, 0),
        ("linear1", "mlp.c_fc", hidden, inner, 1),
        ("linear2", "mlp.c_proj", inner, hidden, 0),
    ):
        rules.append(TensorRule((f"{old}{source}.weight",), (f"{new}{name}.weight",), (inputs, outputs), axis))
        rules.append(_vector(f"{old}{source}.bias", f"{new}{name}.bias", outputs, 0 if axis else None))
    rules += [*_norm(f"{old}norm2", f"{new}ln_2", hidden), *_norm("gpt.decoder.norm", "transformer.ln_f", hidden)]
    return [*rules, *_head("lm_head.weight", config, shapes, vocabulary, hidden)]


def _chatglm(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
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
        _embedding("chatglm_v2.embedding.word_embeddings", "model.embed_tokens", vocabulary, hidden),
        _vector(f"{old}input_layernorm.weight", f"{new}input_layernorm.weight", hidden),
        TensorRule((f"{qkv}.weight",), weights, (hidden, sum(pieces)), None, True, pieces),
        *bias,
        _row(f"{old}self_attention.dense", f"{new}self_attn.o_proj", heads * head, hidden),
        _vector(f"{old}post_attention_layernorm.weight", f"{new}post_attention_layernorm.weight", hidden),
        _column(f"{old}mlp.dense_h_to_4h", f"{new}mlp.gate_up_proj", hidden, 2 * inner),
        _row(f"{old}mlp.dense_4h_to_h", f"{new}mlp.down_proj", inner, hidden),
        _vector("chatglm_v2.encoder.final_layernorm.weight", "model.norm.weight", hidden),
        _column("chatglm_v2.output_layer", "lm_head", hidden, vocabulary),
    ]


def _chatglm_6b(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[TensorRule]:
    """The names of its published code, but for the prefix; query, key and value alternate by head in both."""
    hidden, inner, vocabulary = config["hidden_size"], config["inner_hidden_size"], config["vocab_size"]
    return [
        _embedding("chatglm.transformer.word_embeddings", "transformer.word_embeddings", vocabulary, hidden),
        *_layer("chatglm.transformer.layers.{}.", "transformer.layers.{}.", "attention", hidden, inner),
        *_norm("chatglm.transformer.final_layernorm", "transformer.final_layernorm", hidden),
        *_head("lm_head.weight", {"tie_word_embeddings": True}, shapes, vocabulary, hidden),
    ]


EMBEDDING = "model.embed_tokens.weight"

FAMILIES: dict[str, PaddleFamily] = {  # by Paddle's `model_type`
    "llama": PaddleFamily("llama.", _decoder("llama."), "num_hidden_layers", EMBEDDING),
    "baichuan": PaddleFamily("llama.", _decoder("llama."), "num_hidden_layers", EMBEDDING),
    "qwen2": PaddleFamily("qwen2.", _decoder("qwen2."), "num_hidden_layers", EMBEDDING),
    "mistral": PaddleFamily("mistral.", _decoder("mistral."), "num_hidden_layers", EMBEDDING),
    "qwen": PaddleFamily("qwen.", _qwen, "num_hidden_layers", EMBEDDING),
    "bloom": PaddleFamily("bloom.", _bloom, "n_layer", "transformer.word_embeddings.weight"),
    "gpt": PaddleFamily("gpt.", _gpt, "n_layer", "transformer.wte.weight"),
    "chatglm": PaddleFamily("chatglm.", _chatglm_6b, "num_layers", "transformer.word_embeddings.weight"),
    "chatglm_v2": PaddleFamily("chatglm_v2.", _chatglm, "num_hidden_layers", EMBEDDING, tensor_parallel=False),
}


def apply_rules(
    rules: Sequence[TensorRule], ranks: Sequence[Mapping[str, LazyTensor]], layers: int, source: str
) -> dict[str, LazyTensor]:
    """All in Hugging Face's names and order, from ranks with the same names; MalformedInput: wrong keys or shapes."""
    all_rules = unrolled(rules, min(layers, len(ranks[0])))
    used = {name for rule in all_rules for name in rule.sources}
    if missing := [name for rule in all_rules for name in rule.sources if name not in ranks[0]]:
        raise MalformedInput(
            f"`{source}` has {len(missing)} missing keys: {listing(missing)}",
            hint="a file of the checkpoint is missing, or its configuration belongs to another model",
        )
    if unknown := [name for name in ranks[0] if name not in used and not DROPPED.search(name)]:
        raise MalformedInput(
            f"`{source}` has {len(unknown)} unexpected keys: {listing(unknown)}",
            hint="the configuration belongs to another model, or the model has parts that are unsupported",
        )
    return {name: tensor for rule in all_rules for name, tensor in converted(rule, ranks, source).items()}


def unrolled(rules: Sequence[TensorRule], layers: int) -> list[TensorRule]:
    """The rules of the whole model: those of a layer are repeated for each layer number."""
    layered = [index for index, rule in enumerate(rules) if "{}" in rule.sources[0]]
    first, last = layered[0], layered[-1] + 1
    all_rules = list(rules[:first])
    for layer in range(layers):
        for rule in rules[first:last]:
            sources, targets = (tuple(name.format(layer) for name in names) for names in (rule.sources, rule.targets))
            all_rules.append(replace(rule, sources=sources, targets=targets))
    return [*all_rules, *rules[last:]]


def converted(rule: TensorRule, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, LazyTensor]:
    """The target tensors of one rule (with a layer number in its names) by name; MalformedInput for other shapes."""
    outputs = 0 if rule.linear else len(rule.shape) - 1
    parts = [
        [transposed(shard) if rule.linear else shard for shard in _shards(rule, name, ranks, source)]
        for name in rule.sources
    ]
    if rule.pieces:
        found = [
            concat([_piece(rule, shard, k, len(parts[0])) for shard in parts[0]], outputs)
            for k in range(len(rule.pieces))
        ]
    else:
        across = 1 - (rule.split or 0) if rule.linear else (rule.split or 0)
        found = [concat(shards, across) for shards in parts]
    if len(found) != len(rule.targets):
        found = [concat(found, outputs)]
    return dict(zip(rule.targets, found, strict=True))


def _shards(rule: TensorRule, name: str, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> list[LazyTensor]:
    """The parts of all ranks, or the first one's if each has a copy of the whole."""
    parts = [rank[name] for rank in ranks]
    shapes = {part.shape for part in parts}
    if shapes == {rule.shape}:
        return parts[:1]
    size = rule.shape[rule.split] if rule.split is not None else 0
    cut = tuple(size // len(parts) if axis == rule.split else extent for axis, extent in enumerate(rule.shape))
    if shapes != {cut} or size % len(parts) or len({part.dtype for part in parts}) != 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        of_ranks = f" in {len(parts)} files" if len(parts) > 1 else ""
        raise MalformedInput(
            f"shape mismatch for `{name}` of `{source}`: expected {list(rule.shape)}, got {shown}{of_ranks}",
            hint="the configuration belongs to another model, or a rank's file is missing or of another run",
        )
    return parts


def _piece(rule: TensorRule, shard: LazyTensor, which: int, shards: int) -> LazyTensor:
    """Part `which` of every group of a fused tensor; `shard` is one of `shards` parts of the tensor."""
    single = rule.groups == 1
    sizes = [size // shards if single else size for size in rule.pieces]
    start, stride = sum(sizes[:which]), sum(sizes)
    groups = 1 if single else rule.groups // shards
    if rule.linear or len(rule.shape) == 1:
        return pick_rows(shard, stride, start, sizes[which])
    index = np.arange(groups * stride).reshape(groups, stride)[:, start : start + sizes[which]].reshape(-1)
    shape = (shard.shape[0], len(index))
    return LazyTensor(shard.dtype, shape, lambda first, last: np.ascontiguousarray(shard.rows(first, last)[:, index]))
