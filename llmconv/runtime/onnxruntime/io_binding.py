"""BoundSession: a session whose inputs and outputs stay where they are from run to run; what a step needs is little then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.tensors import Array


class BoundSession:
    """A session whose inputs and cache are bound to memory that later runs take again."""

    def __init__(self, session: LimitedSession, results: Sequence[str]) -> None:
        self._session, self._results, self._binding = session, results, session.io_binding()
        self._inputs: dict[str, Array] = {}
        self._bind_results()  # before the cache: values come out in the order in which they were bound

    def bind_cache(self, past: Sequence[str], present: Sequence[str], values: Sequence[ort.OrtValue]) -> None:
        """Past and present of each name are one value."""
        for past_name, present_name, value in zip(past, present, values, strict=True):
            self._binding.bind_ortvalue_input(past_name, value)
            self._binding.bind_ortvalue_output(present_name, value)

    def feed(self, name: str, array: Array) -> None:
        """Gives an input, in the memory of the last one if that had the same shape."""
        held = self._inputs.get(name)
        if held is not None and held.shape == array.shape:
            held[...] = array
        else:
            self._inputs[name] = np.array(array, dtype=input_dtype(array), order="C")
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(self._inputs[name]))

    def run(self) -> list[Array]:
        """The results; nobody else holds them, and later runs leave them as they are."""
        self._session.run_with_iobinding(self._binding, [array.shape for array in self._inputs.values()])
        values = self._binding.get_outputs_as_ortvaluevector()
        results = [values[at].numpy() for at in range(len(self._results))]
        self._bind_results()  # anew: the next may have another shape
        return results

    def _bind_results(self) -> None:
        for name in self._results:
            self._binding.bind_output(name)


def as_input(array: Array) -> ort.OrtValue:
    """An input of a graph: tokens, mask and positions as int64, embeddings as they are."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, dtype=input_dtype(array)))


def input_dtype(array: Array) -> Any:
    """int64 for whole numbers."""
    return array.dtype if array.dtype.kind == "f" else np.int64
