"""Tiny models in bfloat16 whose matrices fit the blocks of every scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)
    return save(tmp_path_factory.mktemp("compressed") / "llama", config)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    return save(
        tmp_path_factory.mktemp("compressed") / "qwen3_moe", Qwen3MoeConfig(**SIZES, **more, tie_word_embeddings=True)
    )
