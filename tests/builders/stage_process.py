"""`llmconv serve-stage` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ALONE = ("--listen", "127.0.0.1:0")


@dataclass
class ServedStage:
    """A running stage.

    Attributes:
        address: such as `127.0.0.1:40000`.
        process: to send signals to.
        log: the lines of its stderr so far.
    """

    address: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def wait_for(self, text: str, seconds: float = 20) -> str:
        """The first line of the log with a text, once it is there."""
        end = time.monotonic() + seconds
        while not (found := [line for line in self.log if text in line]):
            assert time.monotonic() < end, self.log
            time.sleep(0.02)
        return found[0]


@contextmanager
def serving_stage(
    folder: Path, number: int, *options: str, before: Sequence[str] = (), **environment: str
) -> Iterator[ServedStage]:
    """A stage that takes clients; it is killed where a test left it alive.

    Args:
        folder: has the stage.
        number: of the stage.
        options: of the command; a free port of 127.0.0.1 if there are none.
        before: what runs the command, such as `ip netns exec NAME`.
        environment: variables to set.
    """
    command = [sys.executable, "-m", "llmconv", "serve-stage", str(folder), "--stage", str(number), "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [*before, *command, *(options or ALONE)], cwd=ROOT, env={**os.environ, **environment}, **pipes
    )
    assert process.stdout is not None and process.stderr is not None
    served = ServedStage("", process)
    reading = threading.Thread(target=lambda: served.log.extend(process.stderr or []), daemon=True)
    reading.start()
    try:
        told = process.stdout.readline()
        assert told, served.log
        served.address = json.loads(told)["address"]
        yield served
    finally:
        process.kill()
        process.wait()
        reading.join(10)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def serving_stages(folder: Path, *numbers: int) -> Iterator[list[ServedStage]]:
    """Several stages of a folder."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving_stage(folder, number)) for number in numbers]
