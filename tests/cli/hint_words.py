"""What the texts of llmconv's sources name between backticks: commands, options, packages, pages, Python."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import click

from llmconv.errors import LlmconvError
from tests.cli.commands import LEAVES, ROOT, command

ROOMS = ("llmconv", "convert", "export", "verify")
HOLE = "\0"
"""Stands in an f-string for a value that is only known when the program runs."""


class Quoted(NamedTuple):
    """A text between backticks, and the file and line that it stands in."""

    place: str
    text: str


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a file with their lines, each value in one as its code between two `HOLE`; no docstrings."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(below) for below in node.values}
            yield node.lineno, "".join(map(_part, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def _part(part: ast.expr) -> str:
    return f"{HOLE}{ast.unparse(part.value)}{HOLE}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)


@cache
def texts(*, with_code: bool = False) -> tuple[Quoted, ...]:
    """Every string of the sources; `HOLE` alone stands for a value unless the code is wanted, too."""
    if not with_code:
        return tuple(
            Quoted(place, re.sub(f"{HOLE}[^{HOLE}]*{HOLE}", HOLE, text)) for place, text in texts(with_code=True)
        )
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]  # follows no links
    return tuple(
        Quoted(f"{path.relative_to(ROOT)}:{line}", text)
        for path in paths
        for line, text in strings(ast.parse(path.read_text()))
    )


@cache
def quoted() -> tuple[Quoted, ...]:
    """Every text between backticks in the strings of the sources."""
    return tuple(Quoted(place, one) for place, text in texts() for one in re.findall(r"`([^`\n]+)`", text))


def words_of(text: str) -> list[str]:
    """The words of a command or of an option with its value, as a shell divides them."""
    return shlex.split(text.replace(HOLE, "X"))


def path_of(words: list[str]) -> str:
    """The name of the command that words begin with, such as `delta apply`; empty for none."""
    return next((name for name in (" ".join(words[:2]), words[0]) if name in LEAVES), "")


def spellings(name: str) -> dict[str, click.Option]:
    """The options of a command, by each of their names."""
    options = [one for one in command(name).params if isinstance(one, click.Option)]
    return {spelling: one for one in options for spelling in (*one.opts, *one.secondary_opts)} | {
        spelling: click.Option(["--help"], is_flag=True) for spelling in ("-h", "--help")
    }


def is_open(word: str) -> bool:
    """Whether a word stands for what a user puts there: OUT, `X` for a value, `…`, `topk:K`, `NAME=PATH`."""
    return word in ("…", "X") or word.upper() == word and any(letter.isalpha() for letter in word) or ":K" in word


def option_problem(name: str, words: list[str]) -> str:
    """Why a command does not take its options as the words have them; empty if it does."""
    known = spellings(name)
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("-"):
            continue
        if (option := known.get(word.partition("=")[0])) is None:
            return f"`{name}` has no {word}"
        if not value or option.is_flag or is_open(value) or value.startswith("-"):
            continue
        try:
            option.type.convert(value, option, None)
        except (click.ClickException, LlmconvError) as error:
            return f"`{name}` {word}: {error}"
    return ""


def command_problem(text: str) -> str:
    """Why `llmconv COMMAND …` cannot be typed as it is written; empty if it can, or is only the name of a command.

    A text with an argument or an output is a whole command, so nothing that the command requires is left out.
    """
    words = words_of(text)[1:]
    groups = {name.partition(" ")[0] for name in LEAVES} | {"COMMAND"}
    if words == ["--help"] or words[0] == "X" or words[0] in groups and words[1:] == ["--help"]:
        return ""
    if not (name := path_of(words)):
        return f"no command `{words[0]}`"
    rest = words[len(name.split()) :]
    if problem := option_problem(name, rest):
        return problem
    known, given, taken = spellings(name), 0, {"--help"} & {*rest}
    for before, word in zip(["", *rest], rest, strict=False):
        if word.startswith("-"):
            taken |= {*known[word.partition("=")[0]].opts}
        elif before not in known or known[before].is_flag:
            given += 1
    if "…" in rest or not given and not {"-o", "--output"} & {*rest}:
        return ""
    needed = [one for one in command(name).params if one.required]
    arguments = [one for one in needed if isinstance(one, click.Argument)]
    lacking = [one for one in needed if isinstance(one, click.Option) and not {*one.opts} & taken]
    if given < len(arguments) or lacking:
        return f"`{name}` lacks {[*[one.name for one in arguments[given:]], *[one.opts[0] for one in lacking]]}"
    return ""


def hint_problem(name: str, hint: str) -> str:
    """Why the user of a command cannot follow its hint as it is written; empty if nothing speaks against it.

    An option is one of this command, or of one that the hint names (`export` also without backticks).
    """
    quotes = re.findall(r"`([^`\n]+)`", hint)
    commands = [text for text in quotes if text.startswith("llmconv ")]
    owners = {name, *(path_of(words_of(text)[1:]) for text in commands)} - {""}
    owners |= {"export"} if re.search(r"\bexport(ed)?\b", hint) else set()
    problems = [f"`{text}`: {problem}" for text in commands if (problem := command_problem(text))]
    for text in quotes:
        if re.match(r"-(-[a-z]|o( |$))", text):
            found = [option_problem(one, words_of(text)) for one in sorted(owners)]
            problems += [f"`{text}`: {found[0]}"] if all(found) else []
    return "; ".join(problems)
