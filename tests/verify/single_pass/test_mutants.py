"""Faults of graphs without a cache that decide by lengths, positions, batch sizes or masks are found by default."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.export import export
from llmconv.verify import verify
from tests.builders.embedding_models import save_model, save_modules, write_config
from tests.conftest import save_tiny

CONTEXT = 512


class Editor:
    """Adds nodes to a graph: each method returns the name of a new value."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.made, self.count = model, [], 0  # type: ignore[var-annotated]

    def number(self, value: float, kind: Any = np.int64) -> str:
        self.count += 1
        self.model.graph.initializer.append(numpy_helper.from_array(np.array(value, kind), f"odd_{self.count}"))
        return f"odd_{self.count}"

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        made = helper.make_node(op, list(inputs), [f"odd:{self.count}"], name=f"graph/odd_{self.count}", **attributes)
        self.made.append(made)
        return str(made.output[0])

    def size(self, axis: int) -> str:
        """The number of texts (0) or of tokens (1)."""
        shape = self.node("Shape", "input_ids", start=axis, end=axis + 1)
        return self.node("Squeeze", shape)

    def prepend(self) -> None:
        """Puts the new nodes in front of the others."""
        rest = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self.model.graph.node]
        del self.model.graph.node[:]
        self.model.graph.node.extend([*self.made, *rest])


def instead_of(name: str, make: Callable[[Editor], str]) -> Callable[[onnx.ModelProto], None]:
    """All nodes read another value in place of an input."""

    def change(model: onnx.ModelProto) -> None:
        editor = Editor(model)
        old = list(model.graph.node)
        value = make(editor)
        for node in old:
            for at, one in enumerate(node.input):
                if one == name:
                    node.input[at] = value
        editor.prepend()

    return change


def louder_if(condition: Callable[[Editor], str], output: str) -> Callable[[onnx.ModelProto], None]:
    """An output is 1 % larger under a condition on the call."""

    def change(model: onnx.ModelProto) -> None:
        editor = Editor(model)
        factor = editor.node(
            "Where", condition(editor), editor.number(1.01, np.float32), editor.number(1.0, np.float32)
        )
        producer = next(node for node in model.graph.node if output in node.output)
        producer.output[list(producer.output).index(output)] = "right"
        for node in model.graph.node:
            for at, one in enumerate(node.input):
                if one == output:
                    node.input[at] = "right"
        editor.prepend()
        model.graph.node.append(helper.make_node("Mul", ["right", factor], [output], name="graph/louder"))

    return change


def between(editor: Editor, least: int, most: int) -> str:
    size = editor.size(1)
    above = editor.node("GreaterOrEqual", size, editor.number(least))
    return editor.node("And", above, editor.node("LessOrEqual", size, editor.number(most)))


def filled(editor: Editor) -> str:
    """The mask without zeros between ones."""
    axis = editor.number(1)
    before = editor.node("CumSum", "attention_mask", axis)
    after = editor.node("CumSum", "attention_mask", axis, reverse=1)
    zero = editor.number(0)
    both = editor.node("And", editor.node("Greater", before, zero), editor.node("Greater", after, zero))
    return editor.node("Cast", both, to=TensorProto.INT64)


def counted(editor: Editor) -> str:
    """Positions that ignore those of the caller."""
    row = editor.node("Range", editor.number(0), editor.size(1), editor.number(1))
    return editor.node("Expand", row, editor.node("Shape", "input_ids"))


def rounded(editor: Editor) -> str:
    half = editor.node("Cast", "position_ids", to=TensorProto.BFLOAT16)
    return editor.node("Cast", half, to=TensorProto.INT64)


def moved(editor: Editor) -> str:
    is_it = editor.node("Equal", "position_ids", editor.number(100))
    return editor.node("Where", is_it, editor.number(99), "position_ids")


