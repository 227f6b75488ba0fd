"""BoundSession: a session whose inputs and outputs keep their memory from run to run, which makes a step cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.tensors import Array

TENSOR_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
"""numpy types by onnxruntime's names."""


class BoundSession:
    """A session whose inputs and cache are bound to memory that later runs reuse.

    Args:
        session: the session to run.
        results: names of the outputs other than the cache.
    """

    def __init__(self, session: LimitedSession, results: Sequence[str]) -> None:
        self._session, self._results, self._binding = session, results, session.io_binding()
        self._inputs: dict[str, Array] = {}
        self._bind_results()  # before the cache: outputs have the order of their binding

    def bind_cache(self, past: Sequence[str], present: Sequence[str], values: Sequence[ort.OrtValue]) -> None:
        """Binds every past input and its present output to one value.

        Args:
            past: names of the past inputs.
            present: names of the present outputs, in the same order.
            values: one value per pair.
        """
        for past_name, present_name, value in zip(past, present, values, strict=True):
            self._binding.bind_ortvalue_input(past_name, value)
            self._binding.bind_ortvalue_output(present_name, value)

    def feed(self, name: str, array: Array) -> None:
        """Sets an input; reuses the memory of the previous value if the shape is the same."""
        held = self._inputs.get(name)
        if held is not None and held.shape == array.shape:
            held[...] = array
        else:
            self._inputs[name] = np.array(array, dtype=input_dtype(array), order="C")
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(self._inputs[name]))

    def run(self) -> list[Array]:
        """Runs the session and returns the results, which later runs do not change."""
        self._session.run_with_iobinding(self._binding, [array.shape for array in self._inputs.values()])
        values = self._binding.get_outputs_as_ortvaluevector()
        results = [values[at].numpy() for at in range(len(self._results))]
        self._bind_results()  # the next results may have other shapes
        return results

    def _bind_results(self) -> None:
        for name in self._results:
            self._binding.bind_output(name)


def as_input(array: Array) -> ort.OrtValue:
    """A graph input: tokens, mask and positions as int64, embeddings unchanged."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, dtype=input_dtype(array)))


def input_dtype(array: Array) -> Any:
    """int64 for integers, else the dtype of the array."""
    return array.dtype if array.dtype.kind == "f" else np.int64
