"""The main job on a genuine Composer checkpoint: every command is printed, then run; a table shows the results."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

SOURCE = Path("examples/tiny-llama")
OUT = Path("build/demo")
LLMCONV = Path(sys.executable).parent / "llmconv"
PROMPT = "Once there was a clever"
COMMANDS = f"""
inspect    {SOURCE}/ep4-ba2400-rank0.pt
to-hf      {SOURCE}/ep4-ba2400-rank0.pt -o {OUT}/base
merge-lora {OUT}/base {SOURCE}/adapter -o {OUT}/merged
export     {OUT}/merged --prefill --incremental
verify     {OUT}/merged --report {OUT}/report
generate   {OUT}/merged --prompt "{PROMPT}" --max-new-tokens 20 --stream
"""


def main() -> None:
    """Runs the commands in order, from an empty output folder."""
    os.chdir(Path(__file__).parents[1])
    shutil.rmtree(OUT, ignore_errors=True)
    talk = "".join(run(shlex.split(line)) for line in COMMANDS.strip().splitlines())
    Console().print(table(talk))


def run(arguments: list[str]) -> str:
    """Prints a command, runs it, and returns its stderr, which is also shown.

    Raises:
        SystemExit: the command failed; with its exit code.
    """
    print(f"\n$ {shlex.join(['llmconv', *arguments])}", flush=True)
    with subprocess.Popen([LLMCONV, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        talk = ""
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            talk += line
    if process.returncode:
        sys.exit(process.returncode)
    return talk


def table(talk: str) -> Table:
    """Files and their sizes, bytes that were not copied, the verdict and the speed."""
    rows = Table("made", "", title="llmconv demo", title_style="bold", title_justify="left")
    graphs = [OUT / "merged" / name for name in ("prefill.onnx", "decode.onnx")]
    made = [OUT / "base/model.safetensors", OUT / "merged/model.safetensors", *graphs, OUT / "report/report.html"]
    for path in made:
        rows.add_row(str(path), f"{path.stat().st_size:>9,} bytes")
    rows.add_row("weights that both graphs map and did not copy", f"{mapped_bytes(graphs):>9,} bytes")
    report = json.loads((OUT / "report/report.json").read_text())
    rows.add_row("verdict", f"{report['verdict']} ({len(report['checks'])} outputs checked)")
    speeds = re.findall(r"([\d.]+) tokens/s", talk)
    rows.add_row("generation", f"{speeds[-1]} tokens per second")
    return rows


def mapped_bytes(graphs: list[Path]) -> int:
    """Bytes of the safetensors files that graphs point at, each counted once."""
    initializers = [
        tensor for graph in graphs for tensor in onnx.load(graph, load_external_data=False).graph.initializer
    ]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in initializers]
    ranges = {(place["location"], place["offset"], int(place["length"])) for place in places if "length" in place}
    return sum(length for _, _, length in ranges)


if __name__ == "__main__":
    main()
