"""The image checks of a folder with a vision graph, and faults that every tower can have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from llmconv.export.families import extra_inputs_of
from llmconv.output.manifest import VISION
from llmconv.runtime.images.families import family_in
from llmconv.runtime.onnxruntime.graph import OrtGraph, VisionGraph
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import Check
from llmconv.verify.comparison.images import ImageChecks
from llmconv.verify.reference.eager import Eager
from llmconv.verify.sigma import GATES
from tests.builders.mutants.surgery import add_constant, initializer, replace_input, users

Change = Callable[[onnx.ModelProto], None]


def judged(folder: Path, eager: Eager) -> tuple[Check, list[Check]]:
    """The check of the features, and those of answers of the prefill graph.

    Args:
        folder: has the graphs.
        eager: their reference.
    """
    family = family_in(eager.folder)
    assert family
    checks = ImageChecks(VisionGraph(folder / VISION), family, eager, GATES["float32"])
    settings = SessionSettings(extra_inputs=lambda: extra_inputs_of(eager.folder))
    return checks.features(), checks.answers(OrtGraph(folder / "prefill.onnx", settings))


def mutant(folder: Path, home: Path, name: str, change: Change) -> Path:
    """A copy of a folder in which a graph is changed.

    Args:
        folder: has the graphs.
        home: the folder of the copy.
        name: of the graph.
        change: changes it in place.
    """
    made = Path(shutil.copytree(folder, home / "mutant"))
    model = onnx.load(made / name, load_external_data=False)
    change(model)
    onnx.save(model, made / name)
    return made


def node_of(model: onnx.ModelProto, op: str, name: str) -> onnx.NodeProto:
    """The first node of an operator with a part of a name among its inputs and outputs."""
    return next(node for node in users(model, op) if any(name in one for one in [*node.input, *node.output]))


def swapped_weight(model: onnx.ModelProto) -> None:
    """Queries of layer 1 are computed with the matrix of keys."""
    first, second = (f"vision_tower.encoder.layers.1.self_attn.{part}_proj.weight" for part in "qk")
    one, other = initializer(model, first), initializer(model, second)
    assert one and other
    one.external_data[1].value = other.external_data[1].value


def no_positions(model: onnx.ModelProto) -> None:
    """The position embedding is not added."""
    node = node_of(model, "Add", "position_embedding/Gather")
    replace_input(node, node.input[1], add_constant(model, np.zeros((1, 1, 1), np.float32)))
