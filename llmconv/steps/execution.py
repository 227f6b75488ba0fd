"""Runs the steps of a run file that are not done, each as a process of its own.

The record of a run, which steps are done and the stamps of the files that they read and wrote, lies next to the run
file as `.FILE.llmconv-run`; without it every step is done again.

    {
      "record_version": 2,
      "steps": {"to-hf": {"llmconv": "0.1.0", "command": "<sha256>", "read": {…}, "written": {…}, "earlier": {…}}, …}
    }
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.errors import LlmconvError
from llmconv.files.paths import is_address
from llmconv.files.safe_folder import replace_file
from llmconv.interpreters import child_environment
from llmconv.output.manifest import read_manifest
from llmconv.steps.inputs import taken_for_hub_models
from llmconv.steps.places import overlap
from llmconv.steps.run_file import RunFile
from llmconv.steps.stamps import MANIFEST_STAMP, UNKNOWN, Stamps, stamps
from llmconv.steps.step import Step
from llmconv.version import __version__

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

        Before each, `announce` is called with its number, from 1, the step, and the reason why it is done.
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


VERSION = 2
SUFFIX = ".llmconv-run"
LIMIT = 256 << 20
"""Maximum bytes of a record; a million files take some 100 MB."""


@dataclass(frozen=True)
class Done:
    """A step that was done.

    Attributes:
        llmconv: version that did it.
        command: sha256 of its command line, which may contain credentials.
        read: stamps of its inputs, without what it wrote itself.
        written: stamps of what it wrote or changed.
        earlier: stamps of what it wrote before that, to outputs that it no longer has.
    """

    llmconv: str
    command: str
    read: Stamps
    written: Stamps
    earlier: Stamps


@dataclass
class Record:
    """The steps that were done, by name in the order of the run file, and the path of the record."""

    path: Path
    steps: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def beside(cls, file: Path) -> Record:
        """The record of a run file; empty if there is none, or none that can be read."""
        path = file.absolute().with_name(f".{file.name}{SUFFIX}")
        try:
            content = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= LIMIT else {}
        except (OSError, ValueError, RecursionError):
            content = {}
        listed = content.get("steps") if isinstance(content, dict) and content.get("record_version") == VERSION else {}
        steps = {name: done for name, fields in _items(listed) if (done := _done(fields))}
        return cls(path, steps)

    def save(self) -> None:
        """Replaces the file."""
        content = {"record_version": VERSION, "steps": {name: asdict(done) for name, done in self.steps.items()}}
        replace_file(self.path, json.dumps(content, indent=1).encode())

    def is_own(self, step: Step, outputs: Stamps) -> bool:
        """Whether an earlier run made what lies at a step's outputs (stamps): a file there is as that run left it."""
        written = self._all_written(step)
        return any(outputs.get(name) == stamp not in (UNKNOWN, MANIFEST_STAMP) for name, stamp in written.items())

    def keep(self, steps: Iterable[Step]) -> None:
        """Forgets steps that the file no longer has, and puts the others in its order."""
        self.steps = {step.name: self.steps[step.name] for step in steps if step.name in self.steps}

    def is_begun(self, step: Step) -> bool:
        """Whether a step began, and did not end."""
        return step.name in self.steps and not self.steps[step.name].command

    def begin(self, step: Step, before: Stamps) -> Stamps:
        """Records that a step is under way: if it does not end, it is not done.

        Returns the stamps of its inputs and outputs at its first begin (now: `before`): a step that was interrupted is
        continued, and wrote what differs from them.
        """
        if self.is_begun(step):
            return self.steps[step.name].read
        places = [name if is_address(name) else os.path.normpath(name) for name in step.changes]
        self.steps[step.name] = Done(__version__, "", before, dict.fromkeys(places, UNKNOWN), self._all_written(step))
        self.save()
        return before

    def _all_written(self, step: Step) -> Stamps:
        """The latest stamps of everything that a step ever wrote."""
        done = self.steps.get(step.name)
        return {} if done is None else done.earlier | done.written

    def forget(self, step: Step) -> None:
        """Removes a step."""
        self.steps.pop(step.name, None)
        self.save()

    def end(self, step: Step, first: Stamps, before: Stamps, after: Stamps, changed: Stamps) -> None:
        """Records that a step is done.

        Args:
            first: what `begin` returned.
            before: stamps of its inputs and outputs before. An input that changed meanwhile keeps that stamp, so the
                step is done again.
            after: the same, afterwards.
            changed: those of the places that it writes into, afterwards.
        """
        own = changed if step.outputs else {name: stamp for name, stamp in changed.items() if not _is_weights(name)}
        written = {name: stamp for name, stamp in own.items() if step.outputs or first.get(name) != stamp}
        read = {name: before.get(name, UNKNOWN) for name in {**before, **after} if name not in written}
        home = self.path.parent
        kept = {name: stamp for name, stamp in self._all_written(step).items() if name not in written}
        earlier = {name: stamp for name, stamp in kept.items() if is_address(name) or (home / name).is_file()}
        self.steps[step.name] = Done(__version__, command_sha256(step), read, written, earlier)
        self.save()

    def change(self, step: Step, steps: Sequence[Step], inputs: Stamps, outputs: Stamps) -> str:
        """Why a step is to be done: what differs from the last time; empty if nothing does.

        `inputs` and `outputs` are the stamps as they are now; `steps` are all of the file.
        """
        done = self.steps.get(step.name)
        if done is None:
            return "not done yet"
        if not done.command:
            return "was not finished"
        if done.llmconv != __version__:
            return f"was done by llmconv {done.llmconv}"
        if done.command != command_sha256(step):
            return "options changed"
        later: Stamps = {}  # a later step may write into the folders of this one
        for one in steps[steps.index(step) + 1 :]:
            later |= self.steps[one.name].written if one.name in self.steps else {}
        known, now = done.read | done.written, inputs | outputs
        for name in (*known, *(name for name in inputs if name not in known and name not in later)):
            stamp = later.get(name, known.get(name))
            if now.get(name) != stamp or stamp in (None, UNKNOWN):
                return f"`{name}` " + ("is new" if name not in known else "changed" if name in now else "is gone")
        return ""


def _is_weights(name: str) -> bool:
    """Whether a file of a model's folder is one that an export into it never writes."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def command_sha256(step: Step) -> str:
    """What identifies the command line of a step."""
    return hashlib.sha256("\0".join([step.command, *step.arguments]).encode()).hexdigest()


def _items(listed: Any) -> Iterable[tuple[str, Any]]:
    return listed.items() if isinstance(listed, Mapping) else ()


def _done(fields: Any) -> Done | None:
    """An entry of `steps`; None if it is not of the form in the module's docstring."""
    names = ("llmconv", "command", "read", "written", "earlier")
    if not isinstance(fields, dict) or fields.keys() != {*names}:
        return None
    version, command, *both = (fields[name] for name in names)
    texts = [version, command, *(text for one in both if isinstance(one, dict) for text in one.values())]
    is_sound = all(isinstance(one, dict) for one in both) and all(isinstance(text, str) for text in texts)
    return Done(version, command, *both) if is_sound else None
