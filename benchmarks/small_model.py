"""A random 135 M Llama in float32 (540 MB), made once, and its graphs by every exporter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exporters import FUSED, GENAI, OPTIMUM, TRANSFORMERS, add_tokenizer, command
from benchmarks.measure import FOLDER, llmconv, remove, run
from llmconv.checkpoint import Checkpoint
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, Array, LazyTensor

KV_HEADS, HEAD_DIM = 3, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 49152,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OURS, GROWING, FOR_ORT = "llmconv", "llmconv `--target ort-cpu`", "llmconv `--cache shared-buffer --target ort-cpu`"
FORMS = {OURS: (), GROWING: ("--target", "ort-cpu"), FOR_ORT: ("--cache", "shared-buffer", "--target", "ort-cpu")}
"""What is measured of llmconv, and the options that make it."""
RIVALS = (OPTIMUM, GENAI, TRANSFORMERS, FUSED)
SHARING = {GENAI, FOR_ORT}
"""Graphs whose present is written into the memory of their past."""


def model() -> Path:
    """The folder of the model."""
    folder = FOLDER / "llama-135m"
    if not folder.exists():
        tensors = {name: _random(name, shape) for name, shape in _shapes().items()}
        write_checkpoint(plan_checkpoint(Checkpoint(folder, "random", tensors, CONFIG)), folder, steps=[], sources=[])
        add_tokenizer(folder)
    return folder


def graphs(role: str, wanted: Sequence[str] = (*FORMS, *RIVALS)) -> dict[str, Path]:
    """The `prefill` or `decode` graph of the `wanted` exporters; they are exported now, unless they are there."""
    folders = {name: FOLDER / "graphs" / f"{at}" for at, name in enumerate([*FORMS, *RIVALS]) if name in wanted}
    for name, folder in folders.items():
        if not (folder / "complete").exists():
            remove(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            ours = llmconv("export", model(), "-o", folder, *FORMS[name]) if name in FORMS else None
            run(ours or command(name, model(), folder))
            (folder / "complete").touch()
    one = {OPTIMUM, GENAI}
    return {name: folder / ("model.onnx" if name in one else f"{role}.onnx") for name, folder in folders.items()}


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layers = range(CONFIG["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), **shapes, "model.norm.weight": (hidden,)}


def _random(name: str, shape: tuple[int, ...]) -> LazyTensor:
    """Other values for every name: optimum-onnx merges equal tensors, and would keep the weights of one layer only."""

    def load(start: int, stop: int) -> Array:
        values = np.random.default_rng([zlib.crc32(name.encode()), start])
        block = values.standard_normal((stop - start, *shape[1:]), dtype=np.float32)
        return block * np.float32(0.02) + np.float32(len(shape) == 1)

    return LazyTensor(BY_NAME["float32"], shape, load)
