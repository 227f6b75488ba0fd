"""Runs commands and measures them from outside: wall time, CPU time, peak resident memory; prints and keeps tables."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("build/bench")
"""Where generated models and outputs live; ignored by git."""


INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""What runs keeps its bytecode, as an installed package has it; otherwise a checkout is compiled in every run."""

SETTLE = 4
"""Seconds between the removal of an output and the next run. A virtual machine hands freed memory back to its host
after two; writing into memory that is still warm takes half as long, which would favor whatever runs next."""


@dataclass(frozen=True)
class Measurement:
    """One run of one command.

    Attributes:
        wall: seconds from start to exit.
        cpu: user plus system seconds, children included.
        peak_mb: largest resident set of any of its processes in 10^6 bytes, mapped files included.
    """

    wall: float
    cpu: float
    peak_mb: float


PARENT = """
import json, os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
wall = time.perf_counter() - started
process.returncode = os.waitstatus_to_exitcode(status)
print(json.dumps([process.returncode, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss]))
"""
"""A small process that starts a command: the peak of a process counts what its parent had until it was started."""


def run(command: Sequence[str], accepted: Sequence[int] = (0,)) -> Measurement:
    """Runs a command to its end.

    Args:
        command: to run.
        accepted: exit codes; others than 0 for what is measured until it is refused.

    Raises:
        SystemExit: the command failed; a benchmark of something that fails is worth nothing.
    """
    made = subprocess.run([sys.executable, "-I", "-S", "-c", PARENT, *command], capture_output=True, env=INSTALLED)
    code, wall, cpu, peak = json.loads(made.stdout)
    if code not in accepted:
        sys.exit(f"{' '.join(command)} ended with {code}:\n{made.stderr.decode()}")
    return Measurement(wall, cpu, peak * 1024 / 1e6)


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs `code` in this interpreter."""
    return [sys.executable, "-c", code, *arguments]


def llmconv(*arguments: str | Path) -> list[str]:
    """A command of llmconv."""
    return [sys.executable, "-m", "llmconv", *map(str, arguments)]


def interleaved(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    output: Path,
    before: Callable[[], object] = os.sync,
    accepted: Sequence[int] = (0,),
) -> dict[str, list[Measurement]]:
    """Runs all commands in turn, `rounds` times, so that a slow minute of the machine hits all of them.

    Args:
        commands: name to command; each may write `output`, which is removed (untimed) before each run.
        rounds: how often.
        output: file or folder.
        before: called before each run, when what the last one wrote is on the disk.
        accepted: exit codes, see `run`.
    """
    results: dict[str, list[Measurement]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            remove(output)
            os.sync()
            before()
            time.sleep(SETTLE)
            results[name].append(run(command, accepted))
            print(f"  round {number + 1}/{rounds}  {name}: {results[name][-1].wall:.2f} s", file=sys.stderr)
    remove(output)
    return results


def remove(path: Path) -> None:
    """Removes a file or folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def median(runs: Sequence[Measurement], what: Callable[[Measurement], float]) -> float:
    """The median of one figure over several runs."""
    return statistics.median(map(what, runs))


def table(results: dict[str, list[Measurement]]) -> str:
    """A Markdown table: one row per command, medians (and the range of wall times)."""
    lines = ["| job | runs | wall, s (range) | CPU, s | peak RSS, MB |", "| --- | --- | --- | --- | --- |"]
    for name, runs in results.items():
        walls = [item.wall for item in runs]
        lines.append(
            f"| {name} | {len(runs)} | {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f}) "
            f"| {median(runs, lambda item: item.cpu):.2f} | {max(item.peak_mb for item in runs):.0f} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Target:
    """A figure and its limit.

    Attributes:
        text: what is measured.
        value: what was measured.
        limit: the target.
        at_least: the limit is a floor and not a ceiling.
    """

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is as good as it should be."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """Verdict word first, then the facts."""
        sign = "≥" if self.at_least else "≤"
        return f"{'MET' if self.met else 'MISSED'} | {self.text} | {self.value:.2f} | target {sign} {self.limit:g}"


def report(name: str, title: str, body: str, targets: Sequence[Target]) -> int:
    """Prints one benchmark's section, keeps it where `--write FILE` says, and returns 1 if a target is missed.

    Args:
        name: the benchmark's module, such as `merge_lora`; it owns the section between its markers in FILE.
        title: heading.
        body: Markdown.
        targets: what must hold.
    """
    machine = f"{os.cpu_count()} cores, Python {sys.version_info.major}.{sys.version_info.minor}"
    verdicts = "\n".join(f"- {target.line()}" for target in targets)
    section = f"## {title}\n\nMade by `python -m benchmarks.{name}` on {machine}.\n\n{body}\n\n{verdicts}\n"
    print(section)
    if "--write" in sys.argv:
        write_section(Path(sys.argv[sys.argv.index("--write") + 1]), name, section)
    return 0 if all(target.met for target in targets) else 1


def write_section(path: Path, name: str, section: str) -> None:
    """Replaces the part of `path` between the markers of `name`, or appends it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text() if path.exists() else "# Measured figures\n"
    if begin in text and end in text:
        text = text[: text.index(begin)] + text[text.index(end) + len(end) :].lstrip("\n")
    path.write_text(f"{text.rstrip()}\n\n{begin}\n\n{section}\n{end}\n")
