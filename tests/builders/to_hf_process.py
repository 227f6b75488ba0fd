"""A `to-hf` in a process of its own, to be killed or watched."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def start_to_hf(model: Any, out: Any, size: str, *options: str) -> subprocess.Popen[str]:
    """Starts the command.

    Args:
        model: the source.
        out: the folder to make.
        size: largest shard.
        options: more of them.
    """
    command = [sys.executable, "-m", "llmconv", "to-hf", str(model), "-o", str(out), "--max-shard-size", size]
    return subprocess.Popen([*command, *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of its children."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]
