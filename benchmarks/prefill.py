"""Prefill of 512 tokens: llmconv's graphs and other exporters', same onnxruntime and threads, packed weights."""

from __future__ import annotations

import statistics
import sys

import onnxruntime

from benchmarks.measure import Target, report
from benchmarks.small_model import GROWING, RIVALS, SHARING, graphs
from benchmarks.step import THREADS, Step, milliseconds, require_equal, rows, session

TOKENS, ROUNDS = 512, 9


def main() -> int:
    """Measures, prints the table, and returns 1 if the target is missed."""
    steps = {}
    for name, path in graphs("prefill").items():
        steps[name] = Step(session(path), 0, TOKENS, name in SHARING)
    require_equal(steps)
    times = milliseconds(steps, ROUNDS, 1)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    fastest = min(RIVALS, key=lambda name: medians[name])
    speed = medians[fastest] / medians[GROWING]
    body = "\n".join(
        [
            f"A 135 M Llama in float32, {TOKENS} tokens, logits of all of them, onnxruntime {onnxruntime.__version__},",
            f"{THREADS} threads, medians of {ROUNDS} runs taken in turn, each after one to warm up. All logits agree.",
            f"Measured against {GROWING}.\n",
            "| exported by | ms | range | times llmconv's |",
            "| --- | --- | --- | --- |",
            *rows(times, GROWING),
        ]
    )
    target = Target(f"times as fast as the fastest, {fastest}", speed, 1.0, at_least=True)
    return report("prefill", "Prefill", body, [target])


if __name__ == "__main__":
    sys.exit(main())
