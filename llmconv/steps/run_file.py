"""Run files: the commands of a job, in order, as YAML; their schema, and the inputs and outputs of the steps.

    variables:
      adapter: runs/lora
    steps:
      - to-hf:
          source: runs/ep4.pt
          output: build/base
      - merge-lora:
          base: build/base
          adapters: ["${adapter}"]
          output: build/merged
      - name: graphs
        export: {model: build/merged, prefill: true, incremental: true}

Options have the names of the command line without dashes; relative paths begin at the file's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click
import yaml

from llmconv.convert.models.config_file import YAML_LIMIT, read_config_file
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem, listing
from llmconv.files.paths import LOCAL_SCHEMES, follow_local, is_address
from llmconv.files.sources import is_hub_id
from llmconv.steps.step import COMMANDS, NO_FILES, Step, find_command, make_step, option_problems, parameters, reads


def place_of(name: str, home: Path) -> str:
    """One text for each place: the path without links, relative to `home`, on this machine; an address as it is."""
    scheme, separator, rest = name.partition("://")
    if is_address(name) and not (separator and scheme.lower() in LOCAL_SCHEMES):
        return name.rstrip("/")
    return os.path.realpath(home / (rest if separator else name))


def overlap(one: str, other: str, home: Path) -> bool:
    """Whether one of two paths (relative to `home`) or addresses is, or contains, the other."""
    places = [f"{place_of(name, home).rstrip('/')}/" for name in (one, other)]
    return places[0].startswith(places[1]) or places[1].startswith(places[0])


NAME = re.compile(r"[A-Za-z0-9][\w-]*")
INDENTED_BY_TAB = re.compile(r" *\t")
VARIABLE = re.compile(r"\$(\$|\{([^}]*)\})")  # `${name}`; `$$` is a dollar sign


class TextLoader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    """Reads true, false and null; numbers and dates stay the texts that they are: `010` is not 8, nor `1.10` 1.1."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Any]]]] = {
        first: [one for one in resolvers if one[0].endswith((":bool", ":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class RunFile:
    """A run file that was read and checked; its steps are in order."""

    path: Path
    steps: tuple[Step, ...]

    @property
    def home(self) -> Path:
        return self.path.absolute().parent


class Mistakes(MalformedInput):
    """Several mistakes of a run file, a line each, in the order of the steps."""

    def __init__(self, name: str, problems: Sequence[LlmconvError]) -> None:
        super().__init__(f"`{name}` has {len(problems)} mistakes", hint="correct them; nothing was run")
        self.message = "\n".join([self.message, *(f"- {one.message} (hint: {one.hint})" for one in problems)])


def read_run_file(path: Path, changes: Mapping[str, str], group: click.Group, *, needs_inputs: bool = False) -> RunFile:
    """Reads a YAML run file; every option of every step is checked by `group`, of all commands, before anything runs.

    `changes` are the values of `--set` by variable, or by `STEP.OPTION`: texts, `true`, `false`, or `[LIST]`. Raises
    InputRefused if there is no such file, or with `needs_inputs` for inputs that do not exist; MalformedInput for
    another form, an unknown option, or several mistakes, which are reported together; UsageProblem if a command refuses
    its options, or a change names nothing in the file.
    """
    variables, items = _listed(path)
    problems: list[LlmconvError] = []
    found: list[Named] = []
    for number, item in enumerate(items, 1):
        with _kept(problems):
            found.append(_command_of(path, item, number))
    # the steps with a name for each: by default its command, with a number from the second on
    named: list[Named] = []
    for name, command, options in found:
        taken = {one for one, *_ in named}
        if name in taken:
            problems.append(MalformedInput(f"two steps have the name `{name}`", hint="give each a name of its own"))
            continue
        plain = command.replace(" ", "-")
        numbered = (plain, *(f"{plain}-{number}" for number in range(2, len(taken) + 2)))
        named.append((name or next(text for text in numbered if text not in taken), command, options))
    if not problems:
        variables, named = _changed(variables, named, {name: _value(text) for name, text in changes.items()})
    file = RunFile(path, tuple(_step(one, variables, group, problems) for one in named))
    with _kept(problems):
        _require_own_outputs(path, [step for step in file.steps if step.is_complete])
    problems += absent_inputs(file) if needs_inputs else ()
    if problems:
        raise problems[0] if len(problems) == 1 else Mistakes(path.name, problems)
    return file


def _step(named: Named, variables: Mapping[str, Any], group: click.Group, problems: list[LlmconvError]) -> Step:
    """A step; one with mistakes is a stand-in that writes every text that it does not read."""
    name, command, options = named
    before, filled = len(problems), dict[str, Any]()
    for key, value in options.items():
        with _kept(problems):
            filled[key] = _filled(value, variables)
    problems += option_problems(name, command, filled, group)
    known = parameters(find_command(group, command))
    if len(problems) == before:
        with _kept(problems):
            return make_step(name, command, filled, group)
    else:
        given = {key.replace("_", "-") for key in options}
        slips = given - known.keys()  # of which the message names what is meant
        required = [key for key, parameter in known.items() if parameter.required]
        absent = [key for key in required if key not in given and not get_close_matches(key, slips)]
        problems += [UsageProblem(f"step `{name}`: missing `{key}`", hint="give it") for key in absent]
    read = {key for key in options if (one := known.get(key.replace("_", "-"))) and reads(one)} - {*NO_FILES}
    inputs, outputs = (
        tuple(_texts_in({key: value for key, value in options.items() if (key in read) is is_read}, variables))
        for is_read in (True, False)
    )
    return Step(name, command, ("--",), inputs, outputs, is_complete=False)


def _listed(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The variables and the items of `steps`."""
    if not path.is_file():
        raise InputRefused(f"there is no file `{path}`", hint="give a YAML file; docs/run.md describes it")
    if path.suffix not in (".yaml", ".yml"):
        raise InputRefused(f"`{path.name}` is not a YAML file", hint="its name ends with .yaml or .yml")
    content = _content(path)
    if twice := repeated_key(yaml.compose(path.read_text(encoding="utf-8"), TextLoader)):
        _refuse(path, f"has the duplicate key `{twice}`", "remove one of the two")
    if unknown := content.keys() - {"variables", "steps"}:
        _refuse(path, f"has the unknown key `{min(unknown)}`", "its keys are `variables` and `steps`")
    variables, items = content.get("variables") or {}, content.get("steps")
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        _refuse(path, "has `variables` that are not a mapping", "write `name: value`")
    if nested := [name for name, value in variables.items() if isinstance(value, str) and VARIABLE.search(value)]:
        _refuse(path, f"has a variable in the value of the variable `{nested[0]}`", "variables have plain values")
    if not isinstance(items, list) or not items:
        problem = "has `steps` that are not a list" if isinstance(items, dict) else "has no list of `steps`"
        _refuse(path, problem, "each step begins with `- `, such as `- to-hf: {…}`")
    return variables, items


@contextmanager
def _kept(problems: list[LlmconvError]) -> Iterator[None]:
    """Keeps an error with the others."""
    try:
        yield
    except LlmconvError as error:
        problems.append(error)


def _texts_in(options: Mapping[str, Any], variables: Mapping[str, Any]) -> Iterator[str]:
    """The texts among the values of a step, of which one may be what it writes."""
    for value in options.values():
        for one in value if isinstance(value, list) else [value]:
            with suppress(LlmconvError):
                text = _filled(one, variables)
                yield from [text] if isinstance(text, str) and text.strip() and "\0" not in text else []


def _content(path: Path) -> dict[str, Any]:
    """The mapping in a file; the hint of an error names slips that are usual in run files."""
    try:
        read_config_file(path)  # which refuses what would take memory or run code
        content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), TextLoader)
        return content
    except MalformedInput as error:
        lines = [] if path.stat().st_size > YAML_LIMIT else path.read_text("utf-8", "replace").splitlines()
        tabbed = next((number for number, line in enumerate(lines, 1) if INDENTED_BY_TAB.match(line)), 0)
        first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
        hint = "write `steps:` above the list" if first.startswith("- ") else error.hint
        hint = f"line {tabbed} begins with a tab; YAML is indented with spaces" if tabbed else hint
        raise MalformedInput(error.message, hint=hint) from error


def repeated_key(node: yaml.Node | None) -> str:
    """A key that a mapping has twice, at any depth, with `-` as `_`; empty if there is none."""
    seen: set[int] = set()
    nodes = [node] if node else []
    while nodes:
        one = nodes.pop()
        if id(one) in seen:  # an alias
            continue
        seen.add(id(one))
        pairs = one.value if isinstance(one, yaml.MappingNode) else []
        keys = [str(key.value) for key, _ in pairs]
        spelled = [key.replace("-", "_") for key in keys]
        for at, key in enumerate(spelled):
            if key in spelled[:at]:
                return keys[at]
        nodes += [value for _, value in pairs] if pairs else one.value if isinstance(one, yaml.SequenceNode) else []
    return ""


def _require_own_outputs(path: Path, steps: Iterable[Step]) -> None:
    """Refuses two steps that write to the same place."""
    writers: dict[str, str] = {}
    for step in steps:
        for place, name in {place_of(name, path.absolute().parent): name for name in step.outputs}.items():
            if place in writers:
                shown = name if is_address(name) else os.path.normpath(name)
                problem = f"has two steps that write `{shown}`: `{writers[place]}` and `{step.name}`"
                _refuse(path, problem, "give each an output of its own")
            writers[place] = step.name


Named = tuple[str, str, dict[str, Any]]  # name, command and options of a step


def _command_of(path: Path, item: Any, number: int) -> Named:
    """One item of `steps`; its name is empty if it has none."""

    def refuse(problem: str, hint: str) -> NoReturn:
        raise MalformedInput(f"`{path.name}`, step {number}: {problem}", hint=hint)

    if not isinstance(item, dict):
        refuse("not a mapping", "write `- COMMAND: {OPTION: VALUE}`")
    name, commands = item.get("name", ""), [key for key in item if key != "name"]
    if not isinstance(name, str) or (name and not NAME.fullmatch(name)):
        refuse("no plain `name`", "names have letters, digits, `-` and `_`")
    if len(commands) > 1 and commands[0] in COMMANDS and item[commands[0]] is None:
        refuse(f"`{commands[1]}` is next to `{commands[0]}:`", "indent options deeper than the command")
    if len(commands) != 1 or commands[0] not in COMMANDS:
        strange = next((key for key in commands if key not in COMMANDS), "")
        near = get_close_matches(str(strange), COMMANDS, n=1)
        problem = f"unknown command `{strange}`" if strange else "not one command"
        refuse(problem, f"is `{near[0]}` meant?" if near else f"commands are {', '.join(COMMANDS)}")
    options = {} if item[commands[0]] is None else item[commands[0]]
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        refuse("options that are not a mapping", "write `OPTION: VALUE`")
    return name, commands[0], options


def _value(text: str) -> Any:
    """A value of `--set`: true, false, or a list in brackets; any other is the text as it is."""
    if text in ("true", "false"):
        return text == "true"
    if not text.startswith("[") or len(text) > 10_000 or "&" in text or "*" in text:
        return text
    try:
        return yaml.load(text, yaml.BaseLoader)  # which makes texts alone
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _changed(
    variables: dict[str, Any], named: list[Named], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Named]]:
    """The variables and steps with the values of `--set`."""
    steps = {name: (command, {**options}) for name, command, options in named}
    variables = {**variables}
    for key, value in changes.items():
        step, dot, option = key.partition(".")
        if key in variables:
            variables[key] = value
        elif dot and step in steps:
            options = steps[step][1]
            spelled = next((one for one in options if one.replace("_", "-") == option.replace("_", "-")), option)
            options[spelled] = value
        else:
            known = [*variables, *(f"{name}.OPTION" for name in steps)]
            raise UsageProblem(f"--set: the file has no `{key}`", hint=f"it has {listing(known)}")
    return variables, [(name, *parts) for name, parts in steps.items()]


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """A value with its variables replaced; a text that is one variable becomes the variable's value."""
    if isinstance(value, dict):
        return {key: _filled(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, variables) for one in value]
    if not isinstance(value, str):
        return value
    if (found := VARIABLE.fullmatch(value)) and found[2] is not None:
        return _variable(found[2], variables)

    def text(found: re.Match[str]) -> str:
        if (name := found[2]) is None:
            return "$"
        part = _variable(name, variables)
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise MalformedInput(f"the variable `{name}` in a text is neither text nor number", hint="put it in quotes")
        return str(part)

    return VARIABLE.sub(text, value)


def _variable(name: str, variables: Mapping[str, Any]) -> Any:
    if name not in variables:
        known = f"it has {listing([*variables])}" if variables else "list it under `variables`"
        raise MalformedInput(f"the file has no variable `{name}`", hint=known)
    if variables[name] is None:
        hint = f"write `{name}: VALUE` or `--set {name}=VALUE`"
        raise MalformedInput(f"the variable `{name}` has no value", hint=hint)
    return variables[name]


def _refuse(path: Path, problem: str, hint: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint=hint)


NEAR = 0.8  # likeness of two names from which on one is a slip of the other, as of `difflib`
DEFAULT = "default"  # value of `calibrate` that selects the built-in text, not a file


def absent_inputs(file: RunFile) -> Iterator[InputRefused]:
    """A refusal of each input that is nowhere and that no earlier step writes.

    A name that may be of the Hub is one of the Hub, unless it is nearly what a step of the file writes, or in a folder
    into which one writes: a slip in `build/base` would be looked for there.
    """
    folders = {
        os.path.dirname(os.path.normpath(one)) for step in file.steps if step.is_complete for one in step.outputs
    }
    written: list[str] = []
    for at, step in enumerate(file.steps):
        for name in step.inputs:
            if not is_absent(name, file.home) or _is_written(name, written, file.home):
                continue
            message = f"step `{step.name}`: input `{name}` does not exist, and no earlier step writes it"
            later = (one for one in file.steps[at:] if one.is_complete and _is_written(name, [*one.outputs], file.home))
            if writer := next(later, None):
                yield InputRefused(message, hint=f"step `{writer.name}` writes it: put that step first")
                continue
            hub = f"; a model of the Hub is `hf://{name}`" if is_hub_id(name) else ""
            earlier = [one for one in file.steps[:at] if one.is_complete]
            writers = {os.path.normpath(output): one for one in earlier for output in one.outputs}
            if near := get_close_matches(os.path.normpath(name), writers, n=1, cutoff=NEAR):
                hint = f"is `{near[0]}` meant, the output of step `{writers[near[0]].name}`?{hub}"
                yield InputRefused(message, hint=hint)
            elif not is_hub_id(name) or os.path.dirname(name) in folders - {""}:
                yield InputRefused(message, hint=f"relative paths begin at the run file's folder, `{file.home}`{hub}")
        written += step.changes


def taken_for_hub_models(step: Step, written: list[str], home: Path) -> list[str]:
    """The inputs of a step that are neither here nor `written` by earlier steps, and that may be models of the Hub."""
    absent = [name for name in step.inputs if is_absent(name, home) and is_hub_id(name)]
    return [name for name in absent if not _is_written(name, written, home)]


def is_absent(name: str, home: Path) -> bool:
    """Whether a name is a path that does not exist."""
    return not is_address(name) and name != DEFAULT and not os.path.lexists(follow_local(home / name))


def _is_written(name: str, written: list[str], home: Path) -> bool:
    return any(overlap(name, one, home) for one in written)


VARIABLE_VALUE = {"type": "string", "pattern": r"\$\{"}  # a text with a variable may stand for any value


def run_file_schema(group: click.Group) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "llmconv run file",
        "type": "object",
        "additionalProperties": False,
        "required": ["steps"],
        "properties": {
            "variables": {"type": "object", "description": "Values for ${name}; `--set name=value` replaces one."},
            "steps": {
                "type": "array",
                "minItems": 1,
                "items": {"oneOf": [_step_schema(group, name) for name in COMMANDS]},
            },
        },
    }


def _step_schema(group: click.Group, name: str) -> dict[str, Any]:
    command = find_command(group, name)
    known = parameters(command)
    options = {
        "type": ["object", "null"],
        "description": command.get_short_help_str(200),
        "additionalProperties": False,
        "properties": {key: _value_schema(parameter) for key, parameter in known.items()},
        "required": [key for key, parameter in known.items() if parameter.required],
    }
    named = {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}}
    return {"type": "object", "additionalProperties": False, "required": [name], "properties": {**named, name: options}}


def _value_schema(parameter: click.Parameter) -> dict[str, Any]:
    """The schema of one option."""
    kind, value = parameter.type, dict[str, Any]()
    if isinstance(parameter, click.Option) and parameter.is_flag:
        value = {"type": "boolean"}
    elif type(kind) is click.Choice:
        value = {"enum": [*kind.choices]}
    elif isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        value = {"type": "integer" if isinstance(kind, click.types.IntParamType) else "number"}
    one: dict[str, Any] = {"anyOf": [value, VARIABLE_VALUE]} if value else {"type": ["string", "number"]}
    if parameter.multiple or parameter.nargs == -1:
        one = {"anyOf": [one, {"type": "array", "items": one}]}
    help_text = getattr(parameter, "help", None)
    return {**({"description": help_text} if help_text else {}), **one}
