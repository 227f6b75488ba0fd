"""Step: one command of a run file, with its options by name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

import click

from llmconv.errors import MalformedInput, UsageProblem, listing, usage_line
from llmconv.files.paths import without_credentials

# commands that a step may be; the others are interactive, or only print
COMMANDS = (
    *("to-hf", "from-hf", "to-gguf", "merge-lora", "quantize", "delta apply", "delta extract"),
    *("export", "onnx-adapter", "verify", "generate", "embed", "bench", "push"),
)

# the options of which a step needs one: the command line reads standard input without them
TEXTS = {"generate": ("texts", "prompt", "prompt-file"), "embed": ("texts", "text-file")}
# options of the command line alone: what is printed, and the shares of several machines
NOT_IN_A_FILE = {"help", "json", "dry-run", "part", "finish"}
# metavars of options that name something to read; those that are written have a type with `is_written`
READ_METAVARS = ("PATH", "FILE", "FOLDER", "FILE|default")
RUNTIMES = ("onnx", "packed", "lookup", "torch", "optimum", "genai")  # what `bench` takes before a folder, or alone
NO_FILES = ("repository", "texts")  # arguments that name nothing to read
ON, OFF = "true", "false"  # the word of a flag, and of its `--no-` form


@dataclass(frozen=True)
class Step:
    """One command with its options."""

    name: str  # in messages and for `--set`; unique in the file
    command: str  # such as `to-hf` or `delta apply`
    arguments: tuple[str, ...]  # of the command line, after the command
    inputs: tuple[str, ...] = ()  # paths, URIs and Hub ids that it reads
    outputs: tuple[str, ...] = ()  # paths and addresses that it writes; all other texts of one that is not complete
    can_overwrite: bool = False  # the command has `--overwrite`
    can_resume: bool = False  # the command has `--resume`
    is_complete: bool = True  # it has no mistake

    @property
    def changes(self) -> tuple[str, ...]:
        """The paths that it writes; `export` without `output` writes into the model's folder."""
        return self.outputs or (self.positional[:1] if self.command == "export" else ())

    @property
    def positional(self) -> tuple[str, ...]:
        """The arguments that are no options."""
        return self.arguments[self.arguments.index("--") + 1 :]

    @property
    def line(self) -> str:
        """The command as one would type it, without credentials."""
        return without_credentials(shlex.join(["llmconv", *self.command.split(), *self.arguments]))


def find_command(group: click.Group, name: str) -> click.Command:
    """The command of a name such as `delta apply`."""
    command: click.Command = group
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def parameters(command: click.Command) -> dict[str, click.Parameter]:
    """The parameters that a run file may give, by the names in it: arguments, and long options without dashes."""
    named = {}
    for one in (one for one in command.params if not getattr(one, "hidden", False)):
        text = str(one.name) if isinstance(one, click.Argument) else max(one.opts, key=len)
        named[text.lstrip("-").replace("_", "-")] = one
    return {key: one for key, one in named.items() if key not in NOT_IN_A_FILE}


def option_problems(
    name: str, command_name: str, options: Mapping[str, Any], group: click.Group
) -> Iterator[MalformedInput]:
    """The mistakes in names and types of options, by names of `parameters`, for `command_name` of `COMMANDS`."""
    known = parameters(find_command(group, command_name))
    for key, value in options.items():
        spelled = key.replace("_", "-")
        if spelled in known:
            try:
                [*_texts(name, spelled, value, known[spelled])]
            except MalformedInput as error:
                yield error
            continue
        near = get_close_matches(spelled, known, n=1)
        places = [key for key, parameter in known.items() if isinstance(parameter, click.Argument)]
        others = f"its arguments are {listing(places)}; options: `llmconv {command_name} --help`"
        yield MalformedInput(
            f"step `{name}`: `{command_name}` has no option `{spelled}`",
            hint=f"is `{near[0]}` meant?" if near else others,
        )


