"""Steps and prompts of folders after a long past, in alternating rounds: `python -m benchmarks.kv_cache FOLDER …`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache, default_positions

PAST, ROUNDS, STEPS = 1500, 12, 10


class Measured:
    """One folder's runner, its cache after the latest call, and the CPU seconds of its steps."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._runner = OrtRunner.from_folder(folder, SessionSettings(threads=1, prepack=True))
        self._past: Cache | None = None
        self.prompt = self.run(PAST)
        self.steps: list[float] = []

    def run(self, tokens: int) -> float:
        """CPU seconds of a call with new tokens."""
        done = self._past.length if self._past else 0
        mask = np.ones((1, done + tokens), dtype=np.int64)
        ids = np.arange(done + 3, done + 3 + tokens, dtype=np.int64)[None]
        run = self._runner.decode if self._past else self._runner.prefill
        started = time.process_time()
        self._past = run(ids, mask, default_positions(mask, tokens), self._past).present
        return time.process_time() - started

    def line(self) -> str:
        """The result."""
        assert self._past is not None
        held = sum(array.nbytes for array in self._past.arrays().values())
        step = 1e3 * median(self.steps)
        return f"{self.name}: cache {held / 1e6:.1f} MB, prompt {self.prompt:.2f} s, step {step:.1f} ms"


if __name__ == "__main__":
    measured = [Measured(Path(name)) for name in sys.argv[1:]]
    for _ in range(ROUNDS):
        for one in measured:
            one.steps += [one.run(1) for _ in range(STEPS)]
    for one in measured:
        print(one.line())
