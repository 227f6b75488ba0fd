"""Greedy generation in one process, and with the second of two stages in another process on the same machine."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.exporters import add_tokenizer
from benchmarks.measure import FOLDER, Target, llmconv, report, run
from benchmarks.small_model import CONFIG, model
from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.generation import TextModel
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, StageAddresses
from llmconv.tensors import LazyTensor

PROMPT, NEW, ROUNDS, THREADS = 128, 32, 6, 1
ONE, TWO = "one process", "two processes"
LAYER = re.compile(r"\.layers\.(\d+)\.")
SMALL = {"num_hidden_layers": 2, "vocab_size": 512}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    whole, small = _measure("stages", model()), _measure("stages-small", _small())
    cost = _quiet(small[TWO]) - _quiet(small[ONE])
    named = {"135 M": whole, "2 layers": small}
    lines = [_line(f"{title}, {way}", found) for title, waits in named.items() for way, found in waits.items()]
    body = "\n".join(
        [
            "A 135 M Llama in float32, and one of the same width with 2 layers, which takes little time itself,",
            f"with graphs in two stages over 127.0.0.1, greedy, {NEW} new tokens after {PROMPT}, threads per process:",
            f"{THREADS}; {ROUNDS} rounds in turn, on a machine that ran other jobs, too. Tokens are the same.",
            "A stage computes while the other waits, so two processes are not faster than one: they hold a model",
            "that does not fit into one. In quiet moments (the fastest twentieth) a token of the small model costs",
            f"{cost:.1f} ms more.\n",
            "| model and processes | new tokens/s | ms per token, median | ms per token, fastest twentieth |",
            "| --- | --- | --- | --- |",
            *lines,
        ]
    )
    return report("stages", "Stages in two processes", body, [Target("ms more per token", cost, 5)])


def _line(name: str, waits: Sequence[float]) -> str:
    middle = statistics.median(waits)
    return f"| {name} | {1e3 / middle:.1f} | {middle:.1f} | {_quiet(waits):.1f} |"


def _small() -> Path:
    """The folder of a model whose own time is small."""
    folder = FOLDER / "llama-2-layers"
    if not folder.exists():
        found = open_checkpoint(model())
        rows = SMALL["vocab_size"]
        tensors = {n: t for n, t in found.items() if not (layer := LAYER.search(n)) or int(layer[1]) < 2}
        embedding = tensors["model.embed_tokens.weight"]
        shape = (rows, *embedding.shape[1:])
        tensors["model.embed_tokens.weight"] = LazyTensor(embedding.dtype, shape, embedding.load)
        plan = plan_checkpoint(Checkpoint(folder, "random", tensors, CONFIG | SMALL))
        write_checkpoint(plan, folder, steps=[], sources=[])
        add_tokenizer(folder)
    return folder


def _measure(name: str, source: Path) -> dict[str, list[float]]:
    """Milliseconds per token in one process and in two."""
    folder = FOLDER / name
    if not folder.exists():
        run(llmconv("export", source, "-o", folder, "--stages", "2"))
    prompt = np.random.default_rng(0).integers(3, SMALL["vocab_size"], PROMPT).tolist()
    waits: dict[str, list[float]] = {ONE: [], TWO: []}
    tokens: dict[str, list[int]] = {}
    with _stage(folder) as address:
        settings = SessionSettings(threads=THREADS)
        models = {
            ONE: TextModel.open(folder, settings=settings),
            TWO: TextModel.open(folder, settings=settings, stages=StageAddresses([address])),
        }
        for at in range(ROUNDS + 1):
            for way, opened in models.items():
                tokens[way], found = _generate(opened, prompt)
                waits[way] += found if at else []
    if tokens[ONE] != tokens[TWO]:
        sys.exit("the tokens differ")
    return waits


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
