"""Meta's tensor names to Hugging Face's, and the axis along which ranks split each (LLaMA2-Accessory has the same).

Source: meta-llama/llama `model.py` with fairscale's parallel layers; Accessory `util/tensor_parallel.py`,
`model/peft.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FREQUENCIES: dict[str, str | None] = {
    "rope.freqs": None,
    "layers.{}.attention.inner_attention.rope.freqs": None,
}
"""Buffers that models compute."""

LLAMA: dict[str, str | None] = FREQUENCIES | {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""To Hugging Face's names, in the order in which a loader needs them."""

COLUMN = {"wq", "wk", "wv", "w1", "w3", "output", "dense_h_to_4h"}
ROW = {"wo", "w2", "dense", "dense_4h_to_h"}
EMBEDDING = {"tok_embeddings", "word_embeddings"}
SUFFIX = re.compile(r"\.(weight|bias|lora_a\.weight|lora_b\.weight)$")


def split_dim(name: str, repeated: Iterable[str] = ()) -> int | None:
    """The dimension along which ranks split a tensor; None if every shard holds a copy, of which shard 0's is used.

    Args:
        name: Meta's or Accessory's name of the tensor.
        repeated: last words of layers that every shard holds whole, in addition to the usual ones.
    """
    suffix = SUFFIX.search(name)
    block, _, layer = name[: suffix.start()].rpartition(".") if suffix else ("", "", "")
    if not suffix or layer in repeated or (block and not block.startswith("layers.")):
        return None
    if layer in COLUMN:
        return None if suffix[1] == "lora_a.weight" else 0
    if layer in ROW:
        return 1 if suffix[1] in ("weight", "lora_a.weight") else None
    return 1 if layer in EMBEDDING else None
