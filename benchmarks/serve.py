"""`llmconv serve` with many streams at once: tokens per second, the first token next to a long prompt, and memory.

And what a JSON schema of 40 fields costs per token, and how fast several answers to one request are. With `--small`
one round and few requests, to see that it runs.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import llama_cpp, small_model
from benchmarks.measure import FOLDER, Target, llmconv, report, run
from benchmarks.smollm2 import smollm2

STREAMS, NEW, ROUNDS = 16, 128, 3
LONG, SHORT = 2000, 20  # tokens of prompts
TOKENS = 16  # of the tokenizer
OURS, LLAMA_CPP = "llmconv", "llama.cpp's server"
FEW, MANY = 100, 5000  # requests after which memory is compared
ANSWERS = 8  # of one request
FIELDS = 40  # of the schema
SMALL_ROUNDS, SMALL_MANY = 1, 300
VOCABULARY, END = small_model.CONFIG["vocab_size"], "<|end|>"
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


@contextmanager
def serving_llama_cpp(program: Path, file: Path) -> Iterator[str]:
    """The address of llama.cpp's server with as many slots as there are streams."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    room = str(STREAMS * (SHORT + STREAMS + NEW + 64))
    command = [str(program), "-m", str(file), "--port", port, "-t", "2", "-np", str(STREAMS), "-c", room, "--no-webui"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.1)
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == HTTPStatus.OK:
                    break
        else:
            sys.exit("llama.cpp's server does not answer")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def next_to_llama_cpp(rounds: int) -> dict[str, float]:
    """Tokens per second of all streams of SmolLM2, by server; empty where llama.cpp's cannot be built."""
    if (program := llama_cpp.server()) is None:
        return {}
    folder, file = FOLDER / "served-smollm2", FOLDER / "served-smollm2.gguf"
    if not folder.exists():
        run(llmconv("export", smollm2(), "-o", folder))
    if not file.exists():
        run(llmconv("to-gguf", smollm2(), "-o", file, "--type", "f32"))
    taken: dict[str, list[float]] = {OURS: [], LLAMA_CPP: []}
    with serving(folder) as (ours, _), serving_llama_cpp(program, file) as theirs:
        for round_ in range(rounds + 1):
            for name, address in ((OURS, ours), (LLAMA_CPP, theirs)):
                speed = tokens_per_second(address, STREAMS, 1000 * round_, ignore_eos=True)
                taken[name] += [speed] if round_ else []  # the first is a warm-up
    return {name: statistics.median(speeds) for name, speeds in taken.items()}


def first_and_last(address: str, prompt: list[int], new: int, **fields: Any) -> tuple[float, float]:
    """Seconds from a request to the first token of its answer, and to its end, which comes after `new` tokens.

    Of `n` answers `new` is the number of tokens of all. `fields` are further ones of the request.
    """
    count = fields.get("n", 1)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": new // count, "temperature": 0, "stream": True, **fields}
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


def tokens_per_second(address: str, streams: int, seed: int, **fields: Any) -> float:
    """Of `streams` requests that come at once."""
    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        prompts = [prompt(SHORT + at, seed + at) for at in range(streams)]
        every = [pool.submit(first_and_last, address, one, NEW, **fields) for one in prompts]
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


def answers_per_second(address: str, seed: int) -> float:
    """Tokens per second of several answers to one request."""
    new = ANSWERS * NEW
    return (
        new / first_and_last(address, prompt(SHORT, seed), new, n=ANSWERS, temperature=1, seed=seed, ignore_eos=True)[1]
    )


def schema() -> dict[str, Any]:
    """An object of 40 required fields of five kinds, which needs more tokens than an answer of the benchmark has."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 99999},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    ]
    properties = {f"field_{at:02}": kinds[at % len(kinds)] for at in range(FIELDS)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def per_token(address: str, seed: int, **fields: Any) -> float:
    """Milliseconds per token after the first one, of one stream."""
    first, last = first_and_last(address, prompt(SHORT, seed), NEW, temperature=1, seed=seed, **fields)
    return 1000 * (last - first) / (NEW - 1)


def add_vocabulary(folder: Path) -> None:
    """Gives a folder a byte-level tokenizer with as many tokens as the model has logits, of random pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    usual, picks = [*string.ascii_letters, *string.digits, *'_-.,:{}[]"', "\u0120"], random.Random(0)
    known, merges = dict.fromkeys(letters), list[tuple[str, str]]()
    while len(known) < VOCABULARY - 1:
        pair = (picks.choice(usual), picks.choice(usual))
        if len(joined := "".join(pair)) <= 12 and joined not in known:
            known[joined] = None
            usual.append(joined)
            merges.append(pair)
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(known)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder)
    end = {"eos_token_id": made.token_to_id(END)}
    (folder / "generation_config.json").write_text(json.dumps(end))


