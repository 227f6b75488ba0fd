"""The JSON schema of run files, made from the commands themselves: editors complete and check by it."""

from __future__ import annotations

from typing import Any

import click

from llmconv.steps.run_file import NAME
from llmconv.steps.step import COMMANDS, find_command, parameters

DRAFT = "https://json-schema.org/draft/2020-12/schema"
VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""A text with a variable may stand for any value."""


def run_file_schema(group: click.Group) -> dict[str, Any]:
    """The JSON schema of run files."""
    return {
        "$schema": DRAFT,
        "title": "llmconv run file",
        "type": "object",
        "additionalProperties": False,
        "required": ["steps"],
        "properties": {
            "variables": {"type": "object", "description": "Values for ${name}; `--set name=value` replaces one."},
            "steps": {"type": "array", "minItems": 1, "items": {"oneOf": [_step(group, name) for name in COMMANDS]}},
        },
    }


def _step(group: click.Group, name: str) -> dict[str, Any]:
    command = find_command(group, name)
    known = parameters(command)
    options = {
        "type": ["object", "null"],
        "description": command.get_short_help_str(200),
        "additionalProperties": False,
        "properties": {key: _value(parameter) for key, parameter in known.items()},
        "required": [key for key, parameter in known.items() if parameter.required],
    }
    named = {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name],
        "properties": {**named, name: options},
    }


def _value(parameter: click.Parameter) -> dict[str, Any]:
    """The schema of one option."""
    one = _one(parameter)
    if parameter.multiple or parameter.nargs == -1:
        one = {"anyOf": [one, {"type": "array", "items": one}]}
    help_text = getattr(parameter, "help", None)
    return {**({"description": help_text} if help_text else {}), **one}


def _one(parameter: click.Parameter) -> dict[str, Any]:
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return {"anyOf": [{"type": "boolean"}, VARIABLE]}
    kind = parameter.type
    if type(kind) is click.Choice:
        values = [*kind.choices]
        return {"anyOf": [{"enum": values}, VARIABLE]}
    if isinstance(kind, click.types.IntParamType):
        return {"anyOf": [{"type": "integer"}, VARIABLE]}
    if isinstance(kind, click.types.FloatParamType):
        return {"anyOf": [{"type": "number"}, VARIABLE]}
    return {"type": ["string", "number"]}
