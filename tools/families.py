"""Exports and verifies a tiny model of each type of language models of transformers, and writes a page of results.

    python -m tools.families --suite quick                 every type, one JSON line each, continued where it stopped
    python -m tools.families --only mixtral --only phi     again, these only
    python -m tools.families --precision float16           the same in half precision, lines of their own
    python -m tools.families --quant int4                  the same with quantized weights
    python -m tools.families --method induction            the same by induction over layers
    python -m tools.families --write docs/families.md      the page, from the lines

Every type runs in a process of its own with a time limit, so that a crash or an endless trace is one line as well.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import re
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.onnx
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llmconv.errors import LlmconvError
from llmconv.export import INPUT_MAPS, InputMap, export, register_input_map
from llmconv.export.families import NOT_EXPORTED
from llmconv.verify import verify
from llmconv.verify.float_folder import METHODS
from llmconv.verify.results import WHOLE, Report
from tools.tiny_models import cast_weights, depth, save_tiny, tiny_config

PRECISIONS = ("float32", "float16", "bfloat16")
QUANTIZED = ("int4", "int8")
SMALLEST_BLOCK = 16
"""Tiny models have rows of 64 columns and fewer."""

TIME_LIMIT = 1200
"""Time limit per type, in seconds."""

FORK = multiprocessing.get_context("fork")

INTRODUCTION = (
    "Written by `make families`; every line is a run of `tools/families.py` with the versions of `constraints.txt`: a",
    "tiny seeded model of the type (odd vocabulary, two key/value heads and heads of an odd size where the type allows",
    "it, windows shorter than the prompts, two periods of layers more than are traced), `llmconv export --prefill",
    "--incremental`, `llmconv verify --suite full`. Types with images that are not in the list are exported by the",
    "type of their language model: [multimodal.md](multimodal.md) has them.",
)


IN_HALF = "`export --precision` over weights of that type, `verify --suite quick`."
IN_CODES = f"`export --quant` in blocks of {SMALLEST_BLOCK}, `verify --suite quick` against the model before."


@dataclass(frozen=True)
class Result:
    """The result of one type.

    Attributes:
        verdict: `pass`, `fail` or `inconclusive` of `verify`; `refused` where the export was; `error` else.
        suite: of `verify`; empty where it did not run.
        layers: of the model.
        traced: how many of them were traced; the rest was replicated.
        checks: how many outputs were compared.
        sigma: the largest, in units of the eager model's own rounding noise.
        seconds: of everything.
        reason: what went wrong, one line.
    """

    model_type: str
    verdict: str
    suite: str = ""
    layers: int = 0
    traced: int = 0
    checks: int = 0
    sigma: float = 0.0
    seconds: float = 0.0
    reason: str = ""


def main() -> int:
    """Runs the given types; returns 1 if one ended with an error, or one of `--only` did not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="TYPE", help="run this type, even if it has a result"
    )
    parser.add_argument("--suite", choices=("quick", "full"), default="full")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--quant", choices=QUANTIZED, help="with weights of so many bits, in blocks of 16")
    parser.add_argument("--method", choices=METHODS, default=WHOLE, help="of verify; other lines than those of `whole`")
    parser.add_argument("--again", action="store_true", help="also run types that did not pass before")
    parser.add_argument("--guess", action="store_true", help="also run types without a row, as plain decoders")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page of all results")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    kind = options.quant or options.precision
    options.results = results_of(kind if options.method == WHOLE else options.method)
    if unknown := next((name for name in options.only if name not in CONFIG_MAPPING_NAMES), None):
        parser.error(f"`{unknown}` is not a model type of transformers")
    if (absent := next((name for name in options.only if name not in INPUT_MAPS), None)) and not options.guess:
        parser.error(
            f"`{absent}` has no row in `INPUT_MAPS`: add one, or try the row of a plain decoder with `--guess`"
        )
    ends = set()
    for model_type in [] if options.page_only else chosen(options):
        result, has_row = run(model_type, options), model_type in INPUT_MAPS
        text = result.reason if has_row else f"row made up, the result is not kept; {result.reason}"
        print(f"{result.verdict:12} {model_type:28} {result.seconds:6.1f} s  {text[:190]}", flush=True)
        if has_row:
            append(options.results, result)
        ends.add(result.verdict)
    if options.write:
        runs = {name: list(read(results_of(name)).values()) for name in (*PRECISIONS, *QUANTIZED)}
        options.write.write_text(page(runs))
    return 1 if "error" in ends or (options.only and ends != {"pass"}) else 0


def results_of(kind: str) -> Path:
    """The lines of the runs in a precision, or with quantized weights."""
    return Path(f"build/families{'' if kind == 'float32' else f'-{kind}'}.jsonl")


def chosen(options: argparse.Namespace) -> list[str]:
    """The types to run: those asked for, or all that have no result yet."""
    if options.only:
        return list(options.only)
    done = {
        name
        for name, found in read(options.results).items()
        if found.verdict == "pass"
        and (found.suite == options.suite or options.suite == "quick")
        or not options.again
        and found.verdict != "pass"
    }
    return [name for name in all_types(options.guess) if name not in done]


def all_types(guess: bool) -> list[str]:
    """Rows of the registry that transformers knows too; with `guess` its whole table of causal language models."""
    causal = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if guess or name in INPUT_MAPS]
    return [*causal, *sorted(INPUT_MAPS.keys() & MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - set(causal))]


