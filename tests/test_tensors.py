"""LazyTensor: arrays in memory are read unchanged, whatever their shape."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.tensors import BY_NAME, in_memory


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 2), (2, 3, 4)])
def test_an_array_in_memory_keeps_its_shape(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    tensor = in_memory(array, BY_NAME["float32"])
    assert tensor.shape == shape
    assert tensor.read().shape == shape
    assert tensor.read().tobytes() == array.tobytes()
