"""`llmconv serve` as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
    command = [sys.executable, "-m", "llmconv", "serve", str(folder), "--port", "0", *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Served]:
    """A server that takes requests; it is killed where a test left it alive."""
    process = start(folder, *options, **environment)
    assert process.stderr is not None
    served = Served("", process)
    try:
        for line in process.stderr:
            served.log.append(line)
            if found := re.match(r"(http://\S+) is a chat page", line):
                served.address = found[1]
                break
        assert served.address, "".join(served.log)
        rest = threading.Thread(target=lambda: served.log.extend(process.stderr or []), daemon=True)
        rest.start()
        yield served
    finally:
        process.kill()
        process.wait()
        rest.join(10)
        process.stderr.close()
