"""Greedy generation in one process, and with the second of two stages in another process on the same machine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.measure import FOLDER, Target, llmconv, report, run
from benchmarks.small_model import CONFIG, model
from llmconv.generation import TextModel
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.stages.staged_runner import StageAddresses

PROMPT, NEW, ROUNDS, THREADS = 128, 48, 7, 1
ONE, TWO = "one process", "two processes"


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "stages"
    if not folder.exists():
        run(llmconv("export", model(), "-o", folder, "--stages", "2"))
    prompt = np.random.default_rng(0).integers(3, CONFIG["vocab_size"], PROMPT).tolist()
    waits: dict[str, list[float]] = {ONE: [], TWO: []}
    tokens: dict[str, list[int]] = {}
    with _stage(folder) as address:
        settings = SessionSettings(threads=THREADS)
        models = {
            ONE: TextModel.open(folder, settings=settings),
            TWO: TextModel.open(folder, settings=settings, stages=StageAddresses([address])),
        }
        for at in range(ROUNDS + 1):
            for name, opened in models.items():
                tokens[name], found = _generate(opened, prompt)
                waits[name] += found if at else []
    if tokens[ONE] != tokens[TWO]:
        sys.exit("the tokens differ")
    cost = _quiet(waits[TWO]) - _quiet(waits[ONE])
    lines = [
        f"| {name} | {1e3 / statistics.median(found):.1f} | {statistics.median(found):.1f} | {_quiet(found):.1f} |"
        for name, found in waits.items()
    ]
    body = "\n".join(
        [
            "A 135 M Llama in float32 with graphs in two stages over 127.0.0.1, greedy,",
            f"{NEW} new tokens after {PROMPT}, threads per process: {THREADS}; {ROUNDS} rounds in turn on a machine",
            "that ran other jobs, too. Both gave the same tokens. A stage computes while the other waits,",
            "so two processes are not faster than one: they hold a model that does not fit into one.",
            f"In quiet moments a token costs {cost:.1f} ms more.\n",
            "| | new tokens/s | ms per token, median | ms per token, fastest twentieth |",
            "| --- | --- | --- | --- |",
            *lines,
        ]
    )
    return report("stages", "Stages in two processes", body, [Target("ms more per token", cost, 5)])


def _generate(opened: TextModel, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """The new tokens, and the milliseconds of each but the first."""
    times, tokens = [], []
    for piece in opened.stream([prompt], opened.defaults.but(max_new_tokens=NEW, eos_token_id=(), do_sample=False)):
        times.append(1e3 * time.perf_counter())
        tokens.append(piece.token or 0)
    return tokens, [after - before for before, after in pairwise(times)]


def _quiet(waits: Sequence[float]) -> float:
    """The twentieth part of waits that is fastest: what other programs do not disturb."""
    return statistics.quantiles(waits, n=20)[0]


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
