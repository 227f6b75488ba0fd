"""The folders above an output: made, reported, and removed again when nothing came of them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import llmconv.cli
from llmconv.files.safe_folder import folder_made, parents_made

CHECKPOINT = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"


def run(*words: object) -> Result:
    """A command of llmconv."""
    return CliRunner().invoke(llmconv.cli.main, [*map(str, words)])


def test_parents_that_were_made_are_reported_and_existing_ones_are_not(tmp_path: Path) -> None:
    output = tmp_path / "new/deeper/out"
    first, second = (run("to-hf", CHECKPOINT, "-o", path) for path in (output, output.with_name("other")))
    assert first.exit_code == second.exit_code == 0, first.stderr
    assert f"made `{output.parent}`" in first.stderr
    assert "made `" not in second.stderr


def test_a_dry_run_makes_and_reports_no_parents(tmp_path: Path) -> None:
    done = run("to-hf", CHECKPOINT, "-o", tmp_path / "new/out", "--dry-run")
    assert done.exit_code == 0 and "made `" not in done.output and [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_run_that_fails_while_it_writes_removes_its_parents(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmconv", "to-hf", str(CHECKPOINT), "-o", str(tmp_path / "new/deeper/out")]
    small = f"ulimit -f 100; {shlex.join(command)}"  # blocks of 1024 bytes; the weights have 604 KB
    done = subprocess.run(["bash", "-c", small], capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "File too large" in done.stderr, done.stderr
    assert "made `" not in done.stderr and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("kind", [parents_made, folder_made])
def test_after_an_error_what_others_put_there_stays(
    kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="full"), kind(tmp_path / "a/b/out"):
        raise OSError("full")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(OSError, match="full"), kind(tmp_path / "a/b/out"):
        (tmp_path / "a/mine").touch()
        raise OSError("full")
    assert [*tmp_path.rglob("*")] == [tmp_path / "a", tmp_path / "a/mine"]
    assert capsys.readouterr().err == ""


def test_a_folder_of_its_own_is_made_and_only_those_above_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder_made(tmp_path / "report"):
        pass
    assert (tmp_path / "report").is_dir() and capsys.readouterr().err == ""
    with folder_made(tmp_path / "a/report"):
        pass
    assert capsys.readouterr().err == f"made `{tmp_path / 'a'}`\n"


def test_a_way_through_a_missing_folder_is_made(tmp_path: Path) -> None:
    with parents_made(tmp_path / "a/../b/out"):
        pass
    assert (tmp_path / "b").is_dir()
