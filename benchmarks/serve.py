"""`llmconv serve` with many streams at once: tokens per second, the first token next to a long prompt, and memory."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import small_model
from benchmarks.measure import FOLDER, Target, llmconv, report, run

STREAMS, NEW, ROUNDS = 16, 128, 3
LONG, SHORT = 2000, 20  # tokens of prompts
TOKENS = 16  # of the tokenizer
FEW, MANY = 100, 5000  # requests after which memory is compared
HEADERS = {"Content-Type": "application/json"}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address `host:port` of a server, and its process."""
    command = llmconv("serve", folder, "--port", "0", "--threads", "2", "--json", "--queue", "64", "--speculate", "off")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())["address"].removeprefix("http://"), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def first_and_last(address: str, prompt: list[int], new: int) -> tuple[float, float]:
    """Seconds from a request to the first token of its answer, and to its end, which comes after `new` tokens."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    client = http.client.HTTPConnection(address, timeout=600)
    started, first, made = time.perf_counter(), 0.0, 0
    client.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    answer = client.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - started
            made = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", made)
    client.close()
    if made != new:
        sys.exit(f"an answer has {made} tokens instead of {new}")
    return first, time.perf_counter() - started


def prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens, so that the text does not repeat itself and no prompt begins like another one."""
    return random.Random(seed).choices(range(TOKENS), k=tokens)


def tokens_per_second(address: str, streams: int, seed: int) -> float:
    """Of `streams` requests that come at once."""
    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        every = [pool.submit(first_and_last, address, prompt(SHORT + at, seed + at), NEW) for at in range(streams)]
        for one in every:
            one.result()
        return streams * NEW / (time.perf_counter() - started)


def first_next_to_a_long_prompt(address: str, seed: int) -> float:
    """Seconds to the first token of a short request that comes while a long prompt runs."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(first_and_last, address, prompt(LONG, seed), 1)
        time.sleep(0.3)
        first = first_and_last(address, prompt(SHORT, seed + 1), 1)[0]
        if other.done():
            sys.exit("the long prompt had ended before the short one began")
        other.result()
    return first


def memory_ratio(address: str, process: psutil.Process) -> float:
    """Resident memory after many requests over that after few."""
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda seed: first_and_last(address, prompt(SHORT, seed), 2), range(FEW)))
        before = process.memory_info().rss
        list(pool.map(lambda seed: first_and_last(address, prompt(SHORT, seed), 2), range(FEW, MANY)))
    return float(process.memory_info().rss / before)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "served"
    if not folder.exists():
        run(llmconv("export", small_model.model(), "-o", folder))
    with serving(folder) as (address, process):
        first_and_last(address, prompt(SHORT, 0), 8)
        one, many, alone, concurrent = [], [], [], []
        for round_ in range(ROUNDS):
            seed = 1000 * (round_ + 1)
            one.append(tokens_per_second(address, 1, seed))
            many.append(tokens_per_second(address, STREAMS, seed + 100))
            alone.append(first_and_last(address, prompt(SHORT, seed + 200), 1)[0])
            concurrent.append(first_next_to_a_long_prompt(address, seed + 300))
        growth = memory_ratio(address, process)
    speed = [statistics.median(taken) for taken in (one, many)]
    first = [1000 * statistics.median(taken) for taken in (alone, concurrent)]
    lines = [
        "| what | result |",
        "| --- | --- |",
        f"| 1 stream of {NEW} tokens | {speed[0]:.1f} tokens/s |",
        f"| {STREAMS} streams of {NEW} tokens | {speed[1]:.1f} tokens/s |",
        f"| first token, prompt of {SHORT}, alone | {first[0]:.0f} ms |",
        f"| first token while a prompt of {LONG} runs | {first[1]:.0f} ms |",
        f"| memory after {MANY:,} requests over that after {FEW} | {growth:.3f} |",
    ]
    targets = [
        Target(f"{STREAMS} streams: times the tokens per second of one", speed[1] / speed[0], 3.5, at_least=True),
        Target("first token next to a long prompt, less 100 ms, over alone", (first[1] - 100) / first[0], 1.5),
        Target(f"memory after {MANY:,} requests over that after {FEW}", growth, 1.05),
    ]
    head = (
        f"A random 135 M Llama in float32, two threads, no guessed tokens (`--speculate off`), "
        f"medians of {ROUNDS} rounds, clients in one process next to it."
    )
    return report("serve", "Many requests at once", "\n".join([head, "", *lines]), targets)


if __name__ == "__main__":
    sys.exit(main())
