"""The command line as a whole: a file for each command, help, version, quiet, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
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
from llmconv.progress import set_quiet
from tests.cli.commands import CHECKPOINT, LEAVES, ROOT, command


def test_every_file_of_the_command_line_is_a_command() -> None:
    files = {path.stem.replace("_", "-") for path in (ROOT / "llmconv/cli").glob("*.py")}
    shared = {
        "--init--",
        "command-group",
        "completions",
        "file-names",
        "generation-options",
        "help-page",
        "options",
        "other-spellings",
        "plans",
        "terminal",
        "text-printer",
        "verdict",
    }
    assert files - shared == set(llmconv.cli.main.commands)


@pytest.mark.parametrize("name", [*llmconv.cli.main.commands, *LEAVES])
def test_a_command_has_the_name_of_its_file_and_a_sentence_of_help(name: str) -> None:
    assert command(name).name == name.split()[-1]
    assert not command(name).get_short_help_str(limit=75).endswith("...")


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_can_be_quiet_and_answer_in_json(name: str) -> None:
    spellings = {spelling for option in command(name).params for spelling in option.opts}
    assert {"--json", "-q", "--quiet", "-v", "--verbose"} <= spellings


@pytest.mark.slow
def test_the_registries_are_listed_in_json() -> None:
    for name in ("formats", "families"):
        done = CliRunner().invoke(llmconv.cli.main, [name, "--json"])
        assert done.exit_code == 0
        assert "llama" in json.loads(done.stdout) or "composer" in json.loads(done.stdout)


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["--version"])
    assert done.stdout == f"llmconv, version {llmconv.__version__}\n"


@pytest.mark.slow
def test_python_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "llmconv", "--version"], capture_output=True, text=True, check=True)
    assert llmconv.__version__ in done.stdout


def test_quiet_hides_messages(tmp_path: Path) -> None:
    set_quiet(False)
    done = CliRunner().invoke(llmconv.cli.main, ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base"), "-q"])
    set_quiet(False)
    assert done.exit_code == 0
    assert done.stderr == ""


@pytest.mark.parametrize("line", [["help", "delta", "extract"], ["help", "to-hf"], ["help"]])
def test_help_is_a_command_too(line: list[str]) -> None:
    done, other = (CliRunner().invoke(llmconv.cli.main, words) for words in (line, [*line[1:], "--help"]))
    assert done.exit_code == 0 and done.output == other.output


def test_the_version_has_a_short_option() -> None:
    short, long = (CliRunner().invoke(llmconv.cli.main, [option]).output for option in ("-V", "--version"))
    assert short == long != ""
