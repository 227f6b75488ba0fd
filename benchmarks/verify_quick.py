"""verify of a 135 M Llama in float32: all quick scenarios on both graphs, within a minute."""

from __future__ import annotations

import json
import statistics
import sys

from benchmarks.measure import FOLDER, Target, llmconv, report, run
from benchmarks.small_model import model

ROUNDS = 3
FORMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "`--cache shared-buffer --target ort-cpu`": ("--cache", "shared-buffer", "--target", "ort-cpu"),
}


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed."""
    rows, targets = [], []
    for at, (name, options) in enumerate(FORMS.items()):
        folder, report_folder = FOLDER / "verify-quick" / str(at), FOLDER / "verify-quick" / f"report-{at}"
        run(llmconv("export", model(), "-o", folder, "--prefill", "--incremental", "--overwrite", *options))
        runs = [run(llmconv("verify", folder, "--report", report_folder)) for _ in range(ROUNDS)]
        checks = json.loads((report_folder / "report.json").read_text())["checks"]
        seconds = [one.wall for one in runs]
        middle, peak = statistics.median(seconds), max(one.peak_mb for one in runs)
        rows.append(
            f"| {name} | {len(checks)} | {middle:.1f} | {min(seconds):.1f} to {max(seconds):.1f} | {peak:.0f} |"
        )
        targets.append(Target(f"seconds, {name} graphs", middle, 60))
    body = "\n".join(
        [
            "A 135 M Llama in float32 with a prefill and a decode graph; `llmconv verify FOLDER`, imports included.\n",
            "| graphs | outputs checked | seconds | range | peak MB |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    return report("verify_quick", "verify, quick suite", body, targets)


if __name__ == "__main__":
    sys.exit(main())
