"""`bench`: candidates, each a runtime and a folder, are measured in turn, each in a process of its own."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked, require_least, require_threads
from llmconv.causal_lm import context_length
from llmconv.errors import Inconclusive, InputRefused, UsageProblem
from llmconv.files.copying import cores
from llmconv.files.paths import Written, path_of
from llmconv.files.safe_folder import replace_file
from llmconv.files.sources import export_command, fetches, is_remote, local_path, snapshot_home, source_name
from llmconv.interpreters import child_environment, script_command
from llmconv.runtime.onnxruntime.session_file import CONFIG, read_genai_config
from llmconv.runtime.onnxruntime.session_settings import provider_name, short_provider
from llmconv.runtime.tokenizer import random_prompts, usable_tokens


@dataclass
class Measurement:
    """One candidate at one batch size and length, with one figure per round.

    Attributes:
        candidate: its name.
        batch: number of prompts.
        length: tokens of each prompt.
        first: seconds to the first token.
        step: seconds per new token of each prompt after the first.
        per_call: new tokens per call of the model, 1 for runtimes that guess none.
        peak: largest resident set of its process, in bytes.
        differs: row and index of the earliest new token that differs from the first candidate's; None if none does.
        error: why there are no figures; empty if there are.
    """

    candidate: str
    batch: int
    length: int
    first: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    per_call: list[float] = field(default_factory=list)
    peak: int = 0
    differs: tuple[int, int] | None = None
    error: str = ""

    def take(self, answer: dict[str, Any]) -> None:
        times = answer["times"]
        self.first.append(times[0])
        if len(times) > 1:
            self.step.append((times[-1] - times[0]) / (len(times) - 1))
        self.per_call.append(len(times) / (len(times) - answer.get("guessed", 0)))
        self.peak = max(self.peak, answer["peak"])

    @property
    def prefill(self) -> list[float]:
        """Prompt tokens per second until the first new token, for every round."""
        return [self.batch * self.length / seconds for seconds in self.first]

    @property
    def decode(self) -> list[float]:
        """New tokens per second after the first, over all rows, for every round."""
        return [self.batch / seconds for seconds in self.step]

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON and CSV: median, minimum and maximum."""
        return {
            "candidate": self.candidate,
            "batch_size": self.batch,
            "length": self.length,
            **_summary("prefill_tokens_per_second", self.prefill),
            **_summary("decode_tokens_per_second", self.decode),
            **_summary("time_to_first_token", self.first),
            **_summary("seconds_per_step", self.step),
            **_summary("tokens_per_call", self.per_call),
            "peak_bytes": self.peak,
            "differs_from_token": self.differs[1] if self.differs else None,
            "error": self.error,
        }


