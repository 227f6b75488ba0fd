"""What `--resume` says of an output that is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from tests.cli.commands import CHECKPOINT


@pytest.mark.slow
def test_resume_of_an_output_that_has_graphs_names_what_wrote_them(tmp_path: Path) -> None:
    command = ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base")]
    assert CliRunner().invoke(llmconv.cli.main, command).exit_code == 0
    llmconv.export.export(tmp_path / "base")
    again = CliRunner().invoke(llmconv.cli.main, [*command, "--resume"])
    assert again.exit_code == 3 and "is complete, but `export` has changed it since" in again.stderr


def test_resume_of_a_complete_output_says_so_and_exits_0(tmp_path: Path) -> None:
    command = ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base")]
    assert CliRunner().invoke(llmconv.cli.main, command).exit_code == 0
    again = CliRunner().invoke(llmconv.cli.main, [*command, "--resume"])
    assert again.exit_code == 0 and "base` is complete: nothing to resume" in again.stderr
    assert again.stdout.startswith(f"found {tmp_path / 'base'}: llama")
    result = json.loads(CliRunner().invoke(llmconv.cli.main, [*command, "--resume", "--json"]).stdout)
    assert result["written"] is False
    other = CliRunner().invoke(llmconv.cli.main, [*command, "--resume", "--dtype", "float16"])
    assert other.exit_code == 3 and "with other options" in other.stderr
