"""One call of a decoder graph in onnxruntime, bound as its own client binds it; sessions are timed in turn."""

from __future__ import annotations

import re
import statistics
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.small_model import HEAD_DIM, KV_HEADS
from llmconv.tensors import Array

THREADS = 2
ROOM = 128
"""Slots of a shared buffer that stay free."""
PAUSE = 0.05
"""Seconds between two sessions: the threads of the last one busy-wait for a while."""


class Step:
    """`tokens` new tokens after `past` random ones.

    With `sharing` past and present are one buffer; otherwise onnxruntime allocates the present. Weights are packed, as
    onnxruntime does by default.
    """

    def __init__(self, session: onnxruntime.InferenceSession, past: int, tokens: int, sharing: bool) -> None:
        self._session, self._sharing = session, sharing
        self._binding = session.io_binding()
        self._results = [port.name for port in session.get_outputs()]
        cache = {}
        for port in session.get_inputs():
            layer = _layer(port.name)
            array = _tokens(port.name, past, tokens) if layer is None else _past(layer, past, (tokens + ROOM) * sharing)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self._binding.bind_ortvalue_input(port.name, value)
            cache[layer] = value
        for name in self._results:
            if sharing and name != "logits":
                self._binding.bind_ortvalue_output(name, cache[_layer(name)])
            else:
                self._binding.bind_output(name)

    def run(self) -> None:
        """Runs it; the state afterwards is always the same."""
        if not self._sharing:  # the last outputs are freed, as in a client that passes them on
            self._binding.clear_binding_outputs()
            for name in self._results:
                self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)

    def logits(self) -> Array:
        """Runs it and returns the logits of the last token, `[vocab]`."""
        self.run()
        logits: Array = self._binding.get_outputs()[self._results.index("logits")].numpy()[0, -1]
        return logits


def session(path: Path) -> onnxruntime.InferenceSession:
    """A session with onnxruntime's own defaults but for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def require_equal(steps: Mapping[str, Step]) -> None:
    """Checks that all exporters compute the same logits.

    Raises:
        AssertionError: logits differ.
    """
    results = [step.logits() for step in steps.values()]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-3)


def milliseconds(steps: Mapping[str, Step], rounds: int, runs: int) -> dict[str, list[float]]:
    """Each step's times: every round takes all of them in turn, one run to warm up and then `runs` in a row."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            time.sleep(PAUSE)
            step.run()
            for _ in range(runs):
                started = time.perf_counter()
                step.run()
                times[name].append(1000 * (time.perf_counter() - started))
    return times


def rows(times: Mapping[str, list[float]], own: str) -> list[str]:
    """A Markdown row per step, with how much slower than `own` it is."""
    base = statistics.median(times[own])
    return [
        f"| {name} | {statistics.median(taken):.1f} | {min(taken):.1f} to {max(taken):.1f} "
        f"| {statistics.median(taken) / base:.2f} |"
        for name, taken in times.items()
    ]


def _layer(name: str) -> str | None:
    """`3.key` of every exporter's name for it; None for other names."""
    found = re.search(r"\.(\d+)\.(key|value)", name)
    return f"{found[1]}.{found[2]}" if found else None


def _past(layer: str, past: int, free: int) -> Array:
    array = np.zeros((1, KV_HEADS, past + free, HEAD_DIM), dtype=np.float32)
    generator = np.random.default_rng(zlib.crc32(layer.encode()))
    array[:, :, :past] = generator.standard_normal((1, KV_HEADS, past, HEAD_DIM), dtype=np.float32)
    return array


def _tokens(name: str, past: int, tokens: int) -> Array:
    plain = {
        "input_ids": np.arange(5, 5 + tokens)[None],
        "attention_mask": np.ones((1, past + tokens), np.int64),
        "position_ids": np.arange(past, past + tokens)[None],
    }
    return plain[name]
