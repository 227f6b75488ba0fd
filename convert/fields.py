"""The fields of a configuration, checked as they are read: sizes, numbers, flags, names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from llmconv.errors import MalformedInput

LARGEST = 1e15  # no number of a configuration is larger
SHORT = Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxlong, SHORT.maxother = 3, 80, 80, 80


@dataclass(frozen=True)
class Fields:
    """Named values of one file; one that is null counts as missing. A value of another kind is a MalformedInput."""

    values: Mapping[str, Any]
    source: str = ""  # name of the checkpoint, for messages
    where: str = "in the configuration of `{}`"  # with the source for `{}`
    hint: str = "give the model's own `config.json` with `--config`"

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def count(self, *names: str, default: int | None = None, most: int = 1 << 31) -> int:
        """A positive integer below `most`; required without a default."""
        value = self.get(*names, default=default)
        if type(value) is not int or not 0 < value < most:
            raise self.invalid(names[0], value, "a positive integer")
        return value

    def number(self, *names: str, default: float | None = None, least: float = 0, most: float = LARGEST) -> float:
        """A number between `least` and `most`, both excluded; required without a default."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < most:
            raise self.invalid(names[0], value, "a positive number" if least == 0 else "a number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.invalid(name, value, "true or false")
        return value

    def word(self, name: str, default: str = "") -> str:
        value = self.get(name, default=default)
        if not isinstance(value, str):
            raise self.invalid(name, value, "a word")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self.get(name, default=[]) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(name, value, "a list of names")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self.get(name, default={}) or {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.invalid(name, value, "an object")
        return value

    def invalid(self, name: str, value: Any, expected: str = "") -> MalformedInput:
        wanted = f"; expected {expected}" if expected else ""
        try:  # a few levels and entries: a pickle may hold a graph without end
            shown = SHORT.repr(value)
        except ValueError:  # an integer of more digits than Python writes
            shown = "a number of thousands of digits"
        return MalformedInput(f"`{name}` {self.where.format(self.source)} is invalid: {shown}{wanted}", hint=self.hint)
