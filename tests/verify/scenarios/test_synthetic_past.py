"""Pasts that no model computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.verify import verify
from llmconv.verify.reference.eager import Eager
from llmconv.verify.scenarios.calls import SyntheticPast, elements_per_token
from tests.builders.mutants.surgery import add_constant, insert, users
from tests.verify.conftest import decode_only

SHAPES = {"present.0.key": (1, 2, 1, 8), "present.0.value": (1, 2, 1, 8), "present_recurrent.1": (1, 3)}
PAST = SyntheticPast(SHAPES, rows=2, length=50, loud=(4, 6), seed=1)


def test_a_synthetic_past_depends_only_on_its_seed() -> None:
    first, second, other = (past.arrays()["present.0.key"] for past in (PAST, PAST, replace(PAST, seed=2)))
    assert np.array_equal(first, second) and not np.array_equal(first, other)
    assert first.shape == (2, 2, 50, 8)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_numbers_of_a_synthetic_past_are_exact_in_every_dtype(dtype: str) -> None:
    for array in PAST.arrays().values():
        assert np.array_equal(array.astype(dtype).astype(np.float32), array)
        assert (np.ascontiguousarray(array).view(np.uint32) & 0xFFFF == 0).all()  # what bfloat16 has no bits for


def test_values_are_loud_where_the_window_ends_and_states_are_empty() -> None:
    arrays = PAST.arrays()
    sizes = np.abs(arrays["present.0.value"]).max(axis=(0, 1, 3))
    assert sizes[4:6].min() > 8 * sizes[[*range(4), *range(6, 50)]].max()
    assert not arrays["present_recurrent.1"].any()


def test_a_cache_that_continues_a_synthetic_past_begins_with_it() -> None:
    longer = {
        name: array if array.ndim == 2 else np.pad(array, ((0, 0), (0, 0), (0, 3), (0, 0)))
        for name, array in PAST.arrays().items()
    }
    assert PAST.kept_by(longer)
    longer["present.0.key"][1, 0, 49, 0] += 1
    assert not PAST.kept_by(longer)


def test_states_take_no_memory_per_token() -> None:
    assert elements_per_token(SHAPES) == 32


def past_scaled(model: onnx.ModelProto) -> None:
    """Keys of one layer's past are a thousandth larger once there are more than 1,000 tokens; see `triggers`."""
    concat = next(node for node in users(model, "Concat") if node.input[0] == "past_key_values.1.key")
    factor = add_constant(model, np.float32(1.001))
    concat.input[0] = insert(model, concat, "Mul", [concat.input[0], factor])


def test_a_graph_that_changes_the_past_fails_in_these_words(
    exported: Callable[[str], Path], eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    target = decode_only(exported("llama"), tmp_path / "graph")
    model = onnx.load(target / "decode.onnx", load_external_data=False)
    past_scaled(model)
    onnx.save(model, target / "decode.onnx")
    only = ["pasts of 30 to 1,022 tokens"]
    report = verify(target, reference=exported("llama"), eager=eager("llama"), scenario=only)
    assert "keys or values of the past differ from those that the graph was given" in {c.detail for c in report.checks}
