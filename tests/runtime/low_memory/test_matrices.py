"""Matrices that are read as they are stored: their numbers, and the memory that holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from llmconv.checkpoint import open_weights
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.stored_tensors import StoredTensor, stored_tensors
from llmconv.runtime.low_memory import weights
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.low_memory.weights import MatrixMemory, linear_by_blocks
from llmconv.runtime.runner import default_positions

ROWS, COLUMNS = 6, 4
BYTES = ROWS * COLUMNS * 4


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    """Three matrices of a file: 0, 1, 2 in every element."""
    save_file({f"{at}": torch.full((ROWS, COLUMNS), float(at)) for at in range(3)}, tmp_path / "model.safetensors")
    return dict(stored_tensors(open_weights(tmp_path), torch.float32, None))


def test_no_more_than_the_limit_is_kept(stored: dict[str, StoredTensor]) -> None:
    memory = MatrixMemory(kept=2 * BYTES)
    found = [memory.read(name, stored[name]) for name in "012"]
    memory.begin()
    again = [memory.read(name, stored[name]) for name in "012"]
    assert [one is other for one, other in zip(found[:2], again[:2], strict=True)] == [True, True]
    assert sum(matrix.nbytes for matrix in memory._kept.values()) == 2 * BYTES


def test_the_next_layer_uses_the_same_memory_again(stored: dict[str, StoredTensor]) -> None:
    memory = MatrixMemory()
    first = memory.read("0", stored["0"]).data_ptr()
    memory.begin()
    second = memory.read("1", stored["1"])
    assert second.data_ptr() == first and bool((second == 1).all())


def test_a_matrix_of_no_layer_is_not_overwritten(stored: dict[str, StoredTensor]) -> None:
    memory = MatrixMemory()
    head = memory.read("0", stored["0"], stays=True)
    memory.begin()
    memory.read("1", stored["1"])
    assert bool((head == 0).all())


def test_matrices_of_one_layer_do_not_overwrite_each_other(stored: dict[str, StoredTensor]) -> None:
    memory = MatrixMemory()
    memory.begin()
    found = [memory.read(name, stored[name]) for name in "012"]
    assert [float(matrix[0, 0]) for matrix in found] == [0, 1, 2]


def test_released_memory_can_keep_other_matrices(stored: dict[str, StoredTensor]) -> None:
    memory = MatrixMemory(kept=BYTES)
    memory.read("0", stored["0"])
    memory.release()
    assert memory.read("1", stored["1"]) is memory.read("1", stored["1"])


@pytest.mark.parametrize("bias", [None, torch.arange(5.0, dtype=torch.bfloat16)])
def test_a_product_by_blocks_is_the_product(bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CONVERTED", 2 * 8)  # blocks of two rows, the last of one
    value, matrix = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.bfloat16)
    wanted = functional.linear(value, matrix.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear_by_blocks(value, matrix, bias), wanted)


@pytest.mark.quick_rows("float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrices_as_stored_give_the_results_of_the_whole_model(
    dtype: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "AS_STORED", 1)
    mask = np.ones((2, 6), dtype=np.int64)
    call = np.arange(12).reshape(2, 6), mask, default_positions(mask, 6)
    streamed = StreamedRunner(tiny("llama"), dtype)
    assert len(streamed._weights._as_stored) >= 4 * 7, "the seven matrices of every layer"
    found, wanted = streamed.prefill(*call), EagerRunner(tiny("llama"), dtype).prefill(*call)
    limit = 1e-5 if dtype == "float32" else 1e-13
    assert np.abs(found.logits - wanted.logits).max() < limit * np.abs(wanted.logits).max()
    for name, array in wanted.present.arrays().items():
        assert np.allclose(found.present.arrays()[name], array, rtol=limit, atol=limit), name
