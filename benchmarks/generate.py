"""Greedy generation: llmconv compared with GenAI, optimum and transformers; the cost of the loop and of a step."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks import environments
from benchmarks.exporters import GENAI, OPTIMUM
from benchmarks.measure import Target, report
from benchmarks.small_model import CONFIG, FOR_ORT, HEAD_DIM, KV_HEADS, OURS, graphs, model
from benchmarks.step import THREADS
from llmconv.bench import BenchCandidate, BenchResult, bench
from llmconv.bench.own_loop import open_text_model
from llmconv.generation import GenerationSettings
from llmconv.runtime.tokenizer import random_prompts

LENGTHS, LONG = (128, 2048), 8192
NEW, ROUNDS, LONG_ROUNDS = 64, 5, 2
QUICK = "--quick" in sys.argv
"""One short round: whether it runs, not how fast."""

MADE = (OURS, FOR_ORT, GENAI, OPTIMUM)
TORCH = "transformers' generate"
COPIED = 256_000_000
RUNS = ("run", "run_with_iobinding", "run_with_ort_values")


def candidates() -> dict[str, str]:
    """Name in the table to candidate of `llmconv bench`; the first is what the others are compared with."""
    folders = {name: path.parent for name, path in graphs("decode", MADE).items()}
    return {
        f"{OURS}, no options": f"packed:{folders[OURS]}",  # `--form auto` packs where memory allows
        f"{OURS}, `--form mapped`": str(folders[OURS]),
        f"{FOR_ORT}, `--prepack`": f"packed:{folders[FOR_ORT]}",
        GENAI: f"genai:{folders[GENAI]}",
        OPTIMUM: f"optimum:{folders[OPTIMUM]}",
        TORCH: f"torch:{model()}",
    }


def interpreters() -> dict[str, str]:
    """Where the other runtimes are installed."""
    return {"genai": str(environments.python("builders")), "optimum": str(environments.python("optimum"))}


def lines(result: BenchResult, names: Sequence[str], length: int) -> list[str]:
    """A Markdown row per candidate."""
    cells = [result.cell(candidate, 1, length) for candidate in result.candidates]
    base = statistics.median(cells[0].decode)
    return [
        f"\n| prompt of {length} tokens | prompt tokens/s | new tokens/s | range | times the first's | MB | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {statistics.median(cell.prefill):.0f} | {statistics.median(cell.decode):.1f} "
            f"| {min(cell.decode):.1f} to {max(cell.decode):.1f} | {statistics.median(cell.decode) / base:.2f} "
            f"| {cell.peak / 1e6:.0f} | {'same' if cell.differs is None else f'differ from {cell.differs[1]} on'} |"
            for name, cell in zip(names, cells, strict=True)
        ),
    ]


def speed_targets(result: BenchResult, names: Sequence[str], length: int) -> list[Target]:
    """How many times as fast as the others the first is."""
    speeds = {
        name: statistics.median(result.cell(candidate, 1, length).decode)
        for name, candidate in zip(names, result.candidates, strict=True)
    }
    ours = speeds[names[0]]
    limits = {GENAI: 1.0, OPTIMUM: 1.3, TORCH: 2.0}
    return [
        Target(f"prompt of {length}: times as fast as {name}", ours / speeds[name], limit, at_least=True)
        for name, limit in limits.items()
        if name in speeds
    ]


def loop_milliseconds(folder: Path) -> list[float]:
    """Per token of a greedy stream: the time that is not spent inside of onnxruntime's run."""
    inside = [0.0]
    originals = {name: getattr(onnxruntime.InferenceSession, name) for name in RUNS}

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*arguments, **named)
            finally:
                inside[0] += time.perf_counter() - started

        return wrapper

    try:
        for name, run in originals.items():
            setattr(onnxruntime.InferenceSession, name, timed(run))
        stream = open_text_model(str(folder), THREADS, prepack=True).stream(
            random_prompts(range(3, CONFIG["vocab_size"]), 1, LENGTHS[0]), GenerationSettings(max_new_tokens=NEW)
        )
        next(stream)
        found: list[float] = []
        while True:
            inside[0], started = 0.0, time.perf_counter()
            if next(stream, None) is None:
                return found
            found.append(1000 * (time.perf_counter() - started - inside[0]))
    finally:
        for name, run in originals.items():
            setattr(onnxruntime.InferenceSession, name, run)


