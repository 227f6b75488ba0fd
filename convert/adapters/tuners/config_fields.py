"""Typed access to the fields of an `adapter_config.json`; a value of another type is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.convert.adapters.lora.config import matching_key
from llmconv.errors import MalformedInput
from llmconv.timed_patterns import MatchTime

LARGEST = 2.0**63
"""Limit of a number; JSON has integers of any length."""


@dataclass(frozen=True)
class AdapterFields:
    """The fields of an adapter's config; an absent or null field has the default, as in PEFT.

    Attributes:
        fields: the content of the file.
        match_time: shared by all patterns of the adapter.
    """

    fields: Mapping[str, Any]
    match_time: MatchTime = field(default_factory=MatchTime, compare=False, repr=False)

    def number(self, name: str, default: float) -> float:
        """A finite number.

        Raises:
            MalformedInput: a value of another kind.
        """
        return _number(name, default if self.fields.get(name) is None else self.fields[name])

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0.

        Raises:
            MalformedInput: a value of another kind.
        """
        value = self.number(name, default)
        if value <= 0:
            raise invalid_field(name, value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            MalformedInput: a value of another kind.
        """
        value = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(value, bool):
            raise invalid_field(name, value)
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings.

        Raises:
            MalformedInput: a value of another kind.
        """
        value = self.fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise invalid_field(name, value)
        return tuple(value)

    def of_module(self, pattern: str, module: str, default: float) -> float:
        """The number above 0 for a module, from a field with regular expressions of module paths.

        Args:
            pattern: name of the field.
            module: path of the module.
            default: if no expression matches.

        Raises:
            MalformedInput: a value of another kind.
        """
        values = self.fields.get(pattern) or {}
        if not isinstance(values, dict):
            raise invalid_field(pattern, values)
        value = _number(pattern, values.get(matching_key(values, module, self.match_time), default))
        if value <= 0:
            raise invalid_field(pattern, value)
        return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise invalid_field(name, value)
    return value


def invalid_field(name: str, value: Any) -> MalformedInput:
    """The error for an invalid value of a field."""
    return MalformedInput(
        f"the adapter config has {value!r} for `{name}`", hint="repair `adapter_config.json`, or copy the adapter again"
    )
