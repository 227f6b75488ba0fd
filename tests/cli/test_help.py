"""The pages of `--help`: every option below a heading, examples that parse, one list of whole sentences."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

import llmconv.cli
from llmconv.cli.command_group import COMMON, MANY, OTHER, OWN, SECTIONS, examples, heading_of
from tests.cli.commands import LEAVES, command


def page(*words: str) -> str:
    """The help of a command."""
    done = CliRunner().invoke(llmconv.cli.main, [*words, "--help"], prog_name="llmconv", terminal_width=100)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_first_page_lists_each_command_once_with_its_whole_sentence() -> None:
    text = page()
    names = [name for listed in SECTIONS.values() for name in listed]
    assert sorted(names) == sorted(llmconv.cli.main.commands)
    assert "…" not in text and "..." not in text.replace("[ARGS]...", "")
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()]
    assert [line for line in lines if line in names] == names
    assert all(f"\n{heading}:\n" in text for heading in SECTIONS)
    one_line = " ".join(text.split())
    for name in names:
        first = " ".join((command(name).help or "").split("\n\n")[0].split())
        assert first.removesuffix(".") in one_line


def test_the_exit_codes_are_on_the_first_page() -> None:
    text = " ".join(page().split())
    assert "Exit codes: 0 success, 1 a difference was found, 2 usage error, 3 input refused, 4 I/O" in text


def test_the_commands_of_a_group_are_listed_with_whole_sentences() -> None:
    text = " ".join(page("delta").split())
    assert (
        "Write the difference between TUNED and BASE to the folder OUT" in text
        and "..." not in text.split("ARGS]...")[1]
    )


def options_of(name: str) -> list[click.Option]:
    """The options that its help shows."""
    return [one for one in command(name).params if isinstance(one, click.Option) and not one.hidden]


@pytest.mark.parametrize("name", [name for name in LEAVES if len(options_of(name)) > MANY])
def test_each_of_many_options_is_below_a_heading_that_is_not_general(name: str) -> None:
    headings = {one.opts[-1]: heading_of(name, one.name or "") for one in options_of(name)}
    assert not [option for option, heading in headings.items() if heading == OTHER]
    text = page(*name.split())
    assert not [heading for heading in set(headings.values()) if f"\n{heading}:\n" not in text]
    assert len(set(headings.values())) >= 4


def test_headings_name_parameters_that_exist() -> None:
    known = {one.name for name in LEAVES for one in options_of(name)} | {"help"}
    assert not [name for names in COMMON.values() for name in names.split() if name not in known]
    assert not [
        f"{name} {one}" for name, row in OWN.items() for one in row if one not in {o.name for o in options_of(name)}
    ]


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_three_examples_that_parse(name: str) -> None:
    lines = [line for line, _ in examples()[name]]
    assert len(set(lines)) == len(lines) >= 3
    text = page(*name.split())
    for line in lines:
        assert line in text
        words = shlex.split(line)
        start = ["llmconv", *name.split()]
        assert words[: len(start)] == start
        command(name).make_context(name, words[len(start) :])
