"""What the shell completes: commands, options, values and paths."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from llmconv.cli import main, options
from llmconv.export.clients import known_clients
from llmconv.verify.clients.comparison import CLIENTS


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("llmconv ver", "plain,verify"),
        ("llmconv verify --cl", "plain,--client"),
        ("llmconv verify --suite ", "plain,quick\nplain,full"),
        ("llmconv verify mod", "file,mod"),
        ("llmconv to-hf in -o ", "file,"),
        ("llmconv export m --layout g", "plain,genai"),
        ("llmconv verify m --client o", "plain,optimum"),
        ("llmconv from-hf m --to me", "plain,meta"),
        ("llmconv delta extract a b --to f", "plain,fastchat"),
        ("llmconv chat m --template v", "plain,v1_2\nplain,vicuna"),
        ("llmconv chat m --template my", "file,my"),
    ],
)
def test_the_shell_completes_commands_options_values_and_paths(words: str, completed: str) -> None:
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_LLMCONV_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(main, [], prog_name="llmconv", env=environment)
    assert result.output.strip() == completed


def test_the_names_that_the_shell_completes_are_those_of_the_clients() -> None:
    assert {*options.LAYOUTS} == {*known_clients()}
    assert tuple(CLIENTS) == options.CLIENTS
