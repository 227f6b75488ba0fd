"""Llamas of any size whose weights are holes in files, except for the layers and matrices that are filled."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmconv.files.safetensors_file import encode_header
from llmconv.tensors import BY_NAME

OUTER = "outside the layers"
PATTERN = 1 << 22
"""Numbers that are made; larger tensors repeat them."""


@dataclass(frozen=True)
class SparseLlama:
    """A Llama by its sizes, in bfloat16 or float32.

    Attributes:
        folder: where it lies, one file per layer and one for the rest.
        layers, hidden, intermediate, heads, kv_heads, vocabulary: its sizes.
        dtype: of the weights.
    """

    folder: Path
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str = "bfloat16"

    def make(self, filled: Collection[int | str]) -> None:
        """Writes the model if it is not there.

        Args:
            filled: numbers of the layers that contain random numbers, and `OUTER` for the other weights.
        """
        if (self.folder / "config.json").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, str] = {}
        for part in [OUTER, *range(self.layers)]:
            shapes = self._outer() if part == OUTER else self._layer(int(part))
            name = "outer.safetensors" if part == OUTER else f"layer-{part}.safetensors"
            self._write(self.folder / name, shapes, filled=part in filled)
            files |= dict.fromkeys(shapes, name)
        index = {"metadata": {}, "weight_map": files}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.folder / "config.json").write_text(json.dumps(self._config()))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        tensors = [self._outer(), *([self._layer(0)] * self.layers)]
        return sum(prod(shape) for shapes in tensors for shape in shapes.values())

    def _layer(self, number: int) -> dict[str, tuple[int, ...]]:
        kv = self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}

    def _outer(self) -> dict[str, tuple[int, ...]]:
        table = (self.vocabulary, self.hidden)
        return {"model.embed_tokens.weight": table, "model.norm.weight": (self.hidden,), "lm_head.weight": table}

    def _write(self, path: Path, shapes: Mapping[str, tuple[int, ...]], *, filled: bool) -> None:
        size = 2 if self.dtype == "bfloat16" else 4
        with open(path, "wb") as file:
            file.write(encode_header({name: (BY_NAME[self.dtype], shape) for name, shape in shapes.items()}))
            for name, shape in shapes.items():
                if filled or len(shape) == 1:
                    self._fill(file, name, prod(shape))
                else:
                    file.seek(prod(shape) * size, os.SEEK_CUR)
            file.truncate()

    def _fill(self, file: BinaryIO, name: str, count: int) -> None:
        """Normal numbers of the size of trained weights; those of norms are around one."""
        generator = np.random.default_rng(len(name) * 7919 + count)
        numbers = generator.standard_normal(min(count, PATTERN), dtype=np.float32)
        numbers = 1 + 0.05 * numbers if "norm" in name else numbers * np.float32(0.02)
        pattern = numbers.astype(BY_NAME[self.dtype].numpy).tobytes()
        for start in range(0, count, PATTERN):
            left = min(PATTERN, count - start)
            file.write(pattern[: left * len(pattern) // len(numbers)])

    def _config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }
