"""Twins: the same graphs on changed weights, so that constants show which the real weights leave in the noise.

A tiny or young model has small attention scores, so a missing softcap changes nothing that rounding would not; one with
large activations hides a wrong epsilon. Graphs map their weights from safetensors files, so the same graph runs on a
scaled copy of those files, beside an eager model that is loaded from the same copy. Factors are powers of two: exact.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from llmconv.checkpoint import INDEX, open_weights
from llmconv.runtime.guard import external_fields
from llmconv.safetensors_io import FileTensor

SIZE_LIMITS = {"quick": 64 << 20, "full": 2 << 30}
"""Bytes of weights up to which twins are made."""


@dataclass(frozen=True)
class Change:
    """Which weights a twin scales, and by how much.

    Attributes:
        name: as printed after the scenario's name.
        pattern: matrices whose name matches are scaled.
        factor: a power of two.
        bug: what it shows.
    """

    name: str
    pattern: str
    factor: float
    bug: str


CHANGES = (
    Change(
        "louder weights",
        r"q_proj|k_proj|c_attn|query_key_value|qkv|gate_proj|up_proj|c_fc|fc1|fc_in|dense_h_to_4h",
        4.0,
        "softcap dropped, activation in another form",
    ),
    Change("fainter weights", "", 1 / 32, "a norm's epsilon of another value or in another place"),
)
SCENARIOS = ("prefill, 7 tokens", "batch of 3")
"""What is run on twins."""


def why_no_twin(folder: Path, reference: Path, models: Iterable[onnx.ModelProto], suite: str) -> str:
    """Why a folder can have no twin; empty when it can."""
    weights = sum(path.stat().st_size for path in reference.glob("*.safetensors"))
    if weights > SIZE_LIMITS[suite]:
        return f"{weights >> 20} MiB of weights are too many for the suite `{suite}`"
    if not any(folder.glob("*.safetensors")):
        return "the graphs map no safetensors file"
    matrices = [tensor for model in models for tensor in model.graph.initializer if len(tensor.dims) == 2]
    large = [tensor for tensor in matrices if min(tensor.dims) > 1]
    if any(not external_fields(tensor).get("location", "").endswith(".safetensors") for tensor in large):
        return "a graph holds weights of its own"
    return ""


@contextmanager
def scaled_copy(folder: Path, graphs: Iterable[Path], change: Change) -> Iterator[Path]:
    """A temporary copy of a folder's config, weights (scaled) and graphs."""
    with TemporaryDirectory(prefix="llmconv-twin-") as name:
        copy = Path(name)
        small = [folder / "config.json", folder / INDEX]
        for path in [*small, *folder.glob("*.safetensors"), *graphs]:
            if path.is_file():
                shutil.copyfile(path, copy / path.name)
        for tensor_name, tensor in open_weights(copy).items():
            if isinstance(tensor, FileTensor) and len(tensor.shape) == 2 and re.search(change.pattern, tensor_name):
                _scale(tensor, change.factor)
        yield copy


def _scale(tensor: FileTensor, factor: float) -> None:
    values = tensor.read()
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset)
        file.write(np.ascontiguousarray(values * values.dtype.type(factor)).tobytes())
