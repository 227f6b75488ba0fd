"""merge-lora where the file system shares blocks: XFS in a file, mounted here, which needs root and xfsprogs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.large_model import LargeModel
from benchmarks.measure import FOLDER, remove, report, table
from benchmarks.merge_large import judged, measured

ROUNDS, DIVISOR, DISK_BYTES = 3, 2, 14 << 30


def main() -> int:
    """Measures, prints the table, and returns 1 if a target is missed; 0 where XFS cannot be mounted."""
    if os.geteuid() or not shutil.which("mkfs.xfs"):
        print("skipped: mounting XFS needs root and mkfs.xfs", file=sys.stderr)
        return 0
    with mounted(FOLDER / "xfs") as folder:
        results = measured(LargeModel(folder, DIVISOR), ROUNDS)
    body = f"XFS in a file; a random Llama of 32 layers (bfloat16, 4 GB); medians.\n\n{table(results)}"
    return report("merge_reflink", "merge-lora on a file system that clones", body, judged(results, shared=True))


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """An XFS of 14 GB (a hole in a file as far as nothing is written) at `folder`."""
    image = folder.with_suffix(".img")
    folder.mkdir(parents=True, exist_ok=True)
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    try:
        subprocess.run(["mkfs.xfs", "-q", "-f", "-m", "reflink=1", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        remove(image)
        folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
