"""The inputs of steps: which of them an earlier step writes, and which are nowhere."""

from __future__ import annotations

import os
from pathlib import Path

from llmconv.errors import InputRefused
from llmconv.files.paths import is_address
from llmconv.files.pointer_files import follow_local
from llmconv.files.sources import is_hub_id
from llmconv.steps.places import overlap
from llmconv.steps.run_file import RunFile
from llmconv.steps.step import Step

DEFAULT = "default"
"""Value of `calibrate` that selects the built-in text, not a file."""


def require_inputs(file: RunFile) -> None:
    """Refuses a run file with an input that is nowhere and that no earlier step writes.

    Raises:
        InputRefused: there is one.
    """
    written: list[str] = []
    for step in file.steps:
        for name in step.inputs:
            if is_absent(name, file.home) and not is_hub_id(name) and not _is_written(name, written, file.home):
                raise InputRefused(
                    f"step `{step.name}`: input `{name}` does not exist, and no earlier step writes it",
                    hint=f"relative paths begin at the run file's folder, `{file.home}`",
                )
        written += step.changes


def taken_for_hub_models(step: Step, written: list[str], home: Path) -> list[str]:
    """The inputs of a step that are not on this machine, and that its command looks for on the Hub.

    Args:
        step: the step.
        written: what earlier steps write.
        home: the folder that relative paths begin at.
    """
    absent = [name for name in step.inputs if is_absent(name, home) and is_hub_id(name)]
    return [name for name in absent if not _is_written(name, written, home)]


def is_absent(name: str, home: Path) -> bool:
    """Whether a name is a path that does not exist."""
    return not is_address(name) and name != DEFAULT and not os.path.lexists(follow_local(home / name))


def _is_written(name: str, written: list[str], home: Path) -> bool:
    return any(overlap(name, one, home) for one in written)
