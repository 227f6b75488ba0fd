"""The arguments of a Megatron run: read as data, checked one by one, and each with its type.

They have the names of Megatron-LM's command line (`megatron/training/arguments.py`), whatever container they are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.convert.formats.megatron.argument_tables import (
    IGNORED,
    IGNORED_PREFIXES,
    NEUTRAL,
    OFF,
    OLD_MODEL,
    SENSITIVE,
)
from llmconv.errors import MalformedInput, UnsupportedInput, listing

COUNT_LIMIT = 1 << 31
CAPACITY = "moe_expert_capacity_factor"


@dataclass(frozen=True)
class Arguments:
    """The arguments of one run.

    Attributes:
        source: name of the checkpoint, for messages.
        values: by name; anything that is not a plain value is an inert stub.
    """

    source: str
    values: Mapping[str, Any]

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            MalformedInput: it is missing without a default, or is not a positive integer.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < COUNT_LIMIT:
            raise self.invalid(name, value, "a positive number")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number.

        Raises:
            MalformedInput: it is something else.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self.invalid(name, value, "a positive number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A truth value.

        Raises:
            MalformedInput: it is something else.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.invalid(name, value, "true or false")
        return value

    def word(self, name: str, default: str) -> str:
        """A text; default where it is missing.

        Raises:
            MalformedInput: it is something else.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.invalid(name, value, "a word")
        return value

    def invalid(self, name: str, value: Any, expected: str) -> MalformedInput:
        """The error for an argument of another kind."""
        return MalformedInput(
            f"the argument `{name}` of `{self.source}` is {str(value)[:40]}; expected {expected}",
            hint="the checkpoint was changed, or is not one of a language model",
        )

    def unsupported(self, name: str) -> UnsupportedInput:
        """The error for an argument whose value no family has."""
        return UnsupportedInput(
            f"`{self.source}` was trained with `{name}` {str(self.values.get(name))[:40]}, which is unsupported",
            hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
        )


def check_arguments(arguments: Arguments, *, described: bool, old: bool) -> list[str]:
    """Refuses arguments that change the model in a way that no supported family has.

    Args:
        arguments: of the run.
        described: whether the user gives the model's `config.json`; then unknown arguments are only reported.
        old: whether the model is that of before Megatron core.

    Returns:
        Warnings.

    Raises:
        UnsupportedInput: names the argument.
    """
    for name, allowed in (NEUTRAL | (OLD_MODEL if old else {})).items():
        if not _is_one_of(arguments.values.get(name), allowed):
            raise arguments.unsupported(name)
    unknown = list(_unknown(arguments))
    if unknown and not described:
        raise UnsupportedInput(
            f"`{arguments.source}` was trained with unknown arguments that may change the model: {listing(unknown)}",
            hint="if they do not change it, give the model's whole `config.json` with `--config`",
        )
    warnings = [f"ignored unknown arguments: {listing(unknown)}"] if unknown else []
    if not _is_one_of(arguments.values.get(CAPACITY), OFF):
        warnings.append(f"`{CAPACITY}` drops tokens of full experts in Megatron; the converted model drops none")
    return warnings


def _unknown(arguments: Arguments) -> Iterator[str]:
    for name, value in arguments.values.items():
        known = name in NEUTRAL or name in IGNORED or IGNORED_PREFIXES.fullmatch(name)
        if SENSITIVE.search(name) and not known and not _is_one_of(value, OFF):
            yield name


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether an argument is missing or has one of these values; True is not 1."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