def copied_per_second() -> float:
    """Bytes per second of a copy by as many threads as a session has, the best of nine."""
    source = np.ones(COPIED // 4, dtype=np.float32)
    target = np.empty_like(source)
    target[:] = 0
    parts = list(zip(np.array_split(target, THREADS), np.array_split(source, THREADS), strict=True))

    def seconds(pool: ThreadPoolExecutor) -> float:
        started = time.perf_counter()
        list(pool.map(lambda part: np.copyto(*part), parts))
        return time.perf_counter() - started

    with ThreadPoolExecutor(THREADS) as pool:
        return float(source.nbytes / min(seconds(pool) for _ in range(9)))


def bound_milliseconds() -> float:
    """Weights and cache of a step at the long past, read once at the speed of a copy."""
    weights = (model() / "model.safetensors").stat().st_size
    cache = CONFIG["num_hidden_layers"] * 2 * KV_HEADS * HEAD_DIM * 4 * (LONG + NEW // 2)
    return float(1000 * (weights + cache) / copied_per_second())


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    chosen = candidates()
    names, specs = list(chosen), list(chosen.values())
    lengths, new, rounds = (LENGTHS[:1], 8, 1) if QUICK else (LENGTHS, NEW, ROUNDS)
    given: dict[str, Any] = {"new_tokens": new, "threads": THREADS}
    others = [BenchCandidate.parse(spec, None, interpreters()) for spec in specs[1:]]
    result = bench(specs[0], against=others, lengths=lengths, repeat=rounds, **given)
    failed = [cell for cell in result.cells if cell.error]
    if failed:
        sys.exit(f"{failed[0].candidate}: {failed[0].error}")
    targets = [target for length in lengths for target in speed_targets(result, names, length)]
    tables = [line for length in lengths for line in lines(result, names, length)]
    overhead = loop_milliseconds(graphs("decode", MADE)[OURS].parent)
    targets.append(Target("ms per token outside of onnxruntime", statistics.median(overhead), 1.0))
    notes = [f"The loop outside of onnxruntime took {min(overhead):.2f} to {max(overhead):.2f} ms per token."]
    if not QUICK:
        before = bound_milliseconds()
        few = [name for name in names if name in (names[0], GENAI, TORCH)]
        peers = [other for name, other in zip(names[1:], others, strict=True) if name in few]
        long = bench(specs[0], against=peers, lengths=(LONG,), repeat=LONG_ROUNDS, **given)
        targets += speed_targets(long, few, LONG)
        tables += lines(long, few, LONG)
        step = 1000 * statistics.median(long.cell(long.candidates[0], 1, LONG).step)
        bound = min(before, bound_milliseconds())
        targets.append(Target(f"step at past {LONG} / its bytes at the speed of a copy", step / bound, 1.5))
        notes.append(f"A step at past {LONG} took {step:.1f} ms, a copy of as many bytes {bound:.1f} ms.")
    body = "\n".join(
        [
            f"A 135 M Llama in float32, greedy, {new} new tokens, one prompt, {THREADS} threads, medians of {rounds}",
            "rounds in turn, by `llmconv bench`; MB are the peak of the process. Tokens are compared with the first's.",
            "Without options `chat` and `serve` pack the weights, `generate` does for 512 new tokens and more; fewer",
            "run as with `--form mapped`.",
            *tables,
            "",
            *notes,
        ]
    )
    return report("generate", "Generation", body, targets)


if __name__ == "__main__":
    sys.exit(main())
