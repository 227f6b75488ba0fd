"""Runs of the eager model that round otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.verify.reference.other_roundings import SEEDS, nudged, other_roundings, outputs_of, run_chain
from llmconv.verify.scenarios.calls import Call
from tests.conftest import save_tiny

IDS = np.arange(7)[None] + 3
CALL = Call(IDS, np.ones_like(IDS), np.arange(7)[None])


@pytest.mark.slow
def test_a_single_prompt_has_runs_with_other_errors_of_the_same_size(tmp_path: Path) -> None:
    model, exact = (EagerRunner(save_tiny("llama", tmp_path), dtype) for dtype in ("float32", "float64"))
    truth = outputs_of(run_chain(exact, [CALL])[0])["logits"]
    first = np.abs(outputs_of(run_chain(model, [CALL])[0])["logits"] - truth).mean()
    [(orders, nudges)] = other_roundings(model, [CALL])
    others = [np.abs(run("logits") - truth).mean() for run in nudges]
    assert not orders
    assert len({first, *others}) == 1 + len(SEEDS)
    assert all(first / 4 < other < 4 * first for other in others)


def test_several_calls_also_have_another_order(tmp_path: Path) -> None:
    model = EagerRunner(save_tiny("llama", tmp_path))
    step = Call(IDS[:, :1], np.ones((1, 8), dtype=np.int64), np.array([[7]]))
    _, (orders, nudges) = other_roundings(model, [CALL, step])
    assert len(orders) == 1 and len(nudges) == len(SEEDS)
    assert all(run("logits").shape[1] == 1 for run in (*orders, *nudges))
    for seed, run in zip(SEEDS, nudges, strict=True):
        with nudged(seed):
            alone = outputs_of(run_chain(model, [CALL, step])[-1])
        assert all(np.array_equal(run(name), rows) for name, rows in alone.items())


def test_embeddings_are_nudged_within_the_context_only(tmp_path: Path) -> None:
    model = EagerRunner(save_tiny("llama", tmp_path))
    before = model.embed(IDS)
    with nudged(0):
        moved = model.embed(IDS)
    assert np.array_equal(model.embed(IDS), before)
    assert 0 < np.abs(moved / before - 1).max() <= 2.0**-23
