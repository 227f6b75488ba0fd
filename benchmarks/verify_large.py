"""verify --low-memory of a model of Llama 3 8B's shape, 16 GB of bfloat16, within 6 GB.

`python -m benchmarks.verify_large 4` takes a quarter of every width: a trial of a minute or two.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.large_model import LargeModel
from benchmarks.measure import FOLDER, Target, llmconv, report
from benchmarks.watch import watch

LIMIT = 6 * 10**9


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    divisor = next((int(word) for word in sys.argv[1:] if word.isdigit()), 1)
    model = LargeModel(FOLDER, divisor)
    model.make()
    subprocess.run(llmconv("export", model.base, "--prefill", "--incremental", "--overwrite"), check=True)
    model.forget()
    found = watch(llmconv("verify", model.base, "--low-memory"), LIMIT)
    size = sum(path.stat().st_size for path in model.base.glob("*.safetensors"))
    if "--keep" not in sys.argv:
        model.remove()
    body = "\n".join(
        [
            f"Two graphs over {size / 1e9:.1f} GB of bfloat16; all quick scenarios, in float64 and in float32.",
            "",
            "| seconds | peak RSS, MB | of it private at most | of it mapped at most |",
            "| --- | --- | --- | --- |",
            f"| {found.wall:.0f} | {found.peak_mb:.0f} | {found.private_mb:.0f} | {found.mapped_mb:.0f} |",
            "",
            "The peak counts private memory and mapped pages of files together; with more than the target the run is",
            "killed.",
        ]
    )
    targets = [Target("peak RSS, private and mapped, GB", found.peak_mb / 1e3, LIMIT / 1e9)]
    return report("verify_large", "verify of a model larger than memory", body, targets)


if __name__ == "__main__":
    sys.exit(main())