def with_vocabulary(folder: Path) -> Path:
    """The same model with that tokenizer."""
    worded = folder.with_name(f"{folder.name}-worded")
    if not worded.exists():
        shutil.copytree(folder, worded, copy_function=os.link)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
            (worded / name).unlink(missing_ok=True)
        add_vocabulary(worded)
    return worded


def memory_ratio(address: str, process: psutil.Process, most: int) -> float:
    """Resident memory after `most` requests over that after few."""
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda seed: first_and_last(address, prompt(SHORT, seed), 2), range(FEW)))
        before = process.memory_info().rss
        list(pool.map(lambda seed: first_and_last(address, prompt(SHORT, seed), 2), range(FEW, most)))
    return float(process.memory_info().rss / before)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    is_small = "--small" in sys.argv
    rounds, requests = (SMALL_ROUNDS, SMALL_MANY) if is_small else (ROUNDS, MANY)
    folder = FOLDER / "served"
    if not folder.exists():
        run(llmconv("export", small_model.model(), "-o", folder))
    taken: dict[str, list[float]] = {}

    def note(name: str, figure: float) -> None:
        taken.setdefault(name, []).append(figure)

    with serving(folder) as (address, process):
        first_and_last(address, prompt(SHORT, 0), 8)
        for round_ in range(rounds):
            seed = 1000 * (round_ + 1)
            note("one", tokens_per_second(address, 1, seed))
            note("many", tokens_per_second(address, STREAMS, seed + 100))
            note("answers", answers_per_second(address, seed + 150))
            note("alone", 1000 * first_and_last(address, prompt(SHORT, seed + 200), 1)[0])
            note("next to a long one", 1000 * first_next_to_a_long_prompt(address, seed + 300))
        growth = memory_ratio(address, process, requests)
    with serving(with_vocabulary(folder)) as (address, _):
        per_token(address, 1, guided_json=schema())
        for round_ in range(rounds):
            note("free", per_token(address, round_ + 2, ignore_eos=True))
            note("formed", per_token(address, round_ + 2, guided_json=schema()))
    middle = {name: statistics.median(figures) for name, figures in taken.items()}
    peers = next_to_llama_cpp(rounds)
    cost = middle["formed"] / middle["free"] - 1
    lines = [
        "| what | result |",
        "| --- | --- |",
        f"| 1 stream of {NEW} tokens | {middle['one']:.1f} tokens/s |",
        f"| {STREAMS} streams of {NEW} tokens | {middle['many']:.1f} tokens/s |",
        f"| {ANSWERS} answers to one request, of {NEW} tokens each | {middle['answers']:.1f} tokens/s |",
        *(f"| {STREAMS} streams of SmolLM2-135M, {name} | {speed:.1f} tokens/s |" for name, speed in peers.items()),
        f"| first token, prompt of {SHORT}, alone | {middle['alone']:.0f} ms |",
        f"| first token while a prompt of {LONG} runs | {middle['next to a long one']:.0f} ms |",
        f"| a token of 1 stream, vocabulary of {VOCABULARY:,} | {middle['free']:.1f} ms |",
        f"| the same by a JSON schema of {FIELDS} fields | {middle['formed']:.1f} ms |",
        f"| memory after {requests:,} requests over that after {FEW} | {growth:.3f} |",
    ]
    shared, late = middle["many"] / middle["one"], (middle["next to a long one"] - 100) / middle["alone"]
    targets = [
        Target(f"{STREAMS} streams: times the tokens per second of one", shared, 3.5, at_least=True),
        Target(
            f"{ANSWERS} answers to one request: times the tokens per second of one",
            middle["answers"] / middle["one"],
            2.5,
            at_least=True,
        ),
        *(
            [
                Target(
                    f"{STREAMS} streams: tokens per second / {LLAMA_CPP}",
                    peers[OURS] / peers[LLAMA_CPP],
                    1,
                    at_least=True,
                )
            ]
            if peers
            else []
        ),
        Target("first token next to a long prompt, less 100 ms, over alone", late, 1.5),
        Target(f"what a schema of {FIELDS} fields adds to a token", cost, 0.1),
        Target(f"memory after {requests:,} requests over that after {FEW}", growth, 1.05),
    ]
    head = (
        f"A random 135 M Llama in float32, two threads, no guessed tokens (`--speculate off`), "
        f"medians of {rounds} rounds, clients in one process next to it."
    )
    return report("serve", "Many requests at once", "\n".join([head, "", *lines]), targets)


if __name__ == "__main__":
    sys.exit(main())
