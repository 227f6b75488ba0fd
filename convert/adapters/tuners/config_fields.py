"""Settings: the fields of an `adapter_config.json`, each asked for by its type and refused when it has another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmconv.convert.adapters.lora.config import matching_key
from llmconv.convert.adapters.lora.patterns import MatchTime
from llmconv.errors import MalformedInput

LARGEST = 2.0**63
"""No field of a config is as large; integers of any length may stand in a JSON file."""


@dataclass(frozen=True)
class Settings:
    """What an adapter's config says; a field that is absent or null has the default, as PEFT reads it.

    Attributes:
        fields: the content of the file.
    """

    fields: Mapping[str, Any]
    match_time: MatchTime = field(default_factory=MatchTime, compare=False, repr=False)

    def number(self, name: str, default: float) -> float:
        """A finite number.

        Raises:
            MalformedInput: the file has something else.
        """
        return _number(name, default if self.fields.get(name) is None else self.fields[name])

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0.

        Raises:
            MalformedInput: the file has something else.
        """
        value = self.number(name, default)
        if value <= 0:
            raise odd(name, value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            MalformedInput: the file has something else.
        """
        value = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(value, bool):
            raise odd(name, value)
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings.

        Raises:
            MalformedInput: the file has something else.
        """
        value = self.fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise odd(name, value)
        return tuple(value)

    def of_module(self, pattern: str, module: str, default: float) -> float:
        """The number above 0 that `pattern`, a map of regular expressions, gives a module.

        Raises:
            MalformedInput: the file has something else.
        """
        values = self.fields.get(pattern) or {}
        if not isinstance(values, dict):
            raise odd(pattern, values)
        value = _number(pattern, values.get(matching_key(values, module, self.match_time), default))
        if value <= 0:
            raise odd(pattern, value)
        return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise odd(name, value)
    return value


def odd(name: str, value: Any) -> MalformedInput:
    """The error of a field with a value that makes no sense."""
    return MalformedInput(
        f"the adapter config has {value!r} for `{name}`", hint="repair `adapter_config.json`, or copy the adapter again"
    )
