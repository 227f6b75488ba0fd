"""The shapes that the tensors of a LLaMA2-Accessory model have under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.convert.algebra.operations import listing
from llmconv.convert.formats.accessory.config import AccessoryParams
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor


def check_shapes(
    tensors: Mapping[str, LazyTensor], params: AccessoryParams, settings: Mapping[str, Any], source: str
) -> None:
    """Every matrix has the shape that transformers expects.

    Args:
        tensors: by Hugging Face name.
        params: the sizes of the model.
        settings: the content of `config.json`.
        source: folder name for error messages.

    Raises:
        MalformedInput: lists those that have not.
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
            f"`{source}` has {len(wrong)} tensors of another shape than its configuration declares: {listing(wrong)}",
            hint="the configuration belongs to another model, or a shard is missing",
        )
