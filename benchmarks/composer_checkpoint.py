"""A Composer `.pt` of the benchmark model with Adam state, written by `torch.save`; the moments are holes."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import CONFIG, shapes
from llmconv.checkpoint import open_weights
from llmconv.convert.opening import open_training
from llmconv.files.safetensors_file import FileTensor

EXAMPLE = Path("examples/tiny-llama/ep4-ba2400-rank0.pt")


class HoleyFile(io.FileIO):
    """A file in which long runs of zeros take no space on disk."""

    def write(self, data: Any, /) -> int:
        """Writes `data`, or skips over it where it is long and all zero."""
        block = memoryview(data).cast("B")
        if len(block) > 1 << 20 and not np.frombuffer(block, np.uint8).any():
            self.seek(len(block), io.SEEK_CUR)
            return len(block)
        done = 0
        while done < len(block):
            done += super().write(block[done:])
        return done


def save(model: Path, path: Path) -> None:
    """Saves the folder `model` as a checkpoint of a training run: bfloat16 weights, two float32 moments each.

    Nothing is held: the weights are mapped, and the zeros are never touched.
    """
    weights = OrderedDict((f"model.{name}", _mapped(tensor)) for name, tensor in open_weights(model).items())
    moments = {f"model.{name}": _moments(shape) for name, shape in shapes().items()}
    groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": list(moments)}]
    config = {"file_extension": ".json", "content": CONFIG}
    state = {
        "model": weights,
        "optimizers": {"DecoupledAdamW": {"state": moments, "param_groups": groups}},
        "integrations": {"huggingface": {"model": {"config": config}, "tokenizer": _tokenizer()}},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 2}},
    }
    with HoleyFile(path, "w") as file:
        torch.save({"state": state, "rng": []}, file)
        file.truncate(file.tell())


def _tokenizer() -> dict[str, Any]:
    """That of the example, as Composer embeds one: LLM Foundry's converter fails without."""
    files = {name: data for name, data in open_training(EXAMPLE).side_files.items() if name.endswith(".json")}
    return {name: {"file_extension": ".json", "content": json.loads(data)} for name, data in files.items()}


def _mapped(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, FileTensor)
    bits = np.memmap(tensor.path, np.int16, "c", tensor.offset, tensor.shape)
    return torch.from_numpy(bits).view(torch.bfloat16)


def _moments(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    zeros = {
        name: torch.from_numpy(np.zeros(prod(shape), np.float32)).view(shape) for name in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.tensor(2.0), **zeros}
