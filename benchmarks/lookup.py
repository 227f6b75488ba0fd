"""Generation with guessed tokens (`--speculate lookup`) against the same loop without: a code edit, and free text."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.measure import FOLDER, Target, llmconv, remove, report, run
from benchmarks.smollm2 import smollm2
from llmconv.generation import TextModel
from llmconv.generation.loop import LOOKUP, Batch, Lookup, grow
from llmconv.generation.row import Row, RowStart
from llmconv.runtime import SessionSettings
from llmconv.tensors import Array

THREADS, ROUNDS = 2, 3
FORMS = {  # options of `export`, and `--form`
    "default": ((), "auto"),
    "default, `--form mapped`": ((), "mapped"),
    "default, `--form file`": ((), "file"),
    "`--quant int4`": (("--quant", "int4"), "auto"),
}
CODE = Path("benchmarks/llama_cpp.py")
RENAMED = "environments", "places"
EDIT_TOKENS = 400
FREE = ("The history of the town begins", "My grandmother used to say that", "In the summer of 1969, a young")
FREE_TOKENS = 128


@dataclass(frozen=True)
class Timed:
    """Seconds per new token after the first, tokens per call, and the tokens."""

    seconds: float
    per_call: float
    tokens: Sequence[int]


def timed(model: TextModel, prompt: str, new: int, forced: Sequence[int] = ()) -> Timed:
    """One greedy text without an end; the new tokens are `forced`, whatever the logits, if any are given."""
    ids = model.encode(prompt)

    def force(tokens: Array, logits: Array) -> Array:
        scores = np.full_like(logits, -np.inf)
        scores[forced[len(tokens) - len(ids)]] = 0.0
        return scores

    settings = model.defaults.but(max_new_tokens=new, eos_token_id=())
    row = Row(0, RowStart(ids, new), settings, model.decode, force if forced else None)
    guessed, started = 0, 0.0
    lookup = Lookup() if model.speculate == LOOKUP else None
    for piece in grow(Batch(model.runner, [row], model.positions, lookup)):
        started = started or time.perf_counter()
        guessed += piece.guessed
    return Timed((time.perf_counter() - started) / (new - 1), new / (new - guessed), row.ids[len(ids) :].tolist())


def measured(
    model: TextModel, prompts: Sequence[str], new: int, forced: Sequence[int] = ()
) -> tuple[float, float, float]:
    """Median of the ratio of the times, milliseconds per token with guesses, and tokens per call.

    Raises:
        SystemExit: the tokens differ.
    """
    off, ratios, times, calls = replace(model, speculate="off"), [], [], []
    for prompt in prompts:
        timed(off, prompt, 8, forced)
        for number in range(ROUNDS):
            both = [timed(one, prompt, new, forced) for one in ((off, model) if number % 2 else (model, off))]
            alone, guessing = both if number % 2 else both[::-1]
            if alone.tokens != guessing.tokens:
                sys.exit(f"{model}: other tokens after {prompt[-60:]!r}")
            ratios.append(alone.seconds / guessing.seconds)
            times.append(1000 * guessing.seconds)
            calls.append(guessing.per_call)
    return statistics.median(ratios), statistics.median(times), statistics.median(calls)


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    lines, targets = [], []
    source = CODE.read_text()
    prompt = f"```python\n{source}```\n\nThe same file, with `{RENAMED[0]}` renamed to `{RENAMED[1]}`:\n\n```python\n"
    for number, (name, (options, form)) in enumerate(FORMS.items()):
        folder = FOLDER / f"lookup-{number}"
        if not folder.exists():
            run(llmconv("export", smollm2(), "-o", folder, *options))
        model = TextModel.open(folder, settings=SessionSettings(threads=THREADS), form=form)
        edited = model.encode(source.replace(*RENAMED))
        edit = measured(model, (prompt,), min(EDIT_TOKENS, len(edited)), edited)
        free = measured(model, FREE, FREE_TOKENS)
        for task, (ratio, milliseconds, calls), limit in (("code edit", edit, 2.5), ("free text", free, 0.98)):
            lines.append(f"| {name} | {task} | {milliseconds:.1f} | {calls:.2f} | {ratio:.2f} |")
            targets.append(Target(f"{name}, {task}: times as fast as without", ratio, limit, at_least=True))
        print(*lines[-2:], sep="\n", file=sys.stderr)
        remove(folder)
    body = "\n".join(
        [
            f"SmolLM2-135M-Instruct, greedy, {THREADS} threads, medians of {ROUNDS} rounds in turn. Code edit: a",
            f"Python file, then the same with `{RENAMED[0]}` renamed; this model is too small to write that: it",
            "runs every call, but the tokens picked are those of the file. Free text:",
            f"{len(FREE)} beginnings, {FREE_TOKENS} new tokens. Guesses changed no token.",
            "",
            "| graphs | text | ms per token | tokens per call | times as fast as `--speculate off` |",
            "| --- | --- | --- | --- | --- |",
            *lines,
        ]
    )
    return report("lookup", "Several tokens per call", body, targets)


if __name__ == "__main__":
    sys.exit(main())
