"""bench: measures several candidates in turn, at every batch size and prompt length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path

from llmconv.argument_checks import checked, require_least, require_threads
from llmconv.bench.results import BenchResult, Measurement, first_difference
from llmconv.bench.runtimes import BenchCandidate, WorkerProcess
from llmconv.errors import Inconclusive, UsageProblem
from llmconv.files.copying import cores
from llmconv.files.sources import fetches
from llmconv.runtime.calibration_text import random_prompts, usable_tokens
from llmconv.runtime.context_length import context_length
from llmconv.runtime.onnxruntime.session_settings import provider_name

OWN = ("onnx", "packed")
"""Runtimes that use the onnxruntime of this process's environment."""

LENGTHS = (128, 512, 2048, 8192)
NEW_TOKENS, REPEAT = 32, 3
PAUSE = 0.1
"""Seconds between two candidates, since the threads of the previous one busy-wait for a while."""


@fetches
@checked
def bench(  # noqa: PLR0913 - one parameter per option of the command
    model: str | Path | BenchCandidate,
    *,
    against: Sequence[str | Path | BenchCandidate] = (),
    lengths: Sequence[int] = (),
    batch_sizes: Sequence[int] = (1,),
    new_tokens: int = NEW_TOKENS,
    repeat: int = REPEAT,
    threads: int = 0,
    provider: str = "cpu",
    on_cell: Callable[[Measurement], object] | None = None,
) -> BenchResult:
    """Measures greedy search; the candidates take turns, so that noise of the machine affects all of them.

    Args:
        model: a folder with graphs, or another candidate; the others are compared with it.
        against: other candidates, see `BenchCandidate.parse`.
        lengths: prompt lengths in tokens; default: those of 128, 512, 2048 and 8192 that fit in the context, or the
            whole context if that is shorter.
        batch_sizes: numbers of prompts per batch, all of one length.
        new_tokens: number of new tokens after each prompt, at least 2.
        repeat: number of measured rounds, after one to warm up.
        threads: threads of each candidate; 0 for the cores that this process may use.
        provider: execution provider of onnxruntime; torch computes on the device of that name.
        on_cell: called with every finished measurement.

    Raises:
        InputRefused: a candidate cannot be opened.
        UsageProblem: a length beyond the context, or an invalid candidate.
        Inconclusive: no candidate ran at all.
    """
    _require_positive(lengths=lengths, batch_sizes=batch_sizes, repeat=(repeat,))
    require_least(new_tokens, 2, "new_tokens")
    threads = require_threads(threads) or cores()
    candidates = _candidates(model, against, provider)
    lengths = lengths_within(candidates[0].folder, lengths, new_tokens)
    tokens = usable_tokens(candidates[0].folder)
    cells: list[Measurement] = []
    with ExitStack() as stack:
        opened = (WorkerProcess(candidate, threads, provider) for candidate in candidates)
        workers = [stack.enter_context(closing(worker)) for worker in opened]
        for batch, length in product(batch_sizes, lengths):
            for cell in _measure(workers, random_prompts(tokens, batch, length), new_tokens, repeat):
                cells.append(cell)
                if on_cell:
                    on_cell(cell)
        versions = {worker.candidate.name: worker.versions for worker in workers}
    if all(cell.error for cell in cells):
        raise Inconclusive(f"nothing could be measured: {cells[0].error}", hint="see `llmconv generate` on the folder")
    return BenchResult([candidate.name for candidate in candidates], versions, cells, new_tokens, repeat, threads)


def _candidates(
    model: str | Path | BenchCandidate, against: Sequence[str | Path | BenchCandidate], provider: str
) -> list[BenchCandidate]:
    first = model if isinstance(model, BenchCandidate) else BenchCandidate.parse(str(model))
    others = (
        other if isinstance(other, BenchCandidate) else BenchCandidate.parse(str(other), first.folder)
        for other in against
    )
    candidates = [first, *others]
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise UsageProblem("duplicate candidate", hint="give each `--against` once, and not FOLDER itself")
    if any(candidate.kind in OWN for candidate in candidates):
        provider_name(provider)  # refuses one that this onnxruntime does not have
    return candidates


def _require_positive(**given: Sequence[int]) -> None:
    for name, numbers in given.items():
        for number in numbers:
            require_least(number, 1, name)


def _measure(workers: Sequence[WorkerProcess], prompts: list[list[int]], new: int, repeat: int) -> list[Measurement]:
    """One round to warm up, in which tokens are compared, and `repeat` measured ones; every other in reverse order."""
    cells = [Measurement(worker.candidate.name, len(prompts), len(prompts[0])) for worker in workers]
    pairs = list(zip(workers, cells, strict=True))
    expected: list[list[int]] | None = None
    for number in range(repeat + 1):
        for worker, cell in pairs if number % 2 == 0 else reversed(pairs):
            if cell.error:
                continue
            time.sleep(PAUSE)
            answer = worker.run(prompts, new, expected or ())
            cell.error = answer.get("error", "")
            if not cell.error and number:
                cell.take(answer)
            elif not cell.error:
                expected = expected or answer["tokens"]
                cell.differs = first_difference(expected, answer["tokens"])
    return cells


def lengths_within(folder: Path, lengths: Sequence[int], new: int) -> list[int]:
    """The given lengths, or the default ones that leave room for `new` tokens, or the longest that does.

    Raises UsageProblem if a given length leaves no room in the context of the model in `folder`.
    """
    context = context_length(folder)
    fitting = [length for length in lengths or LENGTHS if context is None or length + new <= context]
    if not lengths and not fitting and context is not None:
        fitting = [context - new] if context > new else []
    if len(fitting) < len(lengths) or not fitting:
        wanted = f"{new} tokens after {max(lengths)}" if lengths else f"{new} tokens and a prompt"
        raise UsageProblem(
            f"{wanted} are more than the model's context of {context}",
            hint="give smaller `--lengths` or `--new-tokens`",
        )
    return fitting
