"""The unchanged inputs: the smallest checkpoints of each format, made by torch."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY, HIDDEN, INNER = 8, 4, 6

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens": (VOCABULARY, HIDDEN),
    **{f"layers.0.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"layers.0.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "layers.0.mlp.down_proj": (HIDDEN, INNER),
    **{f"layers.0.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")},
    "norm": (HIDDEN,),
}


def weights() -> dict[str, torch.Tensor]:
    """A Llama in Hugging Face names."""
    torch.manual_seed(0)
    inner = {f"model.{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    return {**inner, "lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}


def composer(
    state: Mapping[Any, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: Mapping[Any, Any] | None = None,
) -> dict[str, Any]:
    """What a Composer run holds, with `state` and `config` added to its own."""
    model = {"config": {"file_extension": ".json", "content": {**CONFIG, **(config or {})}}, "class": "x"}
    hub = {"model": model, "tokenizer": dict(tokenizer or {})}
    own: dict[Any, Any] = {f"model.{name}": tensor for name, tensor in weights().items()}
    return {"state": {"model": {**own, **(state or {})}, "integrations": {"huggingface": hub}}, "rng": []}


def save(folder: Path, content: Any, name: str = "x.pt") -> Path:
    """`content` as torch saves it."""
    torch.save(content, folder / name)
    return folder / name


def members(content: Any) -> dict[str, bytes]:
    """The members of a torch file, in order, below the folder `x`."""
    stream = io.BytesIO()
    torch.save(content, stream)
    with zipfile.ZipFile(stream) as archive:
        return {"x/" + name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def repacked(folder: Path, parts: Mapping[str, bytes], name: str = "x.pt") -> Path:
    """A zip of stored members."""
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data in parts.items():
            archive.writestr(member, data)
    return folder / name


def with_pickle(folder: Path, change: Callable[[bytes], bytes], content: Any = None) -> Path:
    """A Composer run whose pickle was changed."""
    parts = members(composer() if content is None else content)
    return repacked(folder, {**parts, "x/data.pkl": change(parts["x/data.pkl"])})


META_NAMES = {
    "tok_embeddings": "embed_tokens",
    **{f"layers.0.attention.w{name}": f"layers.0.self_attn.{name}_proj" for name in "qkvo"},
    "layers.0.feed_forward.w1": "layers.0.mlp.gate_proj",
    "layers.0.feed_forward.w2": "layers.0.mlp.down_proj",
    "layers.0.feed_forward.w3": "layers.0.mlp.up_proj",
    "layers.0.attention_norm": "layers.0.input_layernorm",
    "layers.0.ffn_norm": "layers.0.post_attention_layernorm",
    "norm": "norm",
}
PARAMS = {"dim": HIDDEN, "n_layers": 1, "n_heads": 2, "vocab_size": VOCABULARY, "norm_eps": 1e-5, "multiple_of": 2}


def meta(folder: Path, params: Any = None, state: Mapping[Any, Any] | None = None) -> Path:
    """Meta's folder; feed-forward rows are int(8/3 · 4) = 10, so those shapes are its own."""
    shapes = {name: SHAPES[own] for name, own in META_NAMES.items()} | {"output": (VOCABULARY, HIDDEN)}
    shapes |= {f"layers.0.feed_forward.w{n}": (10, HIDDEN) for n in (1, 3)} | {"layers.0.feed_forward.w2": (HIDDEN, 10)}
    tensors: dict[Any, Any] = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save(folder, {**tensors, **(state or {})}, "consolidated.00.pth")
    text = params if isinstance(params, str) else json.dumps({**PARAMS, **(params or {})})
    (folder / "params.json").write_text(text)
    return folder


def paddle(folder: Path, change: Callable[[bytes], bytes] = bytes, config: Any = None) -> Path:
    """PaddleNLP's folder; matrices are (in, out)."""
    arrays = {
        name.replace("model.", "llama.", 1): np.ascontiguousarray(
            tensor.numpy().T if tensor.ndim == 2 and "embed" not in name else tensor.numpy()
        )
        for name, tensor in weights().items()
    }
    (folder / "model_state.pdparams").write_bytes(change(pickle.dumps(arrays, 4)))
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps({**CONFIG, **(config or {})}))
    return folder


def safetensors(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def varint(value: int) -> bytes:
    """A protobuf number."""
    low = bytes([value & 0x7F | (0x80 if value > 0x7F else 0)])
    return low + (varint(value >> 7) if value > 0x7F else b"")


def message(number: int, value: int | bytes) -> bytes:
    """A protobuf field."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


MINDFORMERS_NAMES = {
    **{name: f"model.{name}" for name in META_NAMES if name.startswith("layers")},
    "tok_embeddings": "model.tok_embeddings.embedding",
    "norm": "model.norm_out",
}


def mindspore_value(name: str, array: Any, kind: str = "Float32") -> bytes:
    """One tensor of a `.ckpt`."""
    dims = b"".join(message(1, size) for size in array.shape)
    return message(
        1, message(1, name.encode()) + message(2, dims + message(2, kind.encode()) + message(3, array.tobytes()))
    )


def mindspore(folder: Path, more: bytes = b"", config: str | None = None) -> Path:
    """A MindSpore `.ckpt` of a MindFormers Llama, and the run's YAML."""
    tensors = weights()
    values = b""
    for name, own in META_NAMES.items():
        target = MINDFORMERS_NAMES[name] + (".embedding_weight" if "tok" in name else ".weight")
        values += mindspore_value(
            target.replace("embedding.embedding", "embedding"), tensors[f"model.{own}.weight"].numpy()
        )
    values += mindspore_value("lm_head.weight", tensors["lm_head.weight"].numpy())
    (folder / "x.ckpt").write_bytes(values + more)
    run = "model:\n  arch: {type: LlamaForCausalLM}\n  model_config: {hidden_size: 4, num_layers: 1, num_heads: 2, "
    run += "vocab_size: 8, intermediate_size: 6, rms_norm_eps: 1.0e-5}\n"
    (folder / "run.yaml").write_text(run if config is None else config)
    return folder / "x.ckpt"