def lengths(output: str) -> dict[str, Callable[[onnx.ModelProto], None]]:
    """Faults of lengths and batch sizes that any graph can have."""
    conditions: dict[str, Callable[[Editor], str]] = {
        "beyond 70 tokens": lambda e: e.node("Greater", e.size(1), e.number(70)),
        "beyond 700 tokens": lambda e: e.node("Greater", e.size(1), e.number(700)),
        "exactly 31 tokens": lambda e: e.node("Equal", e.size(1), e.number(31)),
        "18 to 69 tokens": lambda e: between(e, 18, 69),
        "71 to 511 tokens": lambda e: between(e, 71, 511),
        "multiples of 16": lambda e: e.node("Equal", e.node("Mod", e.size(1), e.number(16)), e.number(0)),
        "more than 4 texts": lambda e: e.node("Greater", e.size(0), e.number(4)),
        "more than 240 texts": lambda e: e.node("Greater", e.size(0), e.number(240)),
        "exactly 2 texts": lambda e: e.node("Equal", e.size(0), e.number(2)),
    }
    return {name: louder_if(condition, output) for name, condition in conditions.items()}


SCORING = {
    **lengths("logits"),
    "positions end at 100": instead_of("position_ids", lambda e: e.node("Min", "position_ids", e.number(100))),
    "positions through bfloat16": instead_of("position_ids", rounded),
    "position 100 read as 99": instead_of("position_ids", moved),
    "positions of the caller ignored": instead_of("position_ids", counted),
    "zeros between ones ignored": instead_of("attention_mask", filled),
}
EMBEDDING = lengths("sentence_embedding")
QUICK = {"beyond 700 tokens", "positions end at 100", "positions of the caller ignored", "zeros between ones ignored"}


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("scoring") / "llama", max_position_embeddings=CONTEXT)
    export(folder, no_cache=True)
    return folder


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_modules(save_model(tmp_path_factory.mktemp("embedding") / "qwen3", "qwen3"), "mean")
    export(folder, task="embed")
    return folder


def faulty(source: Path, name: str, change: Callable[[onnx.ModelProto], None], folder: Path) -> Path:
    """A copy of the folder with a changed graph that onnxruntime opens."""
    shutil.copytree(source, folder)
    model = onnx.load(folder / name, load_external_data=False)
    change(model)
    onnx.save(model, folder / name)
    return folder


def quick(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(SCORING))
def test_a_fault_of_a_graph_of_logits_is_found_by_default(case: str, scoring: Path, tmp_path: Path) -> None:
    folder = faulty(scoring, "scoring.onnx", SCORING[case], tmp_path / "model")
    report = verify(folder, allow_changed=True)
    assert report.exit_code == 1, report.summary()
    assert not any("cannot be opened" in check.detail for check in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize("case", EMBEDDING)
def test_a_fault_of_a_graph_of_embeddings_is_found_by_default(case: str, embedding: Path, tmp_path: Path) -> None:
    report = verify(faulty(embedding, "model.onnx", EMBEDDING[case], tmp_path / "model"), allow_changed=True)
    assert report.exit_code == 1, report.summary()


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["scoring", pytest.param("embedding", marks=pytest.mark.slow)])
def test_the_unchanged_graph_passes_and_says_what_it_could_not_find(graph: str, request: pytest.FixtureRequest) -> None:
    report = verify(request.getfixturevalue(graph))
    assert report.verdict == "pass", report.summary()
    assert any("epsilon" in text for text in report.unseen)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + at / 2 for at in range(8)],
    "original_max_position_embeddings": 128,
}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_frequencies_that_stay_those_of_the_original_context_are_found(rope: dict[str, Any], tmp_path: Path) -> None:
    declared = 128 if rope is DYNAMIC else CONTEXT
    frozen = {**rope, "rope_type": "default"} if rope is DYNAMIC else {**rope, "long_factor": rope["short_factor"]}
    folder = save_tiny("llama", tmp_path / "model", max_position_embeddings=declared, rope_parameters=frozen)
    export(folder, no_cache=True)
    write_config(folder, {"rope_parameters": rope})
    failed = {check.name for check in verify(folder, allow_changed=True).checks if check.verdict == "fail"}
    assert "beyond the original context of 128" in failed
    export(folder, no_cache=True, overwrite=True)
    report = verify(folder)
    assert report.verdict == "pass", report.summary()
    assert any(check.name == "beyond the original context of 128" for check in report.checks)
