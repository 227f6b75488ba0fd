"""Memory of `llmconv generate` over the int4 graphs of a 1.1 B Llama, beside the size of their weights."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import FOLDER, Target, llmconv, remove, report, run
from benchmarks.quantize import model
from benchmarks.watch import Memory, watch

LIMIT = 8 * 10**9
EXPORT = ("--quant", "int4", "--target", "ort-cpu", "--cache", "shared-buffer")
GENERATE = ("--prompt", "t3", "--max-new-tokens", "32")


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    folder = FOLDER / "out"
    remove(folder)
    run(llmconv("export", model(), "-o", folder, *EXPORT))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    found = {
        "": watch(llmconv("generate", folder, *GENERATE), LIMIT),
        "`--packed-cache`": _second_run(folder),
    }
    remove(folder)
    body = "\n".join(
        [
            "A random 1.1 B Llama, `--quant int4 --target ort-cpu --cache shared-buffer`; 32 new tokens after one.",
            "onnxruntime packs a copy of the codes, which is private memory; the embedding is read from the mapped",
            "file.",
            "",
            "| option | file, MB | peak RSS, MB | of it private at most | of it mapped at most | private / file |",
            "| --- | --- | --- | --- | --- | --- |",
            *(
                f"| {option} | {size:.0f} | {one.peak_mb:.0f} | {one.private_mb:.0f} | {one.mapped_mb:.0f} "
                f"| {one.private_mb / size:.2f} |"
                for option, one in found.items()
            ),
        ]
    )
    target = Target("peak RSS / size of the quantized file", found[""].peak_mb / size, 1.6)
    return report("quantized_memory", "Memory of generation from int4", body, [target])


def _second_run(folder: Path) -> Memory:
    """Generation over packed weights that an earlier run has written."""
    with TemporaryDirectory(dir=FOLDER) as home:
        command = ["env", f"XDG_CACHE_HOME={home}", *llmconv("generate", folder, "--packed-cache", *GENERATE)]
        run(command)
        return watch(command, LIMIT)


if __name__ == "__main__":
    sys.exit(main())
