"""Families that only their own Hugging Face code computes: Baichuan-13B, Baichuan 2 13B, and ChatGLM-6B.

Training systems use their own names; here tensors get those of the published code, which the caller gives with
`--code`. Source of the names: `pytorch_model.bin.index.json` of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmconv.convert.algebra.operations import concat
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.trusted_code import OPTION, TrustedCode, own_fields
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import BY_NAME, Array, LazyTensor

HEAD = "lm_head.weight"
EMBEDDINGS = {"baichuan": "model.embed_tokens.weight", "chatglm": "transformer.word_embeddings.weight"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
"""Fields that Baichuan has under Llama's names."""

Model = tuple[dict[str, LazyTensor], dict[str, Any]]
"""Tensors by the names of the code, and the content of `config.json`."""


def needs_code(code: TrustedCode | None, source: str, what: str, reason: str) -> TrustedCode:
    """The consent with a folder of code, else UnsupportedInput; `reason`: how `what` differs from transformers."""
    if code is None or code.given is None:
        raise UnsupportedInput(
            f"`{source}` is {what}: {reason}",
            hint="only its own code computes it; give a folder with that with `--code FOLDER --trust-remote-code`",
        )
    return code


def baichuan(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], code: TrustedCode, source: str) -> Model:
    """A Llama with ALiBi as Baichuan-13B: queries, keys and values are one matrix, `W_pack`, in this order.

    `tensors` and `config` are Llama's; the head of a Baichuan 2 is not normalized, since its code does that. `code` has
    the code of a `baichuan`. Raises MalformedInput if the heads are grouped, or the code is that of another model.
    """
    if config.get("num_key_value_heads") not in (None, config["num_attention_heads"]):
        raise MalformedInput(
            f"`{source}` has fewer key heads than query heads, which no Baichuan has", hint="give its own configuration"
        )
    packed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        stem, query, part = name.rpartition(".q_proj.")
        if query:
            packed[f"{stem}.W_pack.{part}"] = concat([tensors[f"{stem}.{one}_proj.{part}"] for one in "qkv"], 0)
        elif not name.rpartition(".")[0].endswith((".k_proj", ".v_proj")):
            packed[name] = tensor
    fields = {name: config[name] for name in SIZES}
    fields["model_max_length"] = config.get("max_position_embeddings", 4096)
    return _with_head(packed, "baichuan"), _config(code, "baichuan", fields, source)


def chatglm(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], code: TrustedCode, source: str) -> Model:
    """ChatGLM-6B in its code's names, with stored frequencies, the embedding as head; MalformedInput: another code."""
    named = _with_head(dict(tensors), "chatglm")
    size = config["hidden_size"] // config["num_attention_heads"] // 2
    for layer in range(config["num_layers"]):
        named.setdefault(f"transformer.layers.{layer}.attention.rotary_emb.inv_freq", _frequencies(size))
    return named, _config(code, "chatglm", config, source)


def _with_head(tensors: dict[str, LazyTensor], kind: str) -> dict[str, LazyTensor]:
    return tensors if HEAD in tensors else {**tensors, HEAD: tensors[EMBEDDINGS[kind]]}


def _config(code: TrustedCode, kind: str, fields: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The `config.json` of the code's folder with the sizes of the checkpoint."""
    own = own_fields({}, {"model_type": kind, OPTION: code}, source) or {}
    return {**without_code(code.declared())[0], **fields, "model_type": kind, AUTO_MAP: own[AUTO_MAP]}


def _frequencies(size: int) -> LazyTensor:
    """`[size / 2]`, float16: 10000^(-2i/size), as ChatGLM-6B's `RotaryEmbedding` has them."""

    def load(start: int, stop: int) -> Array:
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        values: Array = (1 / np.float32(10000) ** exponents).astype(np.float16)
        return values[start:stop]

    return LazyTensor(BY_NAME["float16"], (len(range(0, size, 2)),), load)
