"""`bench`: candidates, each a runtime and a folder, are measured in turn, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked, require_least, require_threads
from llmconv.bench.results import BenchResult, Measurement, first_difference
from llmconv.errors import Inconclusive, InputRefused, UsageProblem
from llmconv.files.copying import cores
from llmconv.files.hub import snapshot_home, source_name
from llmconv.files.paths import path_of
from llmconv.files.sources import fetches, is_remote, local_path
from llmconv.interpreters import child_environment, script_command
from llmconv.runtime.context_length import context_length
from llmconv.runtime.onnxruntime.session_file import CONFIG, read_genai_config
from llmconv.runtime.onnxruntime.session_settings import provider_name, short_provider
from llmconv.runtime.tokenizer import random_prompts, usable_tokens

WORKER = Path(__file__).with_name("worker.py")
RUNTIMES = {
    "onnx": "llmconv's loop over the graphs",
    "packed": "the same, with weights packed by onnxruntime",
    "torch": "transformers' generate over the eager model",
    "optimum": "optimum's ORTModelForCausalLM.generate",
    "genai": "ONNX Runtime GenAI",
}


@dataclass(frozen=True)
class BenchCandidate:
    """A folder of a model or graphs to measure, its runtime (`kind`, of `RUNTIMES`), and a Python that has it."""

    kind: str
    folder: Path
    interpreter: str = sys.executable

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_of(self.folder, "folder"))

    @classmethod
    def parse(
        cls, text: str, first: Path | None = None, interpreters: Mapping[str, str] | None = None
    ) -> BenchCandidate:
        """Parses `FOLDER`, `RUNTIME:FOLDER`, or `RUNTIME` alone, which stands for the folder `first`.

        `interpreters` are paths of a Python by runtime (default: this one). Raises UsageProblem if the folder does not
        exist.
        """
        kind, _, rest = text.partition(":")
        if kind not in RUNTIMES or Path(text).is_dir():
            kind, rest = "onnx", text
        folder = (local_path(rest) if is_remote(rest) else Path(rest)) if rest else first
        if folder is None or not folder.is_dir():
            known = ", ".join(RUNTIMES)
            raise UsageProblem(
                f"`{rest or text}` is not a folder", hint=f"give FOLDER or RUNTIME:FOLDER; runtimes: {known}"
            )
        return cls(kind, folder, (interpreters or {}).get(kind, sys.executable))

    @property
    def name(self) -> str:
        """The folder, with the runtime before it unless that is `onnx`."""
        folder = source_name(self.folder) if snapshot_home(self.folder) else str(self.folder)
        return folder if self.kind == "onnx" else f"{self.kind}:{folder}"


class WorkerProcess:
    """The process of a candidate on a provider of onnxruntime, or torch's device of that name.

    `versions` are those of the packages that run it. Raises InputRefused if the runtime is not installed or cannot open
    the folder, or the folder is unsafe.
    """

    def __init__(self, candidate: BenchCandidate, threads: int, provider: str = "cpu") -> None:
        self.candidate = candidate
        if candidate.kind == "genai" and (candidate.folder / CONFIG).is_file():
            read_genai_config(candidate.folder)
        arguments = candidate.kind, candidate.folder, threads, short_provider(provider)
        try:
            self._process = subprocess.Popen(
                script_command(candidate.interpreter, WORKER, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=child_environment(OMP_NUM_THREADS=str(threads)),
            )
        except OSError as error:
            raise InputRefused(
                f"`{candidate.interpreter}` cannot be started: {error.strerror}", hint="give the path of a Python"
            ) from error
        answer = self._read()
        if "ready" not in answer:
            self.close()
            raise InputRefused(
                f"`{candidate.name}` cannot be measured: {answer['error']}", hint=answer.get("hint") or _hint(candidate)
            )
        self.versions: dict[str, str] = answer["ready"]

    def run(self, prompts: Sequence[Sequence[int]], new: int, expected: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """The answer to one batch, in the format of `worker`; prompts are token ids, all of one length.

        `expected` are the new tokens of the first candidate; empty if this is the first.
        """
        if self._process.poll() is not None:
            return {"error": "the process has ended"}
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, "expected": expected}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _hint(candidate: BenchCandidate) -> str:
    kind = candidate.kind
    packages = {"genai": "onnxruntime-genai", "optimum": "optimum-onnx", "torch": "transformers"}
    if kind not in packages:
        return f"export the graphs: `llmconv export {candidate.folder}`"
    layout = f", and export with `llmconv export … --layout {kind}`" if kind != "torch" else ""
    return f"`pip install {packages[kind]}` here, or give `--python {kind}=PATH` of a Python that has it{layout}"


OWN = ("onnx", "packed")  # runtimes that use the onnxruntime of this process's environment
LENGTHS = (128, 512, 2048, 8192)
NEW_TOKENS, REPEAT = 32, 3
PAUSE = 0.1  # seconds between two candidates, since the threads of the previous one busy-wait for a while


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
    """Lengths (default: those that fit) with room for `new` tokens; UsageProblem for a given one without it."""
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
