"""Figures behind the gates: `python -m tests.verify.calibrate [SEEDS]` prints the table of docs/verification.md.

Every family is exported once; then the weights are drawn again in place, with other seeds and sizes, because the graph
only maps them. Each draw is one clean run; threads and optimisation levels take turns. Mutants run on the first draw.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from llmconv.export.exporter import export
from llmconv.runtime import SessionSettings
from llmconv.safetensors_io import read_header
from llmconv.verify import Report, verify
from llmconv.verify.truth import Eager
from tests.conftest import CONFIGS, save_tiny
from tests.verify.mutants import MUTANTS

SIZES = (0.5, 1.0, 2.0)
SETTINGS = [SessionSettings(threads, False, level) for level in ("all", "basic", "disable") for threads in (1, 2)]


def draw_weights(folder: Path, seed: int, size: float) -> None:
    """Shuffles every tensor's values among themselves and scales the matrices; shapes and offsets stay."""
    rng = np.random.default_rng(seed)
    for tensor in read_header(folder / "model.safetensors").tensors.values():
        values = rng.permutation(tensor.read().ravel()) * np.float32(size if len(tensor.shape) == 2 else 1)
        with open(tensor.path, "r+b") as file:
            file.seek(tensor.offset)
            file.write(values.tobytes())


def largest(reports: list[Report]) -> tuple[float, float]:
    """Largest sigma over an output, and of a row."""
    checks = [check for report in reports for check in report.checks if "agree" not in check.name]
    return max(check.sigma for check in checks), max(check.row_sigma for check in checks)


def clean_runs(folder: Path, seeds: int) -> list[Report]:
    """One report per draw of the weights."""
    reports = []
    for seed in range(seeds):
        draw_weights(folder, seed, SIZES[seed % len(SIZES)])
        reports.append(verify(folder, settings=SETTINGS[seed % len(SETTINGS)]))
    return reports


def mutant_runs(model_type: str, folder: Path, target: Path) -> list[tuple[str, Report]]:
    """The report of every mutant of a family."""
    eager = Eager(folder, "float32", keep=True)
    reports = []
    for mutant in (mutant for mutant in MUTANTS if model_type in mutant.families):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        (target / "prefill.onnx").unlink()
        (target / "llmconv.json").write_text(json.dumps({"graphs": {"decode": {"file": "decode.onnx"}}}))
        model = onnx.load(target / "decode.onnx", load_external_data=False)
        assert mutant.apply(model, target)
        onnx.save(model, target / "decode.onnx")
        reports.append((mutant.name, verify(target, reference=folder, eager=eager)))
    return reports


def main(seeds: int) -> None:
    """Prints one row per family."""
    print("| family | clean runs | false alarms | largest sigma | worst row | mutants | caught | smallest sigma |")
    print("|---|---|---|---|---|---|---|---|")
    for model_type in CONFIGS:
        with TemporaryDirectory() as name:
            folder = save_tiny(model_type, Path(name) / model_type)
            export(folder, prefill=True, incremental=True)
            mutants = mutant_runs(model_type, folder, Path(name) / "mutant")
            clean = clean_runs(folder, seeds)
        caught = sum(report.verdict == "fail" for _, report in mutants)
        alarms = sum(report.verdict != "pass" for report in clean)
        faults = [(largest([report])[0], mutant) for mutant, report in mutants if "low bit" not in mutant]
        sigma, row = largest(clean)
        cells = (model_type, len(clean), alarms, f"{sigma:.2f}", f"{row:.2f}", len(mutants), caught)
        print("|", *(f"{cell} |" for cell in cells), f"{min(faults)[0]:.0f} ({min(faults)[1]}) |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
