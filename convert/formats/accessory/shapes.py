"""Checks the shapes of a LLaMA2-Accessory model's tensors in Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.formats.accessory.config import AccessoryParams
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor


def check_shapes(
    tensors: Mapping[str, LazyTensor], params: AccessoryParams, settings: Mapping[str, Any], source: str
) -> None:
    """Compares the shape of every tensor with the one that transformers expects.

    Args:
        tensors: Hugging Face name to tensor.
        params: the sizes of the model.
        settings: the content of `config.json`.
        source: folder name for error messages.

    Raises:
        MalformedInput: lists the tensors of another shape.
    """
    dim, hidden, kv = params.dim, params.intermediate, params.kv_heads * params.head_dim
    fused = dim + 2 * settings.get("num_kv_heads", 0) * params.head_dim
    rows = {"k_proj": kv, "v_proj": kv, "query_key_value": fused, "gate": params.experts}
    rows |= dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "dense_h_to_4h"), hidden)
    rows |= dict.fromkeys(("lm_head", "embed_tokens", "word_embeddings"), settings["vocab_size"])
    columns = dict.fromkeys(("down_proj", "w2", "dense_4h_to_h"), hidden)
    wrong = []
    for name, tensor in tensors.items():
        layer = name.split(".")[-2]
        expected = (rows.get(layer, dim), columns.get(layer, dim))
        is_vector = name.endswith(".bias") or "norm" in layer or layer.startswith("ln_")
        if tensor.shape != (expected[:1] if is_vector else expected):
            wrong.append(f"{name} {list(tensor.shape)}")
    if wrong:
        raise MalformedInput(
            f"shape mismatch with the configuration for {len(wrong)} tensors of `{source}`: {listing(wrong)}",
            hint="the configuration belongs to another model, or a shard is missing",
        )
