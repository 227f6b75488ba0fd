"""verify at any size: 405 B by structure, 70 B and 8 B by induction over layers, 1.1 B as `auto` chooses.

`python -m benchmarks.verify_by_layers 8b 70b` runs some of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnx

from benchmarks.large_model import LargeModel
from benchmarks.measure import FOLDER, Measurement, Target, llmconv, remove, report, run
from benchmarks.sparse_llama import OUTER, SparseLlama

WRONG, RIGHT = 77, 78
"""A layer of the 405 B model, one of whose weights is bound to the bytes of the next layer."""


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        name: the model and the command.
        measured: the run.
        shown: its last line.
    """

    name: str
    measured: Measurement
    shown: str


def structure_405b() -> tuple[list[Row], list[Target]]:
    """A sparse 405 B model, right, and with one weight of one layer bound to another layer's bytes."""
    model = SparseLlama(FOLDER / "sparse-405b", 126, 16384, 53248, 128, 8, 128256)
    model.make(filled=())
    _export(model.folder)
    options = ("--method", "structure", "--allow-changed")
    right = _verify("405 B, sparse, `--method structure`", model.folder, *options)
    name = f"model.layers.{WRONG}.mlp.up_proj.weight"
    for graph in ("prefill.onnx", "decode.onnx"):
        _bind(model.folder / graph, name, f"model.layers.{RIGHT}.mlp.up_proj.weight")
    wrong = _verify("the same, one weight of layer 77 bound to layer 78", model.folder, *options, code=1)
    if f"model.layers.{WRONG}." not in wrong.shown:
        sys.exit(f"layer {WRONG} is not named: {wrong.shown}")
    remove(model.folder)
    slower = max(right.measured, wrong.measured, key=lambda one: one.wall)
    return [right, wrong], [
        Target("405 B, structure: seconds", slower.wall, 120),
        Target("405 B, structure: peak GB", slower.peak_mb / 1e3, 2),
    ]


def induction_70b() -> tuple[list[Row], list[Target]]:
    """A 70 B model of which one layer and the outer matrices are numbers, and the other layers holes."""
    model = SparseLlama(FOLDER / "sparse-70b", 80, 8192, 28672, 64, 8, 128256)
    model.make(filled=(0, OUTER))
    _export(model.folder)
    row = _verify(
        "70 B, sparse, `--method induction --layers classes`", model.folder, *INDUCTION, "--layers", "classes"
    )
    remove(model.folder)
    return [row], [
        Target("70 B, one layer of each class: minutes", row.measured.wall / 60, 10),
        Target("70 B, one layer of each class: peak GB", row.measured.peak_mb / 1e3, 8),
    ]


def induction_8b() -> tuple[list[Row], list[Target]]:
    """Llama 3 8B of random bits in bfloat16; all layers."""
    model = LargeModel(FOLDER)
    model.make()
    _export(model.base)
    model.forget()
    row = _verify("8 B, bfloat16, `--method induction`", model.base, *INDUCTION)
    if "--keep" not in sys.argv:
        model.remove()
    return [row], [
        Target("8 B, all layers: minutes", row.measured.wall / 60, 4),
        Target("8 B, all layers: peak GB", row.measured.peak_mb / 1e3, 2),
    ]


def auto_1b() -> tuple[list[Row], list[Target]]:
    """TinyLlama's shape in float32."""
    model = SparseLlama(FOLDER / "llama-1b", 22, 2048, 5632, 32, 4, 32000, "float32")
    model.make(filled=(OUTER, *range(22)))
    _export(model.folder)
    row = _verify("1.1 B, float32, default", model.folder)
    remove(model.folder)
    return [row], [
        Target("1.1 B, auto: seconds", row.measured.wall, 60),
        Target("1.1 B, auto: peak GB", row.measured.peak_mb / 1e3, 3),
    ]


INDUCTION = ("--method", "induction")
RUNS: dict[str, Callable[[], tuple[list[Row], list[Target]]]] = {
    "405b": structure_405b,
    "70b": induction_70b,
    "8b": induction_8b,
    "1b": auto_1b,
}


def _export(folder: Path) -> None:
    subprocess.run(llmconv("export", folder, "--prefill", "--incremental", "--overwrite"), check=True)


def _verify(name: str, folder: Path, *options: str, code: int = 0) -> Row:
    report_folder = FOLDER / "verify-by-layers"
    measured = run([*llmconv("verify", folder, *options), "--report", str(report_folder)], (code,))
    shown = (report_folder / "summary.md").read_text()
    print(f"{name}: {measured.wall:.1f} s, {measured.peak_mb:.0f} MB", file=sys.stderr)
    return Row(name, measured, shown)


def _bind(path: Path, name: str, other: str) -> None:
    """Gives a weight of a graph the place of another one."""
    model = onnx.load(path, load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    del tensors[name].external_data[:]
    tensors[name].external_data.extend(tensors[other].external_data)
    path.write_bytes(model.SerializeToString())


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    rows: list[Row] = []
    targets: list[Target] = []
    for name, measure in RUNS.items():
        if name in sys.argv or not set(RUNS) & set(sys.argv):
            more, limits = measure()
            rows, targets = rows + more, targets + limits
    body = "\n".join(
        [
            "Two graphs (of equal bytes) over weights that are random numbers, or holes in files where it says sparse;",
            "in the 70 B model layer 0, the embedding and the head are numbers.",
            "",
            "| model and command | seconds | peak RSS, MB |",
            "| --- | --- | --- |",
            *(f"| {row.name} | {row.measured.wall:.0f} | {row.measured.peak_mb:.0f} |" for row in rows),
            "",
            "The peak counts mapped pages of files. The whole 8 B model takes 53 minutes (`verify_large`).",
        ]
    )
    return report("verify_by_layers", "verify by induction over layers", body, targets)


if __name__ == "__main__":
    sys.exit(main())
