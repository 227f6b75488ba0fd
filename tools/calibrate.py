"""The figures behind the verdict: `make mutants` writes docs/calibration.md, its data and its plot.

Every family is exported once; then the weights are drawn again in place, with other seeds and sizes, because the graph
only maps them. Each draw is one clean run; threads and optimization levels take turns. Mutants run on the first draw.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx

from llmconv.export import export
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.session_settings import HALF_PRECISION
from llmconv.verify import Report, verify
from llmconv.verify.comparison import candidates
from llmconv.verify.reference.eager import Eager
from llmconv.verify.sigma import GATES, ExpectedOutput, Gates, Measure
from llmconv.verify.verification import library_versions
from tests.builders.mutants.mutants import MUTANTS, Mutant
from tests.conftest import CONFIGS, save_tiny
from tools.calibration_page import render_page, render_plot
from tools.half_precision_page import half_lines, render_half_plot
from tools.half_precision_runs import FAMILIES, half_runs
from tools.other_checks import RULES
from tools.random_weights import SETTINGS, SIZES, draw_outliers, draw_weights

PAGE = Path("docs/calibration.md")


@dataclass
class Clean:
    """One set of random weights: the largest sigma of an output and of a row, and which rules of others fail it."""

    sigma: float
    row_sigma: float
    verdict: str
    alarms: list[str]


@dataclass
class Killed:
    """One mutant: its largest sigma, the verdict, where it was found and whether rightly, and which rules fail it."""

    name: str
    sigma: float
    verdict: str
    where: str
    right_place: bool
    others: list[str]


@dataclass
class Family:
    """All runs of one family."""

    model_type: str
    clean: list[Clean] = field(default_factory=list)
    mutants: list[Killed] = field(default_factory=list)


def largest(report: Report) -> tuple[float, float]:
    """Largest sigma over an output, and of a row."""
    checks = [check for check in report.checks if "agree" not in check.name]
    return max(check.sigma for check in checks), max(check.row_sigma for check in checks)


def clean_run(folder: Path, seed: int) -> Clean:
    """A run on one set of random weights."""
    draw_weights(folder, seed, SIZES[seed % len(SIZES)])
    report = verify(folder, settings=SETTINGS[seed % len(SETTINGS)])
    return Clean(*largest(report), report.verdict, _failing(folder / "decode.onnx", EagerRunner(folder)))


def _failing(graph: Path, model: EagerRunner) -> list[str]:
    return [rule.name for rule in RULES if not rule.passes(graph, model)]


def mutant_run(mutant: Mutant, folder: Path, target: Path, eager: Eager, model: EagerRunner) -> Killed:
    """A mutant as the decode graph of a folder."""
    report = mutant_report(mutant, folder, target, eager)
    where = report.where.text if report.where else ""
    right = report.where is not None and mutant.is_at(report.where.layer, eager.num_layers)
    others = _failing(target / "decode.onnx", model)
    return Killed(mutant.name, largest(report)[0], report.verdict, where, right, others)


def mutant_report(mutant: Mutant, folder: Path, target: Path, eager: Eager) -> Report:
    """The report of a folder whose only graph is a mutant.

    Args:
        mutant: the fault.
        folder: the export that it is made from.
        target: the folder to make; an existing one is replaced.
        eager: the reference, which keeps its results.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    (target / "prefill.onnx").unlink()
    (target / "llmconv.json").write_text(json.dumps({"graphs": {"decode": {"file": "decode.onnx"}}}))
    graph = onnx.load(target / "decode.onnx", load_external_data=False)
    assert mutant.apply(graph, target), mutant.name
    onnx.save(graph, target / "decode.onnx")
    return verify(target, reference=folder, eager=eager)


def family_runs(model_type: str, seeds: int, folder: Path) -> Family:
    """All runs of one family."""
    family = Family(model_type)
    model_folder = save_tiny(model_type, folder / model_type)
    export(model_folder, prefill=True, incremental=True)
    eager, model = Eager(model_folder, "float32", keep=True), EagerRunner(model_folder)
    for mutant in (mutant for mutant in MUTANTS if model_type in mutant.families):
        family.mutants.append(mutant_run(mutant, model_folder, folder / "mutant", eager, model))
        print(model_type, family.mutants[-1].verdict, mutant.name, flush=True)
    for seed in range(seeds):
        family.clean.append(clean_run(model_folder, seed))
    print(model_type, "clean runs:", [run.verdict for run in family.clean].count("pass"), "of", seeds, flush=True)
    return family


