"""The inputs of the benchmarks: a random 1.1 B bfloat16 Llama and a LoRA adapter for it, made once, by row blocks."""

from __future__ import annotations

import json
import zlib
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.measure import FOLDER
from llmconv.checkpoint import Checkpoint
from llmconv.files.safetensors_file import encode_header
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 22, 2048, 5632, 32000, 32, 4
KV = HIDDEN // HEADS * KV_HEADS
RANK = 16

LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""The linear modules of a layer, with the shape out×in of their weights."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of the model."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        result[prefix + "input_layernorm.weight"] = (HIDDEN,)
        result[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        result |= {f"{prefix}{module}.weight": shape for module, shape in LINEAR.items()}
    return result | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def base(dtype: str = "bfloat16") -> Path:
    """The folder of the model, created on first use (2.2 GB; 4.4 GB in float32)."""
    folder = FOLDER / ("base" if dtype == "bfloat16" else f"base-{dtype}")
    if not folder.exists():
        tensors = {name: cast(_random(name, shape), BY_NAME[dtype]) for name, shape in shapes().items()}
        plan = plan_checkpoint(Checkpoint(folder, "random", tensors, CONFIG | {"dtype": dtype}))
        write_checkpoint(plan, folder, steps=[], sources=[])
    return folder


def _random(name: str, shape: tuple[int, ...]) -> LazyTensor:
    def load(start: int, stop: int) -> Array:
        generator = np.random.default_rng([zlib.crc32(name.encode()), start])
        values = generator.standard_normal((stop - start, *shape[1:]), dtype=np.float32)
        values *= 0.02
        return values.astype(ml_dtypes.bfloat16)

    return LazyTensor(BY_NAME["bfloat16"], shape, load)


def adapter(rank: int = RANK) -> Path:
    """The folder of a LoRA adapter on all linear modules, float32, created on first use (50 MB of rank 16).

    Its change is about a twentieth of the weights, as training leaves it: much of it lies below their last bit.
    """
    folder = FOLDER / ("adapter" if rank == RANK else f"adapter-{rank}")
    if not (folder / "adapter_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in ((n, s) for n, s in shapes().items() if n.endswith("proj.weight")):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{prefix}.lora_A.weight": (rank, columns), f"{prefix}.lora_B.weight": (rows, rank)}
        generator = np.random.default_rng(0)
        with open(folder / "adapter_model.safetensors", "wb") as file:
            file.write(encode_header({name: (BY_NAME["float32"], shape) for name, shape in tensors.items()}))
            for shape in tensors.values():
                file.write((0.01 * generator.standard_normal(prod(shape), dtype=np.float32)).tobytes())
        modules = sorted({name.split(".")[-3] for name in tensors})
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": modules,
            "task_type": "CAUSAL_LM",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
