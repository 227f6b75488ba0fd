"""Full, closed and broken standard streams: the exit code stays correct."""

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
from tests.cli.commands import CHECKPOINT, ROOT


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell command line with redirections."""
    line = line.replace("llmconv", f"{sys.executable} -m llmconv", 1)
    return subprocess.run(["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.quick_rows("--help")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_output_to_a_full_device_ends_with_4_and_one_line(option: str) -> None:
    done = shell(f"llmconv {option} > /dev/full")
    assert done.returncode == 4 and done.stderr.startswith("error: writing failed: No space left")


def without_reader(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`llmconv` with a closed pipe as stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "llmconv", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["--version", "--help", "export --help", "delta apply -h", "formats", "families", "families --json", "inspect ."],
)
def test_print_only_commands_end_quietly_with_0_on_a_closed_pipe(line: str) -> None:
    words = line.replace(" .", f" {CHECKPOINT}").split()
    done = without_reader(*words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_other_commands_do_not_exit_with_0_on_a_closed_pipe(tmp_path: Path) -> None:
    done = without_reader("to-hf", CHECKPOINT, "-o", str(tmp_path / "hf"), "-q")
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_that_cannot_be_printed_keeps_its_exit_code() -> None:
    assert shell("llmconv inspect nothing-here 2> /dev/full").returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_go_to_the_null_device(closed: str, tmp_path: Path) -> None:
    assert shell(f"llmconv to-hf {CHECKPOINT} -o {tmp_path}/closed {closed}").returncode == 0
    assert CliRunner().invoke(llmconv.cli.main, ["to-hf", CHECKPOINT, "-o", f"{tmp_path}/open"]).exit_code == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("closed", "open")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_families_in_a_pipe_end_with_one_line_on_stderr() -> None:
    done = shell("llmconv families | grep -m1 zamba2")
    assert done.returncode == 0 and done.stdout.startswith("zamba2 ")
    assert done.stderr in ("", done.stderr.partition("\n")[0] + "\n"), done.stderr
