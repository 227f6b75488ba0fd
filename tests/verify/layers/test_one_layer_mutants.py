"""A fault in any one layer of a deep model is found, and placed in that layer."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from tests.builders.mutants.one_layer import WholeGraph
from tests.builders.mutants.one_layer_forms import BY_NAME
from tests.builders.mutants.one_layer_runs import SIZES, Outcome, deep_model, judged, outcomes
from tests.builders.tracing import trace_once

trace_once()

FEW = {"num_hidden_layers": 6}
DEEP = {
    "num_hidden_layers": 126,
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SCALE, EPSILON = "attention scale 1 % off in one layer", "one norm's epsilon times ten"
NEIGHBOR = "two layers' weights swapped"
LAYERS = (0, 1, 62, 124, 125)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers."""
    return deep_model("llama", tmp_path_factory.mktemp("few") / "llama", **FEW)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 126 layers."""
    return deep_model("llama", tmp_path_factory.mktemp("deep") / "llama", **DEEP)


def placed_in(name: str, layer: int, model: Path, target: Path, method: str = "induction") -> Outcome:
    """The outcome of a mutant of one layer, which has a place there."""
    found = judged(BY_NAME[name], WholeGraph.load(model / "decode.onnx"), [layer], model, target, method)
    assert isinstance(found, Outcome)
    return found


def contents(model: onnx.ModelProto) -> list[bytes]:
    """The nodes and initializers, in any order."""
    return sorted(one.SerializeToString(deterministic=True) for one in (*model.graph.node, *model.graph.initializer))


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_a_layer_without_a_mutant_is_put_back_as_it_was(llama: Path, layer: int) -> None:
    graph = WholeGraph.load(llama / "decode.onnx")
    assert contents(graph.with_surgery(lambda model, folder: True, layer, 1, llama)) == contents(graph.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("causal mask too wide", 0),
        ("key cached before it is rotated", 3),
        pytest.param("two pasts swapped", 2, marks=pytest.mark.slow),
        ("last layer skipped", 0),
        ("last layer skipped", 5),
        ("low bit of one weight flipped", 4),
    ],
)
def test_a_mutant_of_one_layer_is_found_in_it(llama: Path, tmp_path: Path, name: str, layer: int) -> None:
    found = placed_in(name, layer, llama, tmp_path / "mutant")
    assert found.placed, found


ANY = [(name, layer) for name in (SCALE, EPSILON, NEIGHBOR) for layer in LAYERS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), ANY)
def test_any_layer_of_126_is_named_without_numbers(deep: Path, tmp_path: Path, name: str, layer: int) -> None:
    found = placed_in(name, layer, deep, tmp_path / "mutant", "structure")
    assert found.placed, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [(SCALE, 0), (EPSILON, 62), (NEIGHBOR, 125)])
def test_any_layer_of_126_is_named_by_induction(deep: Path, tmp_path: Path, name: str, layer: int) -> None:
    found = placed_in(name, layer, deep, tmp_path / "mutant")
    assert found.placed, found


@pytest.mark.one_row_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", SIZES)
def test_every_mutant_of_one_layer_is_found(model_type: str, tmp_path: Path) -> None:
    """A third of the mutants; `ROWS=all` and `benchmarks/one_layer_mutants.py` run all."""
    model = deep_model(model_type, tmp_path / model_type)
    given = outcomes(model_type, model, tmp_path / "mutant", share=1 if os.environ.get("ROWS") == "all" else 3)
    found = [one for one in given if isinstance(one, Outcome)]
    assert found and [one for one in found if not one.placed] == []
