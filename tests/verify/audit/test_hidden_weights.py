"""Weights where no initializer of the graph is, and graphs that the folder does not list, never pass unseen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.surgery import replace_input
from tests.builders.mutants.weights import Surgery
from tests.verify.audit.test_escapes import details, faulty

Tiny = Callable[[str], Path]


def outside(folder: Path, name: str) -> TensorProto:
    """A tensor of one element that lies in another file."""
    (folder / "x.bin").write_bytes(np.ones(1, np.float32).tobytes())
    tensor = numpy_helper.from_array(np.ones(1, np.float32), name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="x.bin")
    return tensor


def scaled(model: onnx.ModelProto, factor: str, *nodes: onnx.NodeProto) -> bool:
    """What the final norm gives is multiplied by a value that these nodes make."""
    at = next(index for index, node in enumerate(model.graph.node) if node.name.startswith("lm_head"))
    head = model.graph.node[at]
    product = helper.make_node("Mul", [head.input[0], factor], ["scaled"], name="model.norm/Mul_900")
    replace_input(head, head.input[0], "scaled")
    for node in (product, *reversed(nodes)):
        model.graph.node.insert(at, node)
    return True


def in_a_constant_node(model: onnx.ModelProto, folder: Path) -> bool:
    return scaled(model, "one", helper.make_node("Constant", [], ["one"], value=outside(folder, "hidden")))


def in_a_branch(model: onnx.ModelProto, folder: Path) -> bool:
    result = helper.make_tensor_value_info("out", TensorProto.FLOAT, [1])
    branch = helper.make_graph(
        [helper.make_node("Identity", ["hidden"], ["out"])], "branch", [], [result], [outside(folder, "hidden")]
    )
    true = helper.make_node("Constant", [], ["true"], value=numpy_helper.from_array(np.array(True)))
    return scaled(model, "one", true, helper.make_node("If", ["true"], ["one"], then_branch=branch, else_branch=branch))


def sparse(model: onnx.ModelProto, folder: Path) -> bool:
    values, places = numpy_helper.from_array(np.ones(1, np.float32), "hidden"), numpy_helper.from_array(np.array([0]))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [1]))
    return scaled(model, "hidden")


def also_an_input(model: onnx.ModelProto, folder: Path) -> bool:
    tensor = model.graph.initializer[0]
    model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return True


@pytest.mark.quick_rows("branch")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_a_constant_node, "`hidden` is external data but not an initializer of the graph"),
        (in_a_branch, "`hidden` is external data but not an initializer of the graph"),
        (sparse, "`hidden` is a sparse initializer"),
        (also_an_input, "is both an initializer and an input"),
    ],
    ids=["constant node", "branch", "sparse", "input"],
)
def test_the_weight_audit_names(
    change: Surgery, said: str, exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = faulty(exported("llama"), tmp_path / "faulty", change)
    assert said in details(verify(folder, scenario=["prefill, 1 token"], eager=eager("llama")), "weights")


@pytest.mark.slow
def test_an_unlisted_graph_is_a_skipped_check_and_in_the_summary(
    exported: Tiny, eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = shutil.copytree(exported("llama"), tmp_path / "model")
    shutil.copy(folder / "decode.onnx", folder / "other.onnx")
    report = verify(folder, reference=exported("llama"), scenario=["prefill, 1 token"], eager=eager("llama"))
    skipped = [(check.graph, check.detail) for check in report.checks if check.verdict == "skip"]
    assert skipped == [("other.onnx", "is in the folder but not listed as one of its graphs; it was not verified")]
    assert "graphs that are not the folder's own" in report.summary()
