"""The inputs of steps: which of them an earlier step writes, and which are nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from llmconv.errors import InputRefused
from llmconv.files.paths import is_address
from llmconv.files.pointer_files import follow_local
from llmconv.files.sources import is_hub_id
from llmconv.steps.places import overlap
from llmconv.steps.run_file import RunFile, raise_all, read_steps
from llmconv.steps.step import Step

NEAR = 0.8
"""Likeness of two names from which on one is a slip of the other, as of `difflib`."""

DEFAULT = "default"
"""Value of `calibrate` that selects the built-in text, not a file."""


def read_checked(path: Path, changes: Mapping[str, str], group: click.Group) -> RunFile:
    """Reads a run file like `read_run_file` and requires that inputs exist; all mistakes are reported together."""
    file, problems = read_steps(path, changes, group)
    raise_all(path.name, [*problems, *absent_inputs(file)])
    return file


def absent_inputs(file: RunFile) -> Iterator[InputRefused]:
    """A refusal of each input that is nowhere and that no earlier step writes.

    A name that may be of the Hub is one of the Hub, unless it is nearly what a step of the file writes: a slip in
    `build/base` would be looked for there.
    """
    written: list[str] = []
    for at, step in enumerate(file.steps):
        for name in step.inputs:
            if not is_absent(name, file.home) or _is_written(name, written, file.home):
                continue
            message = f"step `{step.name}`: input `{name}` does not exist, and no earlier step writes it"
            if writer := next((one for one in file.steps[at:] if _is_output(name, one, file.home)), None):
                yield InputRefused(message, hint=f"step `{writer.name}` writes it: put that step first")
            elif near := _near(name, file.steps[:at]):
                hub = f"; a model of the Hub is `hf://{name}`" if is_hub_id(name) else ""
                output, writer = near
                yield InputRefused(message, hint=f"is `{output}` meant, the output of step `{writer.name}`?{hub}")
            elif not is_hub_id(name):
                yield InputRefused(message, hint=f"relative paths begin at the run file's folder, `{file.home}`")
        written += step.changes


def _is_output(name: str, step: Step, home: Path) -> bool:
    return step.is_complete and _is_written(name, [*step.outputs], home)


def _near(name: str, steps: Sequence[Step]) -> tuple[str, Step] | None:
    """What one of some steps writes and is spelled nearly like a name, and the step; None if nothing is."""
    writers = {os.path.normpath(output): step for step in steps if step.is_complete for output in step.outputs}
    near = get_close_matches(os.path.normpath(name), writers, n=1, cutoff=NEAR)
    return (near[0], writers[near[0]]) if near else None


def taken_for_hub_models(step: Step, written: list[str], home: Path) -> list[str]:
    """The inputs of a step that are neither here nor `written` by earlier steps, and that may be models of the Hub."""
    absent = [name for name in step.inputs if is_absent(name, home) and is_hub_id(name)]
    return [name for name in absent if not _is_written(name, written, home)]


def is_absent(name: str, home: Path) -> bool:
    """Whether a name is a path that does not exist."""
    return not is_address(name) and name != DEFAULT and not os.path.lexists(follow_local(home / name))


def _is_written(name: str, written: list[str], home: Path) -> bool:
    return any(overlap(name, one, home) for one in written)