LONG_PASTS = ("chunked prefill, pieces of 1 to 48 tokens", "pasts of 30 to 1,022 tokens")
"""Scenarios in which correct graphs of outliers have the largest sigma."""


def margin_runs(model_type: str, quant: str, seeds: int, folder: Path) -> list[tuple[float, float]]:
    """For each draw of outliers, the largest share of a gate by the noise of one run, and by which outputs were judged.

    Args:
        model_type: the family.
        quant: a preset, or empty for floats.
        seeds: number of draws.
        folder: an empty folder.
    """
    model, out = save_tiny(model_type, folder / "model"), folder / "out"
    config = json.loads((model / "config.json").read_text())
    if "max_position_embeddings" in config:  # GPT-2 has a table of its positions
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    weights, found = (model / "model.safetensors").read_bytes(), list[tuple[float, float]]()
    judge, shares = candidates.with_checked_noise, list[tuple[float, float]]()

    def share(one: Measure) -> float:
        return max(one.sigma / GATES["float32"].aggregate, one.row_sigma / GATES["float32"].row)

    def seen(truth: ExpectedOutput, measured: Callable[[ExpectedOutput], Measure], gates: Gates) -> Measure:
        judged = judge(truth, measured, gates)
        shares.append((share(measured(truth)), share(judged)))
        return judged

    candidates.with_checked_noise = seen
    for seed in range(seeds):
        (model / "model.safetensors").write_bytes(weights)
        draw_outliers(model, seed)
        shutil.rmtree(out, ignore_errors=True)
        export(model, out, incremental=True, quant=quant or None)
        shares.clear()
        report = verify(out, reference=model, scenario=LONG_PASTS)
        once, judged = (max(column) for column in zip(*shares, strict=True))
        found.append((once, judged))
        print(model_type, quant, seed, report.verdict, f"{once:.2f} {judged:.2f}", flush=True)
    candidates.with_checked_noise = judge
    return found


def main() -> None:
    """Runs all families and writes the page, `calibration.json` and the plots; other families keep their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=30, help="clean runs of every family; half as many in half precision"
    )
    parser.add_argument("--only", action="append", choices=list(CONFIGS), help="this family")
    parser.add_argument("--dtype", action="append", choices=["float32", *HALF_PRECISION], help="this precision")
    parser.add_argument("--write", type=Path, default=PAGE)
    parser.add_argument("--margins", action="store_true", help="only print how near to the gates right graphs come")
    parser.add_argument("--quant", default="", help="preset of the graphs of --margins")
    options = parser.parse_args()
    if options.margins:
        for model_type in options.only or CONFIGS:
            with TemporaryDirectory() as name:
                margin_runs(model_type, options.quant, options.seeds, Path(name))
        return
    path = options.write.with_suffix(".json")
    data = json.loads(path.read_text()) if path.is_file() else {"families": [], "halves": {}}
    data["versions"] = library_versions()
    for dtype in options.dtype or ("float32", *HALF_PRECISION):
        families = []
        for model_type in options.only or (CONFIGS if dtype == "float32" else FAMILIES):
            with TemporaryDirectory() as name:
                families.append(_runs(model_type, dtype, options.seeds, Path(name)))
        if dtype == "float32":
            data["families"] = families
        else:
            data.setdefault("halves", {})[dtype] = families
    path.write_text(json.dumps(data, indent=1) + "\n")
    write_pages(data, options.write)


def _runs(model_type: str, dtype: str, seeds: int, folder: Path) -> dict[str, Any]:
    """All runs of one family in one precision, as plain data."""
    if dtype == "float32":
        return asdict(family_runs(model_type, seeds, folder))
    *_, family = half_runs(model_type, dtype, -(-seeds // 6), folder)
    return asdict(family)


def write_pages(data: dict[str, Any], page: Path) -> None:
    """The page and its plots."""
    page.with_suffix(".svg").write_text(render_plot(data))
    (page.parent / f"{page.stem}-half.svg").write_text(render_half_plot(data["halves"]))
    page.write_text(render_page(data) + "\n" + "\n".join(half_lines(data["halves"])).rstrip() + "\n")


if __name__ == "__main__":
    main()
