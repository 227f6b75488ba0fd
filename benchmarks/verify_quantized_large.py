"""verify of quantized graphs of 1.1 B and 8 B by induction, with their cost, and of 405 B by structure.

`python -m benchmarks.verify_quantized_large 1.1b 8b-int4 8b-a8w8 405b` runs some of them, and keeps the other rows of
earlier runs; 8 B needs 30 GB of disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.export_large import LAYERS, sparse
from benchmarks.large_model import LargeModel
from benchmarks.measure import FOLDER, Target, llmconv, remove, report
from benchmarks.models import base
from benchmarks.watch import Memory, watch

LIMIT = 16 * 10**9
HOLES = """
import shutil, sys
from llmconv.__main__ import main
from llmconv.files.safetensors_file import encode_header
from llmconv.output import local_folder

def hollow(file, shard, advance):
    header = encode_header({name: (tensor.dtype, tensor.shape) for name, tensor in shard.tensors.items()})
    file.write(header)
    file.truncate(len(header) + shard.nbytes)
    return {"bytes": len(header) + shard.nbytes}

local_folder.stream_shard = hollow
local_folder.shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)
main()
"""
"""`llmconv export` that leaves holes in place of codes and scales."""


@dataclass(frozen=True)
class Row:
    """A verification: its name, the memory that it took, and the targets for seconds and gigabytes."""

    name: str
    found: Memory
    seconds: float
    gigabytes: float

    def text(self) -> str:
        return f"| {self.name} | {self.found.wall:.0f} | {self.found.peak_mb:.0f} |"

    def targets(self) -> list[Target]:
        return [
            Target(f"{self.name}: seconds", self.found.wall, self.seconds),
            Target(f"{self.name}: peak memory, GB", self.found.peak_mb / 1e3, self.gigabytes),
        ]


def verified(name: str, model: Path, preset: str, seconds: float, gigabytes: float) -> Row:
    """The verification of an export that is made for it, and removed."""
    folder = FOLDER / "verified"
    remove(folder)
    subprocess.run(llmconv("export", model, "-o", folder, "--quant", preset), check=True)
    found = watch(llmconv("verify", folder, "--reference", model, "--method", "induction"), LIMIT)
    remove(folder)
    return Row(f"{name} `{preset}`", found, seconds, gigabytes)


def of_405b() -> Row:
    """A folder with the shapes of a Llama 3.1 405B, of holes, by structure."""
    folder, model = FOLDER / "verified", sparse(LAYERS)
    remove(folder)
    options = ("export", str(model), "-o", str(folder), "--quant", "int4")
    subprocess.run([sys.executable, "-c", HOLES, *options], check=True)
    found = watch(llmconv("verify", folder, "--reference", model, "--method", "structure"), LIMIT)
    remove(folder)
    return Row("405 B `int4`, structure", found, 120, 2)


def of_8b(preset: str) -> Row:
    model = LargeModel(FOLDER)
    model.make()
    model.forget()
    try:
        return verified("8 B", model.base, preset, 480, 3)
    finally:
        model.remove()


ROWS: dict[str, Callable[[], Row]] = {
    "405b": of_405b,
    "1.1b": lambda: verified("1.1 B", base(), "int4", 120, 3),
    "8b-int4": lambda: of_8b("int4"),
    "8b-a8w8": lambda: of_8b("a8w8"),
}
KEPT = FOLDER / "verify_quantized_large.json"
"""What was measured of each row, the newest."""


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in [one for one in sys.argv[1:] if one in ROWS] or ROWS:
        kept[name] = asdict(ROWS[name]())
        KEPT.write_text(json.dumps(kept))
    rows = [Row(**{**kept[name], "found": Memory(**kept[name]["found"])}) for name in ROWS if name in kept]
    body = "\n".join(
        [
            "Llamas of random weights, with the shapes of TinyLlama 1.1B, Llama 3 8B and Llama 3.1 405B (holes in",
            "files); a prefill and a decode graph, `llmconv verify FOLDER --reference MODEL`, imports",
            "included. By induction: all layers run by themselves, and the cost is measured.",
            "",
            "| model | seconds | peak RSS, private and mapped, MB |",
            "| --- | --- | --- |",
            *[row.text() for row in rows],
        ]
    )
    targets = [target for row in rows for target in row.targets()]
    return report("verify_quantized_large", "verify of large quantized graphs", body, targets)


if __name__ == "__main__":
    sys.exit(main())
