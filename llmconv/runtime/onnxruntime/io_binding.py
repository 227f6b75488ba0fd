"""BoundSession: a session whose inputs and outputs keep their memory from run to run, which makes a step cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from llmconv.runtime.onnxruntime.device import Device, as_array, host_value
from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.tensors import Array


class BoundSession:
    """A session whose inputs and cache are bound to memory that later runs reuse.

    `results` are the names of the outputs other than the cache; the session computes in the memory of `device`.
    """

    def __init__(self, session: LimitedSession, results: Sequence[str], device: Device) -> None:
        self._session, self._results, self._binding = session, results, session.io_binding()
        self._device = device
        self._inputs: dict[str, Array] = {}
        self._cache: dict[str, ort.OrtValue] = {}
        self._factors: Mapping[str, ort.OrtValue] = {}
        self._bind_results()  # before the cache: outputs have the order of their binding

    def bind_cache(self, past: Sequence[str], present: Sequence[str], values: Sequence[ort.OrtValue]) -> None:
        """Binds every past input and its present output, given in the same order, to one value."""
        for past_name, present_name, value in zip(past, present, values, strict=True):
            self._cache[past_name] = value
            self._binding.bind_ortvalue_input(past_name, value)
            self._binding.bind_ortvalue_output(present_name, value)

    def bind_factors(self, factors: Mapping[str, ort.OrtValue]) -> None:
        """Binds LoRA factors by input name; they stay the same in all runs."""
        self._factors = factors
        for name, value in factors.items():
            self._binding.bind_ortvalue_input(name, value)

    def feed(self, name: str, array: Array, dtype: Any = None) -> None:
        """Sets an input as `dtype` (None: `input_dtype`); reuses the memory of the previous value of the same shape."""
        held = self._inputs.get(name)
        if held is not None and held.shape == array.shape:
            held[...] = array
        else:
            self._inputs[name] = np.array(array, dtype=dtype or input_dtype(array), order="C")
            self._binding.bind_ortvalue_input(name, host_value(self._inputs[name]))

    def run(self) -> list[Array]:
        """Runs the session and returns the results, which later runs do not change."""
        if self._device.copies:
            self._bind_inputs_again()
        self._session.run_with_iobinding(self._binding, [array.shape for array in self._inputs.values()])
        values = self._binding.get_outputs_as_ortvaluevector()
        results = [as_array(ort.OrtValue(values[at])) for at in range(len(self._results))]
        self._bind_results()  # the next results may have other shapes
        return results

    def _bind_inputs_again(self) -> None:
        """Passes on what the host has changed; a cache that lies where its nodes read it is not copied."""
        for name, array in self._inputs.items():
            self._binding.bind_ortvalue_input(name, host_value(array))
        for name, value in self._cache.items():
            self._binding.bind_ortvalue_input(name, value)

    def _bind_results(self) -> None:
        for name in self._results:
            self._binding.bind_output(name)


def as_input(array: Array, dtype: Any = None) -> ort.OrtValue:
    """A graph input: tokens, mask and positions as int64, embeddings unchanged; anything else with its `dtype`."""
    return host_value(np.ascontiguousarray(array, dtype=dtype or input_dtype(array)))


def input_dtype(array: Array) -> Any:
    """int64 for integers and booleans, else the dtype of the array."""
    return np.int64 if array.dtype.kind in "iub" else array.dtype
