"""The head runs on the last position, for any operators after it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from llmconv.errors import UnsupportedInput
from llmconv.export.rewrite.last_logits import keep_last_logits
from tests.export.rewrite.passes.graphs import INT64, graph, head, port, run

IDS = np.array([[1, 2, 3], [3, 1, 5]])


@pytest.mark.parametrize("bias", [False, True])
def test_the_last_row_is_kept(bias: bool) -> None:
    expected = run(head(bias), input_ids=IDS)["logits"]
    model = head(bias)
    keep_last_logits(model)
    np.testing.assert_array_equal(run(model, input_ids=IDS)["logits"], expected[:, -1:])


def test_the_output_declares_one_position() -> None:
    model = head()
    keep_last_logits(model)
    assert [str(axis) for axis in model.graph.outputs[0].shape or ()] == ["b", "1", "6"]


def test_a_single_token_is_the_last_one() -> None:
    model = head()
    keep_last_logits(model)
    np.testing.assert_array_equal(
        run(model, input_ids=IDS[:, :1])["logits"], run(head(), input_ids=IDS[:, :1])["logits"]
    )


def test_logits_that_mix_positions_are_refused() -> None:
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["floats"], to=1),
        helper.make_node("Softmax", ["floats"], ["logits"]),
    ]
    model = graph(nodes, [port("input_ids", ["b", "s", 6], INT64)], [port("logits", ["b", "s", 6])], {})
    with pytest.raises(UnsupportedInput, match="Softmax"):
        keep_last_logits(model)
