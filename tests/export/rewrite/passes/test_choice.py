"""Tokens and scores that a graph chooses: the most likely tokens with their log-probabilities."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from llmconv.errors import UsageProblem
from llmconv.export.rewrite.passes import TokenChoice, choose_tokens
from tests.export.rewrite.passes.graphs import graph, port, run

ROWS = np.random.default_rng(1).normal(size=(2, 3, 7)).astype(np.float32) * 9


def copy_of_input() -> ir.Model:
    """`logits` are the input."""
    nodes = [helper.make_node("Identity", ["rows"], ["logits"])]
    return graph(nodes, [port("rows", ["b", "s", 7])], [port("logits", ["b", "s", 7])], {})


def chosen(text: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of a graph with these logits."""
    model = copy_of_input()
    choose_tokens(model, TokenChoice.parse(text))
    return run(model, rows=rows)


def log_probabilities(rows: np.ndarray) -> np.ndarray:
    """In float64."""
    exact = rows.astype(np.float64)
    top = exact.max(-1, keepdims=True)
    return np.asarray(exact - top - np.log(np.exp(exact - top).sum(-1, keepdims=True)))


def test_argmax_returns_the_next_input_ids() -> None:
    given = chosen("argmax", ROWS)
    assert list(given) == ["tokens", "scores"]
    assert given["tokens"].dtype == np.int64 and given["tokens"].shape == (2, 3)
    np.testing.assert_array_equal(given["tokens"], ROWS.argmax(-1))
    np.testing.assert_allclose(given["scores"], log_probabilities(ROWS).max(-1), rtol=1e-6, atol=1e-6)


def test_topk_is_sorted() -> None:
    given = chosen("topk:3", ROWS)
    order = np.argsort(-ROWS, axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(given["tokens"], order)
    expected = np.take_along_axis(log_probabilities(ROWS), order, -1)
    np.testing.assert_allclose(given["scores"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["argmax", "topk:2"])
def test_of_equal_tokens_the_lower_id_is_first(text: str) -> None:
    tokens = chosen(text, np.zeros((1, 1, 7), np.float32))["tokens"]
    assert tokens.ravel().tolist() == list(range(tokens.size))


def test_large_logits_have_finite_scores() -> None:
    scores = chosen("topk:7", np.array([[[1e4, -1e4, 0, 1, 2, 3, 4]]], np.float32))["scores"]
    assert np.isfinite(scores).all() and scores[0, 0, 0] == 0


def test_more_tokens_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageProblem, match="vocabulary of 7"):
        choose_tokens(copy_of_input(), TokenChoice.parse("topk:8"))


@pytest.mark.parametrize("text", ["", "greedy", "topk", "topk:-1", "topk:x", "argmax:2"])
def test_an_unknown_choice_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem, match="unknown"):
        TokenChoice.parse(text)


def test_a_choice_of_zero_tokens_is_refused() -> None:
    with pytest.raises(UsageProblem, match="chooses no token"):
        TokenChoice.parse("topk:0")
