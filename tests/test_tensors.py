"""LazyTensor: arrays in memory are read unchanged, whatever their shape, and casts count what becomes zero."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmconv.tensors import BY_NAME, Flushed, LazyTensor, cast, in_memory


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 2), (2, 3, 4)])
def test_an_array_in_memory_keeps_its_shape(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensor = in_memory(array, BY_NAME["float32"])
    assert tensor.shape == shape
    assert tensor.read().shape == shape
    assert tensor.read().tobytes() == array.tobytes()


def test_threads_count_together_what_became_zero() -> None:
    flushed = Flushed()
    small = np.full(64, 1e-9, np.float32)
    wide = LazyTensor(BY_NAME["float32"], (400, 64), lambda start, stop: small)
    tensor = cast(wide, BY_NAME["float16"], "w", flushed)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda row: tensor.rows(row, row + 1), range(400)))
    finally:
        sys.setswitchinterval(before)
    assert flushed.count == 400 * 64
