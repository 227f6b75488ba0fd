"""Deeper tiny models, so that layers are really replicated, and a plain way to run a graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmconv.export import export
from tests.builders.tracing import trace_once
from tests.conftest import CONFIGS, save_tiny

trace_once()

Arrays = dict[str, NDArray[Any]]

DEPTH = 8
"""More than three periods for every family."""


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`deep(model_type)` is the folder of a model of `DEPTH` layers with its three graphs; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            path = save_tiny(model_type, tmp_path_factory.mktemp("deep") / model_type, num_hidden_layers=DEPTH)
            export(path, prefill=True, incremental=True, unified=True)
            folders[model_type] = path
        return folders[model_type]

    return folder


@pytest.fixture
def exported(deep: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the deep Llama with its graphs, to write into."""
    return Path(shutil.copytree(deep("llama"), tmp_path / "exported"))


@pytest.fixture
def llama(deep: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the deep Llama without graphs, to write into."""
    ignored = shutil.ignore_patterns("*.onnx", "llmconv.json")
    return Path(shutil.copytree(deep("llama"), tmp_path / "llama", ignore=ignored))


FAMILIES = sorted(CONFIGS)


def tokens(batch: int, length: int, left_padding: int = 0) -> Arrays:
    """Inputs for a whole prompt; the last row is padded on the left."""
    mask = np.ones((batch, length), dtype=np.int64)
    mask[-1, :left_padding] = 0
    ids = np.random.default_rng(0).integers(3, 96, (batch, length))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clip(0)}


def run_graph(path: Path, inputs: Arrays, past: Arrays | None = None) -> Arrays:
    """Outputs by name; the past is empty when none is given."""
    import onnxruntime  # noqa: PLC0415 - slow to import

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {}
    for port in session.get_inputs():
        if port.name.startswith("past_key_values"):
            shape = (len(inputs["input_ids"]), port.shape[1], 0, port.shape[3])
            feeds[port.name] = past[port.name] if past else np.zeros(shape, np.float32)
        else:
            feeds[port.name] = inputs[port.name]
    return dict(zip([port.name for port in session.get_outputs()], session.run(None, feeds), strict=True))


def as_past(outputs: Arrays) -> Arrays:
    """The cache of one run as the past of the next."""
    return {name.replace("present", "past_key_values"): value for name, value in outputs.items() if name != "logits"}


def eager_logits(folder: Path, inputs: Arrays) -> NDArray[Any]:
    """Logits of the eager model over a whole prompt, without cache."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    names = ["input_ids", "attention_mask"] + ([] if model.config.model_type == "bloom" else ["position_ids"])
    with torch.no_grad():
        logits: NDArray[Any] = model(**{name: torch.from_numpy(inputs[name]) for name in names}).logits.numpy()
    return logits
