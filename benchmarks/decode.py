"""One decode step at past 128, 2048 and 8192: llmconv's graphs and other exporters', same onnxruntime and threads."""

from __future__ import annotations

import statistics
import sys

import onnxruntime

from benchmarks.exporters import OPTIMUM
from benchmarks.measure import Target, report
from benchmarks.small_model import FOR_ORT, RIVALS, SHARING, graphs
from benchmarks.step import THREADS, Step, milliseconds, require_equal, rows, session

PASTS = (128, 2048, 8192)
ROUNDS, STEPS = 8, 5


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    sessions = {name: session(path) for name, path in graphs("decode").items()}
    lines, targets = [], []
    for past in PASTS:
        steps = {name: Step(opened, past, 1, name in SHARING) for name, opened in sessions.items()}
        require_equal(steps)
        times = milliseconds(steps, ROUNDS, STEPS)
        lines += [
            f"\n| past {past}, exported by | ms per step | range | times llmconv's |",
            "| --- | --- | --- | --- |",
        ]
        lines += rows(times, FOR_ORT)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        fastest = min(RIVALS, key=lambda name: medians[name])
        speed = medians[fastest] / medians[FOR_ORT]
        targets.append(Target(f"past {past}: times as fast as the fastest, {fastest}", speed, 1.0, at_least=True))
        if past == PASTS[1]:
            speed = medians[OPTIMUM] / medians[FOR_ORT]
            targets.append(Target(f"past {past}: times as fast as {OPTIMUM}", speed, 1.3, at_least=True))
    body = "\n".join(
        [
            f"A 135 M Llama in float32, one token, onnxruntime {onnxruntime.__version__}, {THREADS} threads,",
            f"weights packed, medians of {ROUNDS} times {STEPS} steps taken in turn. All logits agree. Measured",
            f"against {FOR_ORT}; it and the ORT-GenAI builder's graph write into the past's buffer,",
            "the others return a longer one.",
            *lines,
        ]
    )
    return report("decode", "Decode step", body, targets)


if __name__ == "__main__":
    sys.exit(main())
