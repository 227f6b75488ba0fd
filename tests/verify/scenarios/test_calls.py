"""What happens to a cache between two calls."""

from __future__ import annotations

import numpy as np

from llmconv.runtime.runner import ArrayCache
from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import GARBAGE, PastEdit

KEYS = np.arange(2 * 1 * 4 * 3, dtype=np.float32).reshape(2, 1, 4, 3)
STATE = np.arange(8.0).reshape(2, 4)
CACHE = ArrayCache({"present.0.key": KEYS, "present_recurrent.1": STATE}, 4)
MASK = np.ones((2, 4), dtype=np.int64)


def keys(edit: PastEdit, mask: Array = MASK) -> Array:
    """The keys afterwards."""
    return edit.apply(CACHE, mask).arrays()["present.0.key"]


def test_no_edit_leaves_the_cache_itself() -> None:
    assert PastEdit().apply(CACHE, MASK) is CACHE


def test_rows_continue_others_in_keys_and_in_states() -> None:
    edited = PastEdit(rows=(1, 1)).apply(CACHE, MASK).arrays()
    assert np.array_equal(edited["present.0.key"], KEYS[[1, 1]])
    assert np.array_equal(edited["present_recurrent.1"], STATE[[1, 1]])


def test_tokens_are_removed_from_the_end() -> None:
    edited = PastEdit(drop=3).apply(CACHE, MASK[:, :1])
    assert edited.length == 1
    assert np.array_equal(edited.arrays()["present.0.key"], KEYS[:, :, :1])


def test_garbage_is_written_only_where_the_mask_hides_it() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 1]])
    edited = keys(PastEdit(garbage=GARBAGE), mask)
    assert (edited[0, :, 0] == GARBAGE).all() and (edited[1, :, 2] == GARBAGE).all()
    assert (edited == GARBAGE).sum() == 6
    assert KEYS.max() < GARBAGE


def test_a_prefix_is_never_masked() -> None:
    edited = keys(PastEdit(garbage=GARBAGE), np.array([[0, 1], [1, 1]]))
    assert (edited[0, :, 2] == GARBAGE).all() and (edited == GARBAGE).sum() == 3
