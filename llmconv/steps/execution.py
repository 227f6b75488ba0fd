"""Doing the steps of a run file that are not done, each as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from llmconv.errors import LlmconvError
from llmconv.output.manifest import read_manifest
from llmconv.steps.inputs import overlap, taken_for_hub_models
from llmconv.steps.record import Record
from llmconv.steps.run_file import RunFile
from llmconv.steps.stamps import Stamps, stamps
from llmconv.steps.step import Step

ALWAYS = {"push": "asks the Hub"}
"""Commands that are repeated each time, with the reason; they find out themselves that there is nothing to do."""

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
        verdict: of `verify`, as recorded in the folder; empty for other commands.
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
        options: of every step's command line, such as `-q`.
        stdout: descriptor or file for what the steps print; None for this process's own.
    """

    def __init__(
        self,
        file: RunFile,
        lock: int | None = None,
        *,
        force: bool = False,
        options: tuple[str, ...] = (),
        stdout: int | None = None,
    ) -> None:
        self._file, self._force, self._options, self._stdout = file, force, options, stdout
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
                yield Outcome(step, LEFT if failed else UNCHANGED, verdict="" if failed else self._verdict(step))
                continue
            announce(number, step, reason)
            outcome = self._do(step, reason)
            failed = outcome.status == FAILED
            self._changed += step.changes
            yield outcome

    def _reason(self, step: Step) -> str:
        """Why a step is to be done; empty if nothing has changed."""
        if step.command in ALWAYS:
            return ALWAYS[step.command]
        if self._force:
            return "--force"
        for read in step.inputs:
            if any(overlap(read, one, self._file.home) for one in self._changed):
                return f"reads `{read}`, which is new"
        return self._record.change(step, self._file.steps, self._read(step), stamps(step.outputs, self._file.home))

    def _read(self, step: Step) -> Stamps:
        return stamps(step.inputs, self._file.home, on_hub=True)

    def _do(self, step: Step, reason: str) -> Outcome:
        """Does a step, and records it."""
        home, start = self._file.home, time.monotonic()
        before = self._read(step) | stamps(step.outputs, home)
        there = stamps(step.changes, home)
        is_own = self._record.is_own(step, there)
        if is_own or not there:
            self._record.begin(step)
        code = self._call(step, is_own)
        seconds = time.monotonic() - start
        if code:
            if not is_own:
                self._record.forget(step)
            return Outcome(step, FAILED, reason, seconds, code, self._verdict(step))
        outputs = stamps(step.outputs, home)
        self._record.end(step, before, self._read(step) | outputs, outputs)
        return Outcome(step, DONE, reason, seconds, 0, self._verdict(step))

    def _call(self, step: Step, is_own: bool) -> int:
        """Runs the process of a step, and ends it if this one is interrupted; returns its exit code."""
        own = ["--overwrite"] * (is_own and step.can_overwrite) + ["--resume"] * step.can_resume
        given = [option for option in own if option not in step.arguments]
        words = [*step.command.split(), *given, *self._options, *step.arguments]
        with subprocess.Popen(
            [sys.executable, "-m", "llmconv", *words],
            cwd=self._file.home,
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

    def _verdict(self, step: Step) -> str:
        """The verdict that is recorded in a verified folder."""
        if step.command != "verify" or not step.positional:
            return ""
        with suppress(LlmconvError, OSError):
            recorded = read_manifest(self._file.home / step.positional[0]).verified
            if isinstance(recorded, dict) and isinstance(recorded.get("verdict"), str):
                return str(recorded["verdict"])
        return ""