def run(model_type: str, options: argparse.Namespace) -> Result:
    """One type in its own process, forked so that the libraries are imported only once."""
    started = time.perf_counter()
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_report, args=(sender, model_type, options))
    child.start()
    sender.close()
    result = Result(model_type, "error", reason=f"not done after {TIME_LIMIT} s")
    if receiver.poll(TIME_LIMIT):
        try:
            result = receiver.recv()
        except EOFError:
            child.join()
            result = Result(model_type, "error", reason=f"exit code {child.exitcode}")
    child.kill()
    child.join()
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def _report(sender: Any, model_type: str, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # more threads are several times slower on a tiny model
    how = options.precision, options.quant, options.method
    sender.send(examine(model_type, options.suite, options.guess, *how))


def examine(
    model_type: str,
    suite: str,
    guess: bool = False,
    precision: str = "float32",
    quant: str | None = None,
    method: str = WHOLE,
) -> Result:
    """Makes, exports and verifies a tiny model; any exception becomes the reason.

    Args:
        model_type: of a language model of transformers, which may be part of one with images.
        suite: of `verify`.
        guess: try a type without a row as a plain decoder.
        precision: dtype of the weights and of the graphs.
        quant: a preset of `export --quant`; None for weights as they are.
        method: of `verify`; where it runs the whole model instead, the reason says why.
    """
    exported = None
    try:
        if guess and model_type not in INPUT_MAPS:
            register_input_map(model_type, InputMap(position_ids=_takes_positions(model_type)))
        with TemporaryDirectory(prefix="llmconv-family-") as name:
            folder = Path(name) / "model"
            save_tiny(model_type, folder, depth(model_type))
            if precision != "float32":
                cast_weights(folder, precision)
            if quant:
                out, block = Path(name) / "out", SMALLEST_BLOCK
                exported = export(folder, out, prefill=True, incremental=True, quant=quant, quant_block=block)
                report = verify(out, suite=suite, reference=folder)
            else:
                exported = export(folder, prefill=True, incremental=True, precision=precision)
                report = verify(folder, suite=suite, method=method)
    except LlmconvError as error:
        return Result(model_type, "refused", suite if exported else "", reason=error.message)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Result(model_type, "error", suite if exported else "", reason=f"{type(error).__name__}: {lines[0]}")
    return Result(
        model_type,
        report.verdict,
        suite,
        exported.num_layers,
        exported.traced_layers,
        len(report.checks),
        report.worst.sigma if report.worst else 0.0,
        reason=report.where.text if report.where else "; ".join(_notes(report)),
    )


def _notes(report: Report) -> list[str]:
    """The notes of a run that did not pass, or that ran the whole model instead of an induction."""
    return [note for note in report.notes if report.verdict != "pass" or "without induction" in note]


def _takes_positions(model_type: str) -> bool:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, 2))
    return "position_ids" in inspect.signature(model.forward).parameters


def read(path: Path) -> dict[str, Result]:
    """The last result of every type."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {line["model_type"]: Result(**line) for line in map(json.loads, lines)}


def append(path: Path, result: Result) -> None:
    """Appends one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def page(runs: dict[str, list[Result]]) -> str:
    """The results as Markdown, by precision and preset: what passed, and why other types are not exported."""
    results = runs["float32"]
    passed = sorted((r for r in results if r.verdict == "pass" and r.suite == "full"), key=lambda r: r.model_type)
    whole = sum(result.traced == result.layers for result in passed)
    return "\n".join(
        [
            "# Model families",
            "",
            *INTRODUCTION,
            "",
            f"{len(passed)} types of transformers' models pass. In {len(passed) - whole} of them the layers",
            f"after the first few are replicated; {whole} are traced whole, so their export grows with their depth.",
            "",
            "| `model_type` | traced of layers | outputs compared | largest sigma | odd about it |",
            "| --- | --- | --- | --- | --- |",
            *(_passed(result) for result in passed),
            "",
            "Sigma counts the eager model's own rounding noise; see [verification.md](verification.md).",
            "",
            *_section("In half precision", IN_HALF, passed, {name: runs[name] for name in PRECISIONS[1:]}),
            *_section("Quantized", IN_CODES, passed, {name: runs[name] for name in QUANTIZED}),
            "## Not exported",
            "",
            "| `model_type` | reason |",
            "| --- | --- |",
            *(f"| `{name}` | {reason} |" for name, reason in sorted(NOT_EXPORTED.items())),
            "",
        ]
    )


def _section(heading: str, commands: str, passed: list[Result], runs: dict[str, list[Result]]) -> list[str]:
    """How many of the types pass in other ways, too, and what the others report."""
    wanted = {result.model_type for result in passed}
    lines = [f"## {heading}", "", commands, ""]
    rows = []
    for name, results in runs.items():
        ran = [result for result in results if result.model_type in wanted]
        good = [result for result in ran if result.verdict == "pass"]
        lines.append(f"* {name}: {len(good)} of {len(ran)} types pass.")
        odd = sorted((one for one in ran if one.verdict != "pass"), key=lambda one: one.model_type)
        rows += [f"| `{one.model_type}` | {name} | {_cell(one.reason)} |" for one in odd]
    table = ["", "| `model_type` | as | what the run said |", "| --- | --- | --- |", *rows] if rows else []
    return [*lines, *table, ""]


def _passed(result: Result) -> str:
    note = INPUT_MAPS[result.model_type].note if result.model_type in INPUT_MAPS else ""
    traced = f"{result.traced} of {result.layers}" + (" (whole)" if result.traced == result.layers else "")
    return f"| `{result.model_type}` | {traced} | {result.checks} | {result.sigma:.2f} | {note} |"


def _cell(text: str) -> str:
    """One line of plain text for a table."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\\x1b\[\d+m|/\S+/", "", text).replace("|", "/")
    return " ".join(plain.split())[:160]


if __name__ == "__main__":
    sys.exit(main())
