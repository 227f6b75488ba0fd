"""Private memory of a process with one session and with two on the same 1.1 B float32 weights, read from outside."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from benchmarks.export import model
from benchmarks.measure import Target, llmconv, report, run

ROUNDS = 3
STAGES = ("no session", "decode.onnx", "decode.onnx and prefill.onnx")

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from llmconv.runtime.onnxruntime.graph import OrtGraph

ids = np.array([[5]])
graphs = []
for name in ("", "decode.onnx", "prefill.onnx"):
    if name:
        graphs.append(OrtGraph(Path(sys.argv[1]) / name))
        graphs[-1].run(ids, np.ones((1, 1), np.int64), np.zeros((1, 1), np.int64))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def main() -> int:
    """Measures, prints the table, and returns 1 if the target is missed."""
    folder = model()
    run(llmconv("export", folder, "--prefill", "--incremental", "--overwrite"))
    # A page of the file that one mapping alone has would count as private; this process maps all of them too.
    with (
        open(folder / "model.safetensors", "rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ),
    ):
        runs = [_private(folder) for _ in range(ROUNDS)]
    middle = sorted(runs, key=lambda stages: stages[2] - stages[1])[ROUNDS // 2]
    lines = [f"| {name} | {megabytes:.0f} |" for name, megabytes in zip(STAGES, middle, strict=True)]
    body = "\n".join(
        [
            "A 1.1 B Llama in float32 (4.4 GB), sessions as `llmconv` opens them, each after one token;",
            f"`Private_Dirty` and `Private_Clean` of the process, median of {ROUNDS}.\n",
            "| open | private, MB |",
            "| --- | --- |",
            *lines,
        ]
    )
    return report("second_session", "Second session", body, [Target("MB more", middle[2] - middle[1], 50)])


def _private(folder: Path) -> list[float]:
    """Private memory in 10^6 bytes after every stage of a process."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin and child.stdout
    result = []
    for _ in STAGES:
        if child.stdout.readline() != "ready\n":
            sys.exit("the process with the sessions has failed")
        fields = [line.split() for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()]
        private = [int(field[1]) for field in fields if field[0] in {"Private_Dirty:", "Private_Clean:"}]
        result.append(sum(private) * 1024 / 1e6)
        child.stdin.write("\n")
        child.stdin.flush()
    child.wait()
    return result


if __name__ == "__main__":
    sys.exit(main())
