"""Private memory of a process that runs prefill and decode graph over half-precision weights, read from outside."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Target, llmconv, report, run
from benchmarks.models import base

WEIGHTS = 4.4e9
"""Bytes of the model's weights in float32."""

SEPARATE, RUNNER = "two sessions of onnxruntime", "`llmconv`"

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner

print("ready", flush=True)
sys.stdin.readline()
folder, ids = Path(sys.argv[1]), np.array([[5]])
if sys.argv[2] == "separate":
    runner = OrtRunner(OrtGraph(folder / "prefill.onnx"), OrtGraph(folder / "decode.onnx"))
else:
    runner = OrtRunner.from_folder(folder)
step = runner.prefill(ids, np.ones((1, 1), np.int64), np.zeros((1, 1), np.int64))
runner.decode(ids, np.ones((1, 2), np.int64), np.ones((1, 1), np.int64), step.present)
print("ready", flush=True)
sys.stdin.readline()
"""

EXPORTS: dict[str, tuple[str, list[str]]] = {
    "bfloat16 weights, float32 graphs": ("bfloat16", []),
    "bfloat16 weights, shared buffer, `ort-cpu`": ("bfloat16", ["--cache", "shared-buffer", "--target", "ort-cpu"]),
    "bfloat16 weights, bfloat16 graphs": ("bfloat16", ["--precision", "bfloat16"]),
    "float32 weights, float32 graphs": ("float32", []),
}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    rows, measured = [], {}
    for name, (dtype, options) in EXPORTS.items():
        folder = base(dtype)
        run(llmconv("export", folder, "--prefill", "--incremental", "--overwrite", *options))
        ways = ("separate", "runner") if options != ["--precision", "bfloat16"] else ("runner",)
        found = {way: private(folder, way) for way in ways}
        measured[name] = found["runner"]
        cells = [f"{found[way] / 1e6:,.0f}" if way in found else "" for way in ("separate", "runner")]
        rows.append(f"| {name} | {cells[0]} | {cells[1]} | {found['runner'] / WEIGHTS:.2f} |")
    body = "\n".join(
        [
            "A 1.1 B Llama; `prefill.onnx` for a token, then `decode.onnx` for another; private memory, above",
            "that before the graphs were opened (`Private_Dirty` and `Private_Clean`), MB.\n",
            f"| weights and graphs | {SEPARATE} | {RUNNER} | of the float32 weights |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )
    half, whole = (measured[name] for name in (next(iter(EXPORTS)), "float32 weights, float32 graphs"))
    targets = [
        Target("private memory, in float32 weights, bfloat16 folder", half / WEIGHTS, 1.1),
        Target("MB of private memory, float32 folder", whole / 1e6, 100),
    ]
    return report("weights_once", "Weights held once", body, targets)


def private(folder: Path, way: str) -> float:
    """Private memory in bytes that a process takes for both graphs; `way` is `separate` or `runner`."""
    with (
        open(folder / "model.safetensors", "rb") as file,  # maps its pages, too, so that they do not count as private
        mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ),
    ):
        command = [sys.executable, "-c", _CHILD, str(folder), way]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin and child.stdout
        found = []
        for _ in range(2):
            if child.stdout.readline() != "ready\n":
                sys.exit("the process with the sessions has failed")
            fields = [line.split() for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()]
            kept = [int(field[1]) for field in fields if field[0] in {"Private_Dirty:", "Private_Clean:"}]
            found.append(sum(kept) * 1024)
            child.stdin.write("\n")
            child.stdin.flush()
        child.wait()
    return float(found[1] - found[0])


if __name__ == "__main__":
    sys.exit(main())
