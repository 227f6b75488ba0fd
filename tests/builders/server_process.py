"""`llmconv serve` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Served:
    """A running server.

    Attributes:
        address: such as `http://127.0.0.1:40000`.
        process: to send signals to.
        log: the lines of its stderr so far.
    """

    address: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def end(self, number: int, timeout: float = 30) -> int:
        """Sends a signal and gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


def start(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """The process, on a free port."""
    command = [sys.executable, "-m", "llmconv", "serve", str(folder), "--port", "0", "--json", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **pipes)


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Served]:
    """A server that takes requests; it is killed where a test left it alive."""
    process = start(folder, *options, **environment)
    assert process.stdout is not None and process.stderr is not None
    served = Served("", process)
    reading = threading.Thread(target=lambda: served.log.extend(process.stderr or []), daemon=True)
    reading.start()
    try:
        told = process.stdout.readline()  # one line, as a supervisor reads it
        assert told, served.log
        served.address = json.loads(told)["address"]
        yield served
    finally:
        process.kill()
        process.wait()
        reading.join(10)
        process.stdout.close()
        process.stderr.close()
