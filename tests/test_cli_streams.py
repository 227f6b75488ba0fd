"""Standard streams that are full, closed or left by their reader: the exit code stays true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv.cli
import llmconv.convert
import llmconv.export
import llmconv.generation
import llmconv.verify
from tests.test_cli import CHECKPOINT, ROOT


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A command line with redirections, `llmconv` of which is this one."""
    line = line.replace("llmconv", f"{sys.executable} -m llmconv", 1)
    return subprocess.run(["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_what_is_shown_on_a_full_device_ends_with_4_and_one_line(option: str) -> None:
    done = shell(f"llmconv {option} > /dev/full")
    assert done.returncode == 4 and done.stderr.startswith("error: writing failed: No space left")


def without_reader(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`llmconv` whose stdout nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "llmconv", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "line",
    ["--version", "--help", "export --help", "delta apply -h", "formats", "families", "families --json", "inspect ."],
)
def test_what_only_shows_ends_quietly_with_0_where_the_reader_leaves(line: str) -> None:
    words = line.replace(" .", f" {CHECKPOINT}").split()
    done = without_reader(*words)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_that_does_something_does_not_claim_success_where_the_reader_leaves(tmp_path: Path) -> None:
    done = without_reader("to-hf", CHECKPOINT, "-o", str(tmp_path / "hf"), "-q")
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_that_cannot_be_told_keeps_its_exit_code() -> None:
    assert shell("llmconv inspect nothing-here 2> /dev/full").returncode == 3


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_lead_nowhere(closed: str, tmp_path: Path) -> None:
    assert shell(f"llmconv to-hf {CHECKPOINT} -o {tmp_path}/closed {closed}").returncode == 0
    assert CliRunner().invoke(llmconv.cli.main, ["to-hf", CHECKPOINT, "-o", f"{tmp_path}/open"]).exit_code == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("closed", "open")]
    assert weights[0] == weights[1]