@dataclass(frozen=True)
class BenchResult:
    """All measurements, by batch size, then length, then candidate.

    Attributes:
        candidates: names; the others are compared with the first.
        versions: candidate to package to version.
        cells: the measurements.
        new: number of new tokens after each prompt.
        repeat: number of rounds.
        threads: threads of each candidate.
    """

    candidates: list[str]
    versions: dict[str, dict[str, str]]
    cells: list[Measurement]
    new: int
    repeat: int
    threads: int

    def __repr__(self) -> str:
        names, tokens = ", ".join(self.candidates), "same tokens" if self.agrees else "different tokens"
        return f"<BenchResult of {names}: {len(self.cells)} measurements, {tokens}>"

    @property
    def agrees(self) -> bool:
        """Whether all candidates that ran gave the same tokens."""
        return not any(cell.differs for cell in self.cells)

    def cell(self, candidate: str, batch: int, length: int) -> Measurement:
        place = candidate, batch, length
        return next(cell for cell in self.cells if (cell.candidate, cell.batch, cell.length) == place)

    def as_dict(self) -> dict[str, Any]:
        return {
            "new_tokens": self.new,
            "repeat": self.repeat,
            "threads": self.threads,
            "versions": self.versions,
            "same_tokens": self.agrees,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Row and index of the earliest token that differs; None if all are the same."""
    places = [
        (at, row)
        for row, (a, b) in enumerate(zip(expected, found, strict=True))
        for at in range(max(len(a), len(b)))
        if at >= min(len(a), len(b)) or a[at] != b[at]
    ]
    return (min(places)[1], min(places)[0]) if places else None


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    figures = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return dict(zip((name, f"{name}_min", f"{name}_max"), figures, strict=True))


HEAD = ("batch", "length", "candidate", "prompt tokens/s", "new tokens/s", "times first's", "peak MB", "tokens")


def table(result: BenchResult) -> str:
    """Medians, with minimum and maximum in brackets; `times first's` compares new tokens per second."""
    rows = [HEAD, *(_row(result, cell) for cell in result.cells)]
    sides = ["<" if name in ("candidate", "tokens") else ">" for name in HEAD]
    forms = [f"{side}{max(map(len, column))}" for side, column in zip(sides, zip(*rows, strict=True), strict=True)]
    lines = ["  ".join(map(format, row, forms)).rstrip() for row in rows]
    versions = [f"{name}: {', '.join(f'{p} {v}' for p, v in found.items())}" for name, found in result.versions.items()]
    numbers = (result.new, "new token"), (result.threads, "thread"), (result.repeat, "round")
    new, threads, rounds = (f"{count} {noun}{'s' * (count != 1)}" for count, noun in numbers)
    setting = f"{new}, greedy, {threads}, {rounds} in turn"
    differences = [
        f"DIFFERENT TOKENS: {cell.candidate} at batch {cell.batch}, length {cell.length}: "
        f"row {cell.differs[0]} differs from {result.candidates[0]}'s from new token {cell.differs[1]} on"
        for cell in result.cells
        if cell.differs
    ]
    return "\n".join([*lines, "", f"{setting}; median (min-max)", *versions, *differences])


def _row(result: BenchResult, cell: Measurement) -> tuple[str, ...]:
    place = str(cell.batch), str(cell.length), cell.candidate
    if cell.error:
        return (*place, "-", "-", "-", "-", f"failed: {cell.error}")
    first = result.cell(result.candidates[0], cell.batch, cell.length)
    ratio = f"{statistics.median(cell.decode) / statistics.median(first.decode):.2f}" if first.decode else "-"
    tokens = "same" if cell.differs is None else f"differ from {cell.differs[1]} on"
    if (per_call := statistics.median(cell.per_call)) >= 1.05:
        tokens += f", {per_call:.1f} per call"
    return (*place, _figures(cell.prefill), _figures(cell.decode), ratio, f"{cell.peak / 1e6:.0f}", tokens)


def _figures(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else "-"


@checked
def write_csv(result: BenchResult, path: Written) -> None:
    """Writes one line per measurement, with the versions of the packages."""
    rows = [
        {**cell.as_dict(), "versions": " ".join(f"{p}={v}" for p, v in result.versions[cell.candidate].items())}
        for cell in result.cells
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    replace_file(Path(path), text.getvalue().encode())


SUFFIXES = (".png", ".svg", ".pdf")
PANELS = (("prefill", "prompt tokens/s"), ("decode", "new tokens/s"))


@checked
def require_plotting(path: Written) -> None:
    """Raises InputRefused or UsageProblem, before any measurement, if matplotlib or the suffix is not supported."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageProblem(f"`{path}` is not a supported picture format", hint=f"end the name in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputRefused("`--plot` needs matplotlib", hint="`pip install matplotlib`, or `--csv FILE`")


@checked
def write_plot(result: BenchResult, path: Written) -> None:
    """Plots tokens per second over prompt length, one row per batch size; bars show minimum and maximum."""
    path = Path(path)
    require_plotting(path)
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # it has read a `matplotlibrc` of the current folder, which may start TeX
        figure_module = importlib.import_module("matplotlib.figure")
        batches = sorted({cell.batch for cell in result.cells})
        figure = figure_module.Figure(figsize=(11, 4 * len(batches)), layout="constrained")
        panels = figure.subplots(len(batches), len(PANELS), squeeze=False)
        for row, batch in zip(panels, batches, strict=True):
            for axes, (kind, label) in zip(row, PANELS, strict=True):
                _draw(axes, [cell for cell in result.cells if cell.batch == batch], result.candidates, kind)
                axes.set(title=f"batch size {batch}", xlabel="tokens of the prompt", ylabel=label)
        panels[0][0].legend(fontsize="small")
        replace_file(path, lambda file: figure.savefig(file, dpi=150, format=path.suffix[1:].lower()))


def _draw(axes: Any, cells: Sequence[Measurement], candidates: Sequence[str], kind: str) -> None:
    lengths = sorted({cell.length for cell in cells})
    for name in candidates:
        curve = [(cell.length, getattr(cell, kind)) for cell in cells if cell.candidate == name and getattr(cell, kind)]
        middles = [statistics.median(values) for _, values in curve]
        spread = [
            [middle - min(values) for middle, (_, values) in zip(middles, curve, strict=True)],
            [max(values) - middle for middle, (_, values) in zip(middles, curve, strict=True)],
        ]
        axes.errorbar([length for length, _ in curve], middles, yerr=spread, marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


WORKER = Path(__file__).with_name("worker.py")
RUNTIMES = {
    "onnx": "llmconv's loop over the graphs",
    "packed": "the same, with weights packed by onnxruntime",
    "lookup": "the same, packed, with guessed tokens",
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
            problem = f"`{rest or text}` is not a folder"
            raise UsageProblem(problem, hint=f"give FOLDER or RUNTIME:FOLDER; runtimes: {', '.join(RUNTIMES)}")
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
            problem = f"`{candidate.interpreter}` cannot be started: {error.strerror}"
            raise InputRefused(problem, hint="give the path of a Python") from error
        answer = self._read()
        if "ready" not in answer:
            self.close()
            problem = f"`{candidate.name}` cannot be measured: {answer['error']}"
            raise InputRefused(problem, hint=answer.get("hint") or _hint(candidate))
        self.versions: dict[str, str] = answer["ready"]

    def run(self, prompts: Sequence[Sequence[int]], new: int, expected: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """The answer, as of `worker`, to prompts of one length; `expected`: the first candidate's tokens, if any."""
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
        if not (line := self._process.stdout.readline()):
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _hint(candidate: BenchCandidate) -> str:
    kind = candidate.kind
    packages = {"genai": "onnxruntime-genai", "optimum": "optimum-onnx", "torch": "transformers"}
    if kind not in packages:
        return f"export the graphs: `{export_command(candidate.folder)}`"
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
    for name, numbers in (("lengths", lengths), ("batch_sizes", batch_sizes), ("repeat", (repeat,))):
        for number in numbers:
            require_least(number, 1, name)
    require_least(new_tokens, 2, "new_tokens")
    threads = require_threads(threads) or cores()
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
        problem = f"{wanted} are more than the model's context of {context}"
        raise UsageProblem(problem, hint="give smaller `--lengths` or `--new-tokens`")
    return fitting
