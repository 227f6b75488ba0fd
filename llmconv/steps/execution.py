"""Doing the steps of a run file that are not done, each as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from llmconv.errors import LlmconvError
from llmconv.interpreters import child_environment
from llmconv.output.manifest import read_manifest
from llmconv.steps.inputs import taken_for_hub_models
from llmconv.steps.places import overlap
from llmconv.steps.record import Record
from llmconv.steps.run_file import RunFile
from llmconv.steps.stamps import Stamps, stamps
from llmconv.steps.step import Step

VERDICTS = {0: "pass", 1: "fail", 5: "inconclusive"}
"""Of `verify`, by its exit code."""

REPORT_FILES = ("run.json", "run.md")
"""Files of the report of a run, which may lie in the folder of a step's report."""

DONE, UNCHANGED, FAILED, LEFT, PLANNED = "done", "unchanged", "failed", "not run", "to do"

GRACE = 30
"""Seconds that an interrupted step has to end."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        step: the step.
        status: `done`, `unchanged`, `failed`, `not run`, or in a plan `to do`.
        reason: why it was done; empty if it was not.
        seconds: that it took.
        exit_code: of its process; 0 if it had none.
        verdict: of `verify`; empty for other commands.
    """

    step: Step
    status: str
    reason: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    verdict: str = ""


class Execution:
    """A run of a file.

    Args:
        file: the run file.
        lock: descriptor of its `run_lock`, which the steps inherit; None for a plan.
        force: do all steps, whatever is done.
        quiet: give `--quiet` to every step.
        github: give `--github` to every `verify`.
        stdout: descriptor or file for what the steps print; None for this process's own.
    """

    def __init__(
        self,
        file: RunFile,
        lock: int | None = None,
        *,
        force: bool = False,
        quiet: bool = False,
        github: bool = False,
        stdout: int | None = None,
    ) -> None:
        self._file, self._force, self._stdout = file, force, stdout
        self._quiet, self._github = quiet, github
        self._record = Record.beside(file.path)
        self._changed: list[str] = []
        self._inherited = () if lock is None else (lock,)

    def plan(self) -> Iterator[Outcome]:
        """What a run would do. A step that reads what an earlier one will write is to be done."""
        written: list[str] = []
        for step in self._file.steps:
            reason = self._reason(step)
            self._changed += step.changes if reason else ()
            from_hub = taken_for_hub_models(step, written, self._file.home) if reason else []
            written += step.changes
            notes = [f"`{name}` is not here, so it is a model of the Hub" for name in from_hub]
            notes += self._obstacles(step) if reason else []
            yield Outcome(step, PLANNED if reason else UNCHANGED, "; ".join([reason, *notes]))

    def run(self, announce: Callable[[int, Step, str], None]) -> Iterator[Outcome]:
        """Does the steps one after another; after a failure the others are not run.

        Args:
            announce: called before each step with its number, from 1, the step, and the reason why it is done.
        """
        self._record.keep(self._file.steps)
        failed = False
        for number, step in enumerate(self._file.steps, 1):
            reason = "" if failed else self._reason(step)
            if failed or not reason:
                yield Outcome(step, LEFT if failed else UNCHANGED, verdict="" if failed else verdict_of(step, 0))
                continue
            announce(number, step, reason)
            outcome = self._do(step, reason)
            failed = outcome.status == FAILED
            self._changed += step.changes
            yield outcome

    def _reason(self, step: Step) -> str:
        """Why a step is to be done; empty if nothing has changed."""
        if reason := "--force" if self._force else always(step):
            return reason
        for read in step.inputs:
            if any(overlap(read, one, self._file.home) for one in self._changed):
                return f"reads `{read}`, which is new"
        if (recorded := self._recorded_verdict(step)) not in ("", VERDICTS[0]):
            return f"the recorded verdict is `{recorded}`"
        return self._record.change(step, self._file.steps, self._read(step), self._written(step.outputs))

    def _obstacles(self, step: Step) -> list[str]:
        """The outputs that a step will not replace, because no run of this file made them."""
        may_replace = "--overwrite" in step.arguments or not step.can_overwrite or self._record.is_begun(step)
        if may_replace or self._record.is_own(step, there := self._written(step.outputs)) or not there:
            return []
        return [f"`{name}` exists, and no run of this file made it: it is refused" for name in step.outputs]

    def _read(self, step: Step) -> Stamps:
        return stamps(step.inputs, self._file.home, are_read=True)

    def _written(self, names: Iterable[str]) -> Stamps:
        """The stamps of outputs, without the report of a run."""
        found = stamps(names, self._file.home)
        return {name: stamp for name, stamp in found.items() if os.path.basename(name) not in REPORT_FILES}

    def _do(self, step: Step, reason: str) -> Outcome:
        """Does a step, and records it."""
        start = time.monotonic()
        there = self._written(step.changes)
        before = self._read(step) | there
        is_own = self._record.is_own(step, there)
        resumes = self._record.is_begun(step)
        is_known = is_own or resumes or not there or not step.outputs
        first = self._record.begin(step, before) if is_known else before
        # what was begun is continued, unless what it reads has changed since
        is_old = resumes and any(first.get(name) != stamp for name, stamp in self._read(step).items())
        code = self._call(step, overwrite=is_own or (is_old and not step.can_resume), resume=resumes)
        seconds = time.monotonic() - start
        if code:
            if not is_known:
                self._record.forget(step)
            return Outcome(step, FAILED, reason, seconds, code, verdict_of(step, code))
        changed = self._written(step.changes)
        self._record.end(step, first, before, self._read(step) | changed, changed)
        return Outcome(step, DONE, reason, seconds, 0, verdict_of(step, 0))

    def _call(self, step: Step, *, overwrite: bool, resume: bool) -> int:
        """Runs the process of a step, and ends it if this one is interrupted; returns its exit code."""
        own = ["--overwrite"] * (overwrite and step.can_overwrite) + ["--resume"] * (resume and step.can_resume)
        given = [option for option in own if option not in step.arguments]
        given += ["--quiet"] * self._quiet + ["--github"] * (self._github and step.command == "verify")
        words = [*step.command.split(), *given, *step.arguments]
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "llmconv", *words],
            cwd=self._file.home,
            env=child_environment(),
            stdout=self._stdout,
            pass_fds=self._inherited,
        ) as done:
            try:
                code = done.wait()
            except BaseException:
                done.terminate()
                with suppress(subprocess.TimeoutExpired):
                    done.wait(GRACE)
                raise
        return code if code >= 0 else 128 - code

    def _recorded_verdict(self, step: Step) -> str:
        """The verdict that is recorded in a verified folder; empty if there is none."""
        if step.command != "verify" or not step.positional:
            return ""
        with suppress(LlmconvError, OSError):
            recorded = read_manifest(self._file.home / step.positional[0]).verified
            if isinstance(recorded, dict) and isinstance(recorded.get("verdict"), str):
                return str(recorded["verdict"])
        return ""


def verdict_of(step: Step, code: int) -> str:
    """The verdict of a step that ended with an exit code; empty for other commands than `verify`, and for errors."""
    return VERDICTS.get(code, "") if step.command == "verify" else ""


def always(step: Step) -> str:
    """Why a step is repeated each time; empty if it is not."""
    if step.command == "push":
        return "asks the Hub"
    if any(word.startswith("--client=") for word in step.arguments):
        return "runs other programs"
    return ""
