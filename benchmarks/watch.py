"""Watches a command's memory while it runs: private memory, and mapped files."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import INSTALLED

INTERVAL = 0.05
FIELDS = ("VmRSS", "RssAnon", "RssFile")


@dataclass(frozen=True)
class Memory:
    """One run.

    Attributes:
        wall: seconds.
        peak_mb: largest resident set in 10^6 bytes, mapped pages included, as the kernel kept it.
        private_mb: largest seen share of memory that belongs to the process alone.
        mapped_mb: largest seen share of pages of files, which the kernel may take back at any time.
    """

    wall: float
    peak_mb: float
    private_mb: float
    mapped_mb: float


def watch(command: Sequence[str], limit: int) -> Memory:
    """Runs a command to its end.

    Args:
        command: of one process.
        limit: bytes that it may have resident, mapped pages included; with more it is killed.

    Raises:
        SystemExit: the command failed, or had too much.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, env=INSTALLED, stdout=sys.stderr)
    peaks = dict.fromkeys((*FIELDS, "VmHWM"), 0)
    while process.poll() is None:
        for name, size in _status(process.pid).items():
            peaks[name] = max(peaks[name], size)
        if peaks["VmHWM"] > limit:
            process.kill()
            process.wait()
            sys.exit(f"{' '.join(command)} had {peaks['VmHWM'] / 1e6:.0f} MB resident")
        time.sleep(INTERVAL)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    wall = time.perf_counter() - started
    return Memory(wall, peaks["VmHWM"] / 1e6, peaks["RssAnon"] / 1e6, peaks["RssFile"] / 1e6)


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in (*FIELDS, "VmHWM") if name in fields}
