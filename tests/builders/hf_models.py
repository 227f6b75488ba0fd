"""Hugging Face folders made here, of any size: seeded weights under the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Contents = dict[str, tuple[str, tuple[int, ...], bytes]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_kv_heads": 8,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
    "vocab_size": 24,
    "max_position_embeddings": 128,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of a model, from its config."""
    hidden, words = config["hidden_size"], config["vocab_size"]
    is_falcon = config["model_type"] == "falcon"
    embedding, block = ("transformer.word_embeddings", "transformer.h") if is_falcon else ("model.embed_tokens",) * 2
    yield f"{embedding}.weight", (words, hidden)
    for number in range(config["num_hidden_layers"]):
        if is_falcon:
            yield from _falcon_block(f"{block}.{number}.", config)
        else:
            yield from _block(f"model.layers.{number}.", config)
    if is_falcon:
        yield from (("transformer.ln_f.weight", (hidden,)), ("transformer.ln_f.bias", (hidden,)))
    else:
        yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (words, hidden)


def _block(prefix: str, config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[name] * size for name in ("num_attention_heads", "num_key_value_heads"))
    for name, rows in {"q": queries, "k": keys, "v": keys}.items():
        biased = config.get("attention_bias") or config["model_type"] == "qwen2"
        yield from _linear(f"{prefix}self_attn.{name}_proj", rows, hidden, biased=biased)
    yield from _linear(f"{prefix}self_attn.o_proj", hidden, queries, biased=config.get("attention_bias"))
    if "num_local_experts" in config:
        yield from _linear(f"{prefix}block_sparse_moe.gate", config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            for name, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
                yield from _linear(f"{prefix}block_sparse_moe.experts.{expert}.{name}", *shape)
    else:
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield from _linear(f"{prefix}mlp.{name}_proj", *shape, biased=config.get("mlp_bias"))
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)


def _falcon_block(prefix: str, config: Mapping[str, Any]) -> Shapes:
    hidden, biased = config["hidden_size"], config["bias"]
    kv_heads = 1 if config["multi_query"] else config["num_attention_heads"]
    fused = hidden + 2 * kv_heads * hidden // config["num_attention_heads"]
    yield from _linear(f"{prefix}self_attention.query_key_value", fused, hidden, biased=biased)
    yield from _linear(f"{prefix}self_attention.dense", hidden, hidden, biased=biased)
    yield from _linear(f"{prefix}mlp.dense_h_to_4h", 4 * hidden, hidden, biased=biased)
    yield from _linear(f"{prefix}mlp.dense_4h_to_h", hidden, 4 * hidden, biased=biased)
    for kind in ("weight", "bias"):
        yield f"{prefix}input_layernorm.{kind}", (hidden,)
        if not config["parallel_attn"]:
            yield f"{prefix}post_attention_layernorm.{kind}", (hidden,)


def _linear(name: str, rows: int, columns: int, *, biased: Any = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def save_model(folder: Path, config: Mapping[str, Any], side_files: Mapping[str, bytes] | None = None) -> Path:
    """A Hugging Face folder with seeded weights."""
    dtype, random = BY_NAME[config["torch_dtype"]], np.random.default_rng(0)
    tensors: dict[str, LazyTensor] = {
        name: in_memory(random.standard_normal(shape).astype(dtype.numpy), dtype) for name, shape in shapes_of(config)
    }
    checkpoint = Checkpoint(folder, "hf", tensors, dict(config), side_files or {})
    write_checkpoint(plan_checkpoint(checkpoint), folder, steps=[], sources=[])
    return folder


def contents(tensors: Mapping[str, LazyTensor]) -> Contents:
    """Every bit of every tensor."""
    return {name: (tensor.dtype.name, tensor.shape, tensor.read().tobytes()) for name, tensor in tensors.items()}


SMALLEST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 2,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
"""A whole llama of one layer whose query projection is 6×4, with a bias."""


def smallest_shapes() -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of `SMALLEST`."""
    attention: dict[str, tuple[int, ...]] = {"q_proj": (6, 4), "k_proj": (2, 4), "v_proj": (2, 4), "o_proj": (4, 6)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    layer |= {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    layer |= {"mlp.gate_proj.weight": (2, 4), "mlp.up_proj.weight": (2, 4), "mlp.down_proj.weight": (4, 2)}
    layer |= {"input_layernorm.weight": (4,), "post_attention_layernorm.weight": (4,)}
    inner: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (2, 4), **inner, "model.norm.weight": (4,)}
