"""An 8 B Llama of random bits, or a narrower one of as many layers, and LoRA adapters for all or some of its layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.measure import remove
from llmconv.checkpoint import Checkpoint
from llmconv.files.safetensors_file import encode_header
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, Array, LazyTensor

LAYERS, HEADS, KV_HEADS, RANK = 32, 32, 8, 16
MIDDLE = (15, 16)
"""The layers of an adapter that leaves the others alone."""


@dataclass(frozen=True)
class LargeModel:
    """Llama 3 8B with all widths divided.

    Attributes:
        folder: where model and adapters lie.
        divisor: of the widths; 1 for 16 GB of bfloat16, 2 for 4 GB, 4 for 1 GB.
    """

    folder: Path
    divisor: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor."""
        hidden, intermediate, vocabulary = (width // self.divisor for width in (4096, 14336, 128256))
        kv = hidden // HEADS * KV_HEADS
        linear = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            result[prefix + "input_layernorm.weight"] = (hidden,)
            result[prefix + "post_attention_layernorm.weight"] = (hidden,)
            result |= {f"{prefix}{module}.weight": shape for module, shape in linear.items()}
        return result | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}

    def config(self) -> dict[str, object]:
        """Its `config.json`."""
        hidden, intermediate, vocabulary = (width // self.divisor for width in (4096, 14336, 128256))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "tie_word_embeddings": False,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "vocab_size": vocabulary,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
        }

    @property
    def base(self) -> Path:
        """The folder of the model, in shards of 5 GB, or as many smaller ones."""
        return self.folder / f"llama-8b-{self.divisor}"

    def adapter(self, layers: tuple[int, ...] = ()) -> Path:
        """The folder of a rank-16 adapter, float32, on all linear modules of some layers, or of all."""
        return self.folder / f"adapter-8b-{self.divisor}{'-few' if layers else ''}"

    def make(self) -> None:
        """Makes what is not there; in a process of its own, whose memory does not count as that of the next child."""
        code = "import sys; from benchmarks.large_model import make; make(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", code, str(self.folder), str(self.divisor)], check=True)

    def remove(self) -> None:
        """Removes the model and its adapters."""
        for path in (self.base, self.adapter(), self.adapter(MIDDLE)):
            remove(path)

    def forget(self) -> None:
        """Drops the model from the page cache, where otherwise some part of 16 GB is that a run before has left."""
        for path in sorted(self.base.glob("*.safetensors")):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make(folder: str, divisor: str) -> None:
    """Model and adapters, as far as they are not there."""
    model = LargeModel(Path(folder), int(divisor))
    if not model.base.exists():
        tensors = {name: _random(name, shape) for name, shape in model.shapes().items()}
        config = model.config()
        plan = plan_checkpoint(Checkpoint(model.base, "random", tensors, config), 5 * 10**9 // model.divisor**2)
        write_checkpoint(plan, model.base, steps=[], sources=[])
    for layers in ((), MIDDLE):
        if not (model.adapter(layers) / "adapter_config.json").exists():
            _make_adapter(model, layers)


def _make_adapter(model: LargeModel, layers: tuple[int, ...]) -> None:
    folder = model.adapter(layers)
    folder.mkdir(parents=True, exist_ok=True)
    linear = {name: shape for name, shape in model.shapes().items() if name.endswith("proj.weight")}
    wanted = {name: shape for name, shape in linear.items() if not layers or int(name.split(".")[2]) in layers}
    _write_adapter(folder / "adapter_model.safetensors", wanted)
    modules = sorted({name.split(".")[-2] for name in wanted})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": modules, "task_type": "CAUSAL_LM"}
    more = {"layers_to_transform": list(layers)} if layers else {}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))


def _random(name: str, shape: tuple[int, ...]) -> LazyTensor:
    """Random signs and mantissas, and sizes from 2⁻⁷ to 2⁻³."""

    def load(start: int, stop: int) -> Array:
        generator = np.random.Generator(np.random.SFC64([zlib.crc32(name.encode()), start]))
        rows = (stop - start, *shape[1:])
        bits: Array = np.frombuffer(generator.bytes(2 * prod(rows)), np.uint16) & np.uint16(0x81FF) | np.uint16(0x3C00)
        rows_of_bits: Array = bits.view(ml_dtypes.bfloat16).reshape(rows)
        return rows_of_bits

    return LazyTensor(BY_NAME["bfloat16"], shape, load)


def _write_adapter(path: Path, weights: dict[str, tuple[int, ...]]) -> None:
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in weights.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{prefix}.lora_A.weight": (RANK, columns), f"{prefix}.lora_B.weight": (rows, RANK)}
    generator = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(encode_header({name: (BY_NAME["float32"], shape) for name, shape in tensors.items()}))
        for shape in tensors.values():
            file.write((generator.standard_normal(shape, dtype=np.float32) * 0.05).tobytes())
