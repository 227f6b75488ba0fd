"""Reads hand-written JSON strictly: duplicate keys and numbers that are not finite are errors.

Python's parser keeps the last of two equal keys, and accepts `NaN`, `Infinity` and numbers beyond the range of float64,
which RFC 8259 and other parsers do not.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

SHOWN = 40
"""Maximum characters of a key or number in a message."""


class StrictJsonError(ValueError):
    """JSON that Python accepts, but not with the meaning that its author intended; `hint` is the way out."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def parse_strictly(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises StrictJsonError for the first duplicate key or number that is not finite; ValueError for other invalid JSON;
    RecursionError for too deep nesting.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)


def first_strict_error(text: str) -> tuple[int, StrictJsonError] | None:
    """The first strict error in a JSON value (usually an array) that Python accepts; None if there is none.

    It follows the line, counted from 1, in which the item with the error begins.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)
    text = text.rstrip()
    begin = len(text) - len(text.lstrip())
    is_array = text.startswith("[", begin)
    position = begin + is_array
    while True:
        position = _skip_space(text, position, " \t\n\r," if is_array else " \t\n\r")
        if position == len(text) or (is_array and text[position] == "]"):
            return None
        try:
            position = decoder.raw_decode(text, position)[1]
        except StrictJsonError as error:
            return text.count("\n", 0, position) + 1, error


def _skip_space(text: str, position: int, space: str) -> int:
    while position < len(text) and text[position] in space:
        position += 1
    return position


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of these fields, as `object_pairs_hook` of Python's parser; raises StrictJsonError for a duplicate key."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise StrictJsonError(f"duplicate key `{duplicate[:SHOWN]}`", "remove one of the two")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        _refuse(number)
    return value


def _refuse(number: str) -> NoReturn:
    raise StrictJsonError(f"the number `{number[:SHOWN]}` is not finite", "write a float64 number, or a string")
