"""GGUF files of a llama-type Hugging Face folder. Runs in the environment `llama.cpp`, which does not have llmconv."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from pathlib import Path
from typing import Any

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's name of a module, without its layer, to llama.cpp's (its `convert_hf_to_gguf.py`)."""


def write(model: str, output: str) -> None:
    """Writes the float32 weights as they are.

    There is no vocabulary in the file, since only tokens are passed.

    Args:
        model: folder of `LlamaForCausalLM` with one float32 safetensors file, and rotary embeddings without scaling.
        output: the GGUF file.
    """
    config = json.loads((Path(model) / "config.json").read_text())
    writer = importlib.import_module("gguf").GGUFWriter(output, "llama")
    _add_sizes(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    safe_open = importlib.import_module("safetensors").safe_open
    with safe_open(str(Path(model) / "model.safetensors"), framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            values = file.get_tensor(name)
            found = heads.get(name.split(".")[-2])
            writer.add_tensor(gguf_name(name), permuted(values, found) if found else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.weight" if layer else f"{NAMES[name.removesuffix('.weight')]}.weight"


def permuted(values: Any, heads: int) -> Any:
    """Rows of q or k in llama.cpp's order: the two halves of each head interleaved.

    Args:
        values: `[heads * head_dim, hidden]`.
        heads: of q, or of k.
    """
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def quantize(source: str, output: str, file_type: str, importance: str = "") -> None:
    """Writes another GGUF file of a type such as `Q4_0` or `Q4_K_M`, with llama.cpp's own choice for each tensor.

    Args:
        source: a GGUF file of floats.
        output: the file to write.
        file_type: llama.cpp's name.
        importance: a `.npz` file of float32 weights of columns, by the names of tensors, if any.

    Raises:
        RuntimeError: llama.cpp refused.
    """
    library = importlib.import_module("llama_cpp")
    settings = library.llama_model_quantize_default_params()
    settings.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    settings.nthread = 2
    if importance:
        arrays = dict(importlib.import_module("numpy").load(importance))
        pointers = [one.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for one in arrays.values()]
        entries = [
            (name.encode(), pointer, one.size) for (name, one), pointer in zip(arrays.items(), pointers, strict=True)
        ]
        kind = library.llama_model_imatrix_data
        settings.imatrix = (kind * (len(entries) + 1))(*(kind(*one) for one in entries))  # an empty one ends the list
    if library.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp made no {file_type} of {source}")


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
