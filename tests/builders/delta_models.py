"""Small models and their deltas: folders of given tensors, and what tells whether two are one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.convert import apply_delta, extract_delta
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME, in_memory
from tests.builders.tiny_models import contents

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
Arrays = Mapping[str, tuple[str, Any]]


def save(folder: Path, arrays: Arrays, files: Mapping[str, bytes] | None = None, **config: Any) -> Path:
    """A model folder with tensors of given element types."""
    tensors = {name: in_memory(array, BY_NAME[dtype]) for name, (dtype, array) in arrays.items()}
    checkpoint = Checkpoint(folder, "hf", tensors, {**CONFIG, **config}, files or {})
    write_checkpoint(plan_checkpoint(checkpoint), folder, steps=[], sources=[])
    return folder


def weights(rows: int = 6, seed: int = 0, step: float = 0.0) -> dict[str, tuple[str, Any]]:
    """A model of three tensors, moved by `step` times noise."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    shapes = {"model.embed_tokens.weight": (rows, 4), "model.norm.weight": (4,), "lm_head.weight": (rows, 4)}
    arrays = {name: rng.standard_normal(shape) + step * noise.standard_normal(shape) for name, shape in shapes.items()}
    return {name: ("float32", array.astype(np.float32)) for name, array in arrays.items()}


def save_pair(folder: Path) -> tuple[Path, Path]:
    """A base and what was tuned from it."""
    return save(folder / "base", weights()), save(folder / "tuned", weights(step=1e-4))


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same model: tensors, their order, config and side files."""
    left, right = open_checkpoint(one), open_checkpoint(other)
    told = [(list(side), contents(side), side.config, dict(side.side_files)) for side in (left, right)]
    return told[0] == told[1]


def there_and_back(base: Path, tuned: Path, folder: Path, **options: Any) -> Path:
    """What the delta of the two makes of the base."""
    extract_delta(base, tuned, folder / "delta", **options)
    apply_delta(base, folder / "delta", folder / "back")
    return folder / "back"


def frames(folder: Path) -> Path:
    """The file of a delta that has one."""
    return folder / "delta.zst"


def reindex(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of the first tensor's entry."""

    def damage(folder: Path) -> None:
        content = frames(folder).read_bytes()
        size = int.from_bytes(content[-16:-8], "little")
        index = json.loads(content[-16 - size : -16])
        next(iter(index["tensors"].values())).update(changes)
        write_index(folder, content[: -24 - size], json.dumps(index).encode())

    return damage


def write_index(folder: Path, before: bytes, text: bytes) -> None:
    """Writes frames and an index, whatever they are."""
    tail = len(text).to_bytes(8, "little") + b"LLMDELTA"
    head = (0x184D2A5E).to_bytes(4, "little") + (len(text) + 16).to_bytes(4, "little")
    frames(folder).write_bytes(before + head + text + tail)


def retell(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of `delta.json`."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "delta.json").read_text()) | changes
        (folder / "delta.json").write_text(json.dumps(content))

    return damage


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖one − other‖ / ‖other‖."""
    return float((one - other).norm() / other.norm())
