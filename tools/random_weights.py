"""Random weights and onnxruntime settings for the clean runs of the calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmconv.files.safetensors_file import read_header
from llmconv.runtime import SessionSettings

SIZES = (0.5, 1.0, 2.0)
SETTINGS = [SessionSettings(threads, False, level) for level in ("all", "basic", "disable") for threads in (1, 2)]


RARE, LOUD, LOUD_NORM = 1 / 1500, 200, 60
"""Share of weights that are outliers, their factor, and that of one weight of each norm, as in released models."""


def draw_outliers(folder: Path, seed: int) -> None:
    """Shuffles every tensor's values among themselves, and makes a few of them many times as large."""
    rng = np.random.default_rng(seed)
    for tensor in read_header(folder / "model.safetensors").tensors.values():
        values = rng.permutation(tensor.read().ravel())
        if len(tensor.shape) == 2:
            values[rng.random(values.size) < RARE] *= LOUD
        else:
            values[rng.integers(values.size)] *= LOUD_NORM
        with open(tensor.path, "r+b") as file:
            file.seek(tensor.offset)
            file.write(values.tobytes())


def draw_weights(folder: Path, seed: int, size: float) -> None:
    """Shuffles every tensor's values among themselves and scales the matrices; shapes and offsets stay."""
    rng = np.random.default_rng(seed)
    for tensor in read_header(folder / "model.safetensors").tensors.values():
        values = rng.permutation(tensor.read().ravel()) * np.float32(size if len(tensor.shape) == 2 else 1)
        with open(tensor.path, "r+b") as file:
            file.seek(tensor.offset)
            file.write(values.tobytes())
