"""Steps and prompts of quantized graphs, of ONNX Runtime GenAI's int4 and of llama.cpp's Q4 files, in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import onnxruntime

from benchmarks.llama_cpp import VERSION
from benchmarks.measure import Target, report
from benchmarks.quantized_candidates import (
    A8W8,
    A8W8_LAST,
    FLOAT32,
    FLOAT32_LAST,
    GENAI,
    INT4,
    INT4_LAST,
    INT8,
    MIXED_LAST,
    Q4_0,
    Q4_K_M,
    SMALL_LAST,
    THREADS,
    Worker,
    candidates,
)

PASTS, PROMPT = (128, 2048), 512
STEPPING = (INT4_LAST, SMALL_LAST, MIXED_LAST, GENAI, Q4_0, Q4_K_M)
READING = (*STEPPING, A8W8_LAST, FLOAT32_LAST, INT4, INT8, A8W8, FLOAT32)
ROUNDS, STEPS = 7, 24
QUICK = "--quick" in sys.argv
"""Two rounds: whether it runs, not how fast."""

STEP_LIMITS = {GENAI: 1.0, Q4_0: 1.0, Q4_K_M: 1.0}
MIXED_LIMITS = {Q4_K_M: 1.0}
PROMPT_LIMITS = {GENAI: 1.0}
A8W8_LIMITS = {FLOAT32: 2.0}
A8W8_LAST_LIMITS = {FLOAT32_LAST: 2.0}
INT8_LIMITS = {FLOAT32: 1.0}

PAUSE = 0.1
"""Seconds between two candidates, since the threads of the previous one busy-wait for a while."""


@dataclass
class Times:
    """Seconds per token, in every round.

    Attributes:
        wall: seconds.
        cpu: of all threads.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float], tokens: int) -> None:
        """Adds a round."""
        self.wall.append(seconds[0] / tokens)
        self.cpu.append(seconds[1] / tokens)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    rounds, steps = (2, 4) if QUICK else (ROUNDS, STEPS)
    made = candidates(READING)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(closing(Worker(one))) for name, one in made.items()}
        stepping = {name: worker for name, worker in workers.items() if name in STEPPING}
        behind = {past: measured(stepping, past, steps, rounds) for past in PASTS}
        prompts = measured(workers, PROMPT, 0, rounds)
    lines = [line for past, times in behind.items() for line in rows(f"step after {past} tokens", times)]
    lines += rows(f"prompt of {PROMPT} tokens", prompts)
    sizes = [f"| {name} | {one.weights.stat().st_size / 1e6:.0f} |" for name, one in made.items()]
    body = "\n".join(
        [
            f"SmolLM2-135M-Instruct, {THREADS} threads, medians of {rounds} rounds of {steps} steps in turn;",
            f"onnxruntime {onnxruntime.__version__}, llama-cpp-python {VERSION} for this CPU. llmconv's graphs have",
            "`--target ort-cpu --cache shared-buffer`. llama.cpp computes the logits of a prompt's last token only,",
            "and llmconv with `--last-logits`; the others those of all tokens. llama.cpp's cache is float16, the",
            "others' float32. Q4_K_M needs a multiple of 256 columns; weights of 576 have Q5_0 or larger types.",
            *lines,
            "\n| graphs | file, MB |",
            "| --- | --- |",
            *sizes,
        ]
    )
    return report("quantized_speed", "Speed of quantized graphs", body, targets(behind, prompts))


def measured(workers: Mapping[str, Worker], length: int, steps: int, rounds: int) -> dict[str, Times]:
    """Times of steps after a prompt of some length, or of the prompt if there are no steps; one round to warm up."""
    found = {name: Times() for name in workers}
    ids = list(range(100, 100 + length))
    for number in range(rounds + 1):
        for name, worker in workers.items():
            time.sleep(PAUSE)
            answer = worker.ask(ids=ids, steps=steps)
            if number:
                found[name].add(answer["steps" if steps else "prompt"], steps or length)
    return found


def rows(title: str, times: Mapping[str, Times]) -> list[str]:
    """A Markdown table."""
    base = middle(times[INT4_LAST])
    return [
        f"\n| {title} | tokens/s | range | CPU-ms per token | speed, times the first's |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {1 / middle(one):.1f} | {1 / max(one.wall):.1f} to {1 / min(one.wall):.1f} "
            f"| {1000 * statistics.median(one.cpu):.2f} | {base / middle(one):.2f} |"
            for name, one in times.items()
        ),
    ]


def targets(behind: Mapping[int, Mapping[str, Times]], prompts: Mapping[str, Times]) -> list[Target]:
    """How many times as fast as the others llmconv is, as far as they are there."""
    compared = [
        *((f"step after {past} tokens", times, INT4_LAST, STEP_LIMITS) for past, times in behind.items()),
        *((f"step after {past} tokens", times, SMALL_LAST, STEP_LIMITS) for past, times in behind.items()),
        *((f"step after {past} tokens", times, MIXED_LAST, MIXED_LIMITS) for past, times in behind.items()),
        (f"prompt of {PROMPT} tokens", prompts, INT4_LAST, PROMPT_LIMITS),
        (f"prompt of {PROMPT} tokens", prompts, A8W8_LAST, A8W8_LAST_LIMITS),
        (f"prompt of {PROMPT} tokens", prompts, A8W8, A8W8_LIMITS),
        (f"prompt of {PROMPT} tokens", prompts, INT8, INT8_LIMITS),
    ]
    return [
        Target(f"{title}, {ours}: times as fast as {name}", middle(times[name]) / middle(times[ours]), limit, True)
        for title, times, ours, limits in compared
        for name, limit in limits.items()
        if name in times
    ]


def middle(times: Times) -> float:
    """Median seconds per token."""
    return statistics.median(times.wall)


if __name__ == "__main__":
    sys.exit(main())