def make_step(name: str, command_name: str, options: Mapping[str, Any], group: click.Group) -> Step:
    """A step without `option_problems`; UsageProblem if the command refuses a value."""
    command = find_command(group, command_name)
    known = parameters(command)
    given = {key.replace("_", "-"): value for key, value in options.items()}
    words = {key: [*_texts(name, key, value, known[key])] for key, value in given.items()}
    _require_texts(name, command_name, words)
    named = [key for key, parameter in known.items() if isinstance(parameter, click.Argument)]
    arguments = (*_options(known, words), "--", *(text for key in named for text in words.get(key, ())))
    try:
        command.make_context(f"llmconv {command_name}", [*arguments])
    except UsageProblem as error:
        raise UsageProblem(f"step `{name}`: {error.message}", hint=error.hint) from error
    except click.UsageError as error:
        what = f"step `{name}`: {usage_line(error.format_message())}"
        raise UsageProblem(what, hint=f"see `llmconv {command_name} --help`") from error
    read = [key for key, parameter in known.items() if reads(parameter) and key not in NO_FILES]
    writes = [key for key, parameter in known.items() if _writes(parameter)]
    return Step(
        name,
        command_name,
        arguments,
        (*(text for key in read for text in words.get(key, ())), *_read_within(words)),
        tuple(text for key in writes for text in words.get(key, ())),
        "overwrite" in known,
        "resume" in known,
    )


def _require_texts(name: str, command_name: str, words: Mapping[str, list[str]]) -> None:
    """Refuses a step that would read standard input."""
    sources = TEXTS.get(command_name, ())
    if not sources:
        return
    if not any(words.get(key) for key in sources):
        known = " or ".join(f"`{key}`" for key in sources)
        raise UsageProblem(f"step `{name}`: no text is given", hint=f"give {known}")
    if words.get(sources[-1]) == ["-"]:
        raise UsageProblem(f"step `{name}`: a step has no standard input", hint=f"name a file as `{sources[-1]}`")


def _read_within(words: Mapping[str, list[str]]) -> Iterator[str]:
    """The files and folders in values that are not paths alone: a Jinja template, `RUNTIME:FOLDER` of `bench`."""
    yield from (text for text in words.get("template", ()) if PurePath(text).suffix)
    for text in words.get("against", ()):
        kind, _, folder = text.partition(":")
        if place := folder if kind in RUNTIMES else text:
            yield place


def _texts(step: str, key: str, value: Any, parameter: click.Parameter) -> Iterator[str]:
    """The values of a parameter as words; none for a flag that is not set, but for one with a `--no-` form."""
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    is_several = parameter.multiple or parameter.nargs == -1
    if value is None or (is_flag and isinstance(value, bool)):
        yield from [ON] if value else [OFF] if value is False and parameter.secondary_opts else []
        return
    for one in value if isinstance(value, list) and is_several else [value]:
        if is_flag or isinstance(one, bool) or not isinstance(one, str | int | float):
            wanted = "true or false" if is_flag else "texts or numbers" if is_several else "a text or a number"
            shown = {bool: str(one).lower(), list: "a list", dict: "a mapping"}.get(type(one), f"`{one}`")
            problem = f"step `{step}`: `{key}` is {shown}, not {wanted}"
            raise MalformedInput(problem, hint=f"write `{key}: true`" if is_flag else "put a text in quotes")
        try:
            text = str(one)
        except ValueError:  # of a number with thousands of digits
            text = "\0"
        if "\0" in text:
            raise MalformedInput(f"step `{step}`: `{key}` cannot be given on a command line", hint="give a plain text")
        yield text


def _options(known: Mapping[str, click.Parameter], words: Mapping[str, list[str]]) -> Iterator[str]:
    for key, texts in words.items():
        parameter = known[key]
        if isinstance(parameter, click.Option):
            option = max(parameter.secondary_opts if parameter.is_flag and texts == [OFF] else parameter.opts, key=len)
            yield from (option if parameter.is_flag else f"{option}={text}" for text in texts)


def _writes(parameter: click.Parameter) -> bool:
    return bool(getattr(parameter.type, "is_written", False))


def reads(parameter: click.Parameter) -> bool:
    """Whether the values of a parameter are files, folders or models that the command reads."""
    return not _writes(parameter) and (isinstance(parameter, click.Argument) or parameter.metavar in READ_METAVARS)
