"""Record of a run: which steps are done, and the stamps of the files that they read and wrote.

    {
      "record_version": 2,
      "steps": {"to-hf": {"llmconv": "0.1.0", "command": "<sha256>", "read": {…}, "written": {…}, "earlier": {…}}, …}
    }

It lies next to the run file as `.FILE.llmconv-run`; without it every step is done again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmconv.files.paths import is_address
from llmconv.files.safe_folder import replace_file
from llmconv.steps.stamps import MANIFEST_STAMP, UNKNOWN, Stamps
from llmconv.steps.step import Step
from llmconv.version import __version__

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
    """The steps that were done, by name.

    Attributes:
        path: of the file.
        steps: in the order of the run file.
    """

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
        """Whether an earlier run made what lies at a step's outputs: a file there is as that run left it.

        Args:
            step: the step.
            outputs: stamps of what lies there now.
        """
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

        Args:
            step: the step.
            before: stamps of its inputs and outputs.

        Returns:
            Those at its first begin: a step that was interrupted is continued, and wrote what differs from them.
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
            step: the step.
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

        Args:
            step: the step.
            steps: all steps of the file.
            inputs: stamps of its inputs, now.
            outputs: stamps of its outputs, now.
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
