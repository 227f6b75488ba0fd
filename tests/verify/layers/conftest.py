"""Models with one graph each, made once, and the parts of their graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.verify.audit.weights import WeightSource
from llmconv.verify.layers.induction import Induction, LayerChoice
from llmconv.verify.reference.eager import ComputedModel
from tests.builders.layered_models import load, save_layered

Layered = Callable[[str], Path]


@pytest.fixture(scope="session")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Layered:
    """`layered(model_type)` is a folder of a tiny model and `model.onnx`; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_layered(model_type, tmp_path_factory.mktemp("layered") / model_type)
        return folders[model_type]

    return folder


@pytest.fixture
def copied(layered: Layered, tmp_path: Path) -> Layered:
    """`copied(model_type)` is a copy of a folder, to be changed."""
    return lambda model_type: shutil.copytree(layered(model_type), tmp_path / "copy")


def induction(folder: Path, model: onnx.ModelProto | None = None, choice: str = "all") -> Induction:
    """The layers of a folder's graph, or of a changed one."""
    models = {"model.onnx": model or load(folder)}
    return Induction.of(models, WeightSource.of(folder, folder), ComputedModel(folder), None, LayerChoice(choice))
