"""Meta's and Accessory's checkpoints made of a Hugging Face folder, and what tells whether two are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import from_hf, to_hf
from tests.builders.hf_models import contents, save_model

MATTERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype"),
    *("num_local_experts", "num_experts_per_tok", "sliding_window", "bias", "multi_query", "parallel_attn"),
    *("new_decoder_architecture", "alibi", "layer_norm_epsilon"),
)
"""Fields of a config without which another model would come out."""
SWITCHES = ("attention_bias", "mlp_bias")


def there_and_back(folder: Path, config: dict[str, Any], to: str, shards: int) -> dict[str, Any]:
    """Asserts that every tensor and every field that matters comes back; returns the config that came."""
    model = save_model(folder / "model", config)
    from_hf(model, folder / "out", to=to, shards=shards)
    to_hf(folder / "out", folder / "back")
    back = open_checkpoint(folder / "back")
    assert contents(back) == contents(open_checkpoint(model))
    assert {name: back.config.get(name) for name in MATTERS} == {name: config.get(name) for name in MATTERS}
    assert [bool(back.config.get(name)) for name in SWITCHES] == [bool(config.get(name)) for name in SWITCHES]
    return back.config


def shards_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every shard as torch reads them, buffers left out."""
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))}
    states = {name: content.get("model", content) for name, content in files.items()}
    return {
        name: {key: tensor for key, tensor in state.items() if "rope.freqs" not in key}
        for name, state in states.items()
    }


def assert_same_shards(one: Path, other: Path) -> None:
    left, right = shards_of(one), shards_of(other)
    assert {name: set(state) for name, state in left.items()} == {name: set(state) for name, state in right.items()}
    for name, state in left.items():
        for key, tensor in state.items():
            assert tensor.dtype == right[name][key].dtype and torch.equal(tensor, right[name][key]), (name, key)
