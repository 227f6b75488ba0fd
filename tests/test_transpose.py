"""Transposed views: any block is right, from files and from memory, and only panels are held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmconv import checkpoint
from llmconv.checkpoint import transposed
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

F4 = BY_NAME["float32"]


@pytest.mark.slow_rows("True-1")
@pytest.mark.parametrize("panel_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("in_file", [True, False])
def test_every_block_is_that_of_numpys_transpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panel_bytes: int, in_file: bool
) -> None:
    monkeypatch.setattr(checkpoint, "PANEL_BYTES", panel_bytes)
    array = np.arange(20 * 33, dtype="f4").reshape(20, 33)
    (tmp_path / "x").write_bytes(b"head" + array.tobytes())
    view = transposed(FileTensor(tmp_path / "x", 4, F4, (20, 33)) if in_file else in_memory(array, F4))
    assert view.shape == (33, 20)
    for start in range(34):
        for stop in range(start, 34):
            block = view.rows(start, stop)
            assert np.array_equal(block, array.T[start:stop]) and block.flags.c_contiguous


def test_a_panel_is_read_once_for_all_its_blocks() -> None:
    reads: list[tuple[int, int]] = []
    array = np.ones((8, 6), "f4")

    def load(start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        reads.append((start, stop))
        return array[start:stop]

    view = transposed(LazyTensor(F4, (8, 6), load))
    for row in range(6):
        view.rows(row, row + 1)
    assert reads == [(0, 8)]


def test_what_is_no_matrix_is_not_transposed() -> None:
    with pytest.raises(ValueError, match="only matrices"):
        transposed(in_memory(np.ones(3, "f4"), F4))
