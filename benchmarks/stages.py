"""Greedy generation in one process, and with the second of two stages in another process on the same machine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.measure import FOLDER, Target, llmconv, report, run
from benchmarks.small_model import CONFIG, model
from llmconv.generation import TextModel
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.stages.staged_runner import StageAddresses

PROMPT, NEW, ROUNDS, THREADS = 128, 64, 5, 2
ONE, TWO = "one process", "two processes"


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "stages"
    if not folder.exists():
        run(llmconv("export", model(), "-o", folder, "--stages", "2"))
    prompt = np.random.default_rng(0).integers(3, CONFIG["vocab_size"], PROMPT).tolist()
    speeds: dict[str, list[tuple[float, float]]] = {ONE: [], TWO: []}
    tokens: dict[str, list[int]] = {}
    with _stage(folder) as address:
        settings = SessionSettings(threads=THREADS)
        models = {
            ONE: TextModel.open(folder, settings=settings),
            TWO: TextModel.open(folder, settings=settings, stages=StageAddresses([address])),
        }
        for at in range(ROUNDS + 1):
            for name, opened in models.items():
                tokens[name], *found = _speed(opened, prompt)
                speeds[name] += [(found[0], found[1])] if at else []
    if tokens[ONE] != tokens[TWO]:
        sys.exit("the tokens differ")
    lines = [f"| {name} | {_middle(found, 0)} | {_middle(found, 1)} |" for name, found in speeds.items()]
    cost = 1e3 * statistics.median(1 / two[1] - 1 / one[1] for one, two in zip(*speeds.values(), strict=True))
    body = "\n".join(
        [
            f"A 135 M Llama in float32 with graphs in two stages, {PROMPT} tokens of prompt and {NEW} new ones, greedy,",
            f"{THREADS} threads, over 127.0.0.1; median of {ROUNDS} rounds in turn, range in parentheses. Both gave the same",
            "tokens. A stage computes while the other waits, so two processes are not faster than one: they hold a model that",
            f"does not fit into one. A token costs {cost:.1f} ms more (median of the differences).\n",
            "| | prompt tokens/s | new tokens/s |",
            "| --- | --- | --- |",
            *lines,
        ]
    )
    return report("stages", "Stages in two processes", body, [Target("ms more per token", cost, 5)])


def _speed(opened: TextModel, prompt: Sequence[int]) -> tuple[list[int], float, float]:
    """The new tokens, prompt tokens per second up to the first of them, and new tokens per second after it."""
    times, tokens, began = [], [], time.perf_counter()
    for piece in opened.stream([prompt], opened.defaults.but(max_new_tokens=NEW, eos_token_id=(), do_sample=False)):
        times.append(time.perf_counter())
        tokens.append(piece.token or 0)
    return tokens, PROMPT / (times[0] - began), (NEW - 1) / (times[-1] - times[0])


def _middle(speeds: Sequence[tuple[float, float]], at: int) -> str:
    found = [speed[at] for speed in speeds]
    return f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"


@contextmanager
def _stage(folder: Path) -> Iterator[str]:
    """The address of a process with the second stage."""
    options = ("--stage", "2", "--listen", "127.0.0.1:0", "--threads", str(THREADS), "--json", "-q")
    process = subprocess.Popen(llmconv("serve-stage", folder, *options), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
