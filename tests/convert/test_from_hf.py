"""from-hf: a Hugging Face folder becomes a training checkpoint, and `to-hf` makes the same folder of it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert.from_hf import from_hf
from llmconv.convert.to_hf import open_training, to_hf
from llmconv.errors import InputRefused, UsageProblem
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from llmconv.writer import plan_checkpoint, write_checkpoint

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
MATTERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype"),
)


def shapes_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a llama, from its config."""
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (words, hidden)
    for layer in (f"model.layers.{number}." for number in range(config["num_hidden_layers"])):
        for name, shape in {
            "q": (hidden, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden,) * 2,
        }.items():
            yield f"{layer}self_attn.{name}_proj.weight", shape
            if config.get("attention_bias"):
                yield f"{layer}self_attn.{name}_proj.bias", shape[:1]
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            yield f"{layer}mlp.{name}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{layer}mlp.{name}_proj.bias", shape[:1]
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (words, hidden)


def save_model(folder: Path, side_files: dict[str, bytes] | None = None, **changes: Any) -> Path:
    """A Hugging Face folder with seeded weights."""
    config = {**LLAMA, **changes}
    dtype, random = BY_NAME[config["torch_dtype"]], np.random.default_rng(0)
    tensors: dict[str, LazyTensor] = {
        name: in_memory(random.standard_normal(shape).astype(dtype.numpy), dtype) for name, shape in shapes_of(config)
    }
    checkpoint = Checkpoint(folder, "hf", tensors, config, side_files or {})
    write_checkpoint(plan_checkpoint(checkpoint), folder, steps=[], sources=[])
    return folder


def contents(tensors: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every bit of every tensor."""
    return {name: (tensor.dtype.name, tensor.shape, tensor.read().tobytes()) for name, tensor in tensors.items()}


CONFIGS = st.fixed_dictionaries(
    {
        "num_attention_heads": st.just(8),
        "num_key_value_heads": st.sampled_from([1, 2, 4, 8]),
        "hidden_size": st.sampled_from([16, 32, 48]),
        "intermediate_size": st.sampled_from([8, 40, 56, 344]),
        "num_hidden_layers": st.integers(1, 3),
        "vocab_size": st.sampled_from([8, 24, 64]),
        "tie_word_embeddings": st.booleans(),
        "torch_dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
        "rope_theta": st.sampled_from([10000.0, 500000.0, 1e6]),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
    }
)


@settings(max_examples=30, deadline=None)
@given(config=CONFIGS, shards=st.sampled_from([1, 2, 4, 8]))
def test_meta_and_back_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("meta")
    model = save_model(folder / "model", **config)
    from_hf(model, folder / "out", to="meta", shards=shards)
    assert len(list((folder / "out").glob("consolidated.*.pth"))) == shards
    to_hf(folder / "out", folder / "back")
    back = open_checkpoint(folder / "back")
    assert contents(back) == contents(open_checkpoint(model))
    assert {name: back.config.get(name) for name in MATTERS} == {
        name: {**LLAMA, **config}.get(name) for name in MATTERS
    }
