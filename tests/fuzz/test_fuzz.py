"""Honest inputs of every target are read, what once went wrong no longer does, and the watch sees what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from llmconv.errors import LlmconvError
from tests.fuzz.mutation import mutated
from tests.fuzz.run import CORPUS
from tests.fuzz.targets import TARGETS, Target, run_target

ROOT = Path(__file__).parents[2]
KEPT = [(path.parent.name, path.name) for path in sorted(CORPUS.glob("*/*"))]


def place(target: Target, folder: Path) -> Path:
    """A folder with the other files of the target's folder."""
    for name, content in target.siblings().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", TARGETS)
def test_honest_inputs_are_read(name: str, tmp_path: Path) -> None:
    for data in TARGETS[name].seeds():
        run_target(TARGETS[name], data, place(TARGETS[name], tmp_path))


@pytest.mark.parametrize(("name", "file"), KEPT)
def test_what_went_wrong_is_read_or_refused(name: str, file: str, tmp_path: Path) -> None:
    try:
        run_target(TARGETS[name], (CORPUS / name / file).read_bytes(), place(TARGETS[name], tmp_path))
    except LlmconvError as error:
        assert error.exit_code == 3 and error.hint


def test_the_same_chance_gives_the_same_input() -> None:
    seeds = [b'{"a": [1, 2]}', b"bytes of another kind"]
    first, second = ([mutated(seeds, (b"x",), draw) for _ in range(50)] for draw in (Random(3), Random(3)))
    assert first == second and len(set(first)) > 25


@pytest.mark.slow
def test_a_run_ends_and_tells_how_many_inputs_it_tried() -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "--seconds", "0.5", "--seed", "1", "tiktoken"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tiktoken" in done.stdout, done.stdout + done.stderr
