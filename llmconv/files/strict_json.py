"""JSON that a user writes by hand, read strictly: equal keys, and numbers that are not finite, are slips.

Python's reader keeps the last of two equal keys, and takes `NaN`, `Infinity` and numbers beyond the range of float64,
which RFC 8259 does not have and which no other reader would take back.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

SHOWN = 40
"""Characters of a key or number in a message."""


class Slip(ValueError):
    """A text that Python reads as JSON, though not with the meaning that its author intended.

    Attributes:
        hint: the way out.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def parse_strictly(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        Slip: an object has a key twice, or a number is not finite; names the first.
        ValueError: not JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)


def first_slip(text: str) -> tuple[int, Slip] | None:
    """The first slip of a JSON array, or of another value; None where there is none.

    Args:
        text: valid JSON apart from slips.

    Returns:
        The line in which the item with the slip begins, counted from 1, and the slip.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)
    text = text.rstrip()
    begin = len(text) - len(text.lstrip())
    is_array = text.startswith("[", begin)
    position = begin + is_array
    while True:
        position = _behind_space(text, position, " \t\n\r," if is_array else " \t\n\r")
        if position == len(text) or (is_array and text[position] == "]"):
            return None
        try:
            position = decoder.raw_decode(text, position)[1]
        except Slip as slip:
            return text.count("\n", 0, position) + 1, slip


def _behind_space(text: str, position: int, space: str) -> int:
    while position < len(text) and text[position] in space:
        position += 1
    return position


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields, as `object_pairs_hook` of Python's reader.

    Raises:
        Slip: a key is there twice.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Slip(f"the key `{twice[:SHOWN]}` is there twice", "leave one of the two")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        _refuse(number)
    return value


def _refuse(number: str) -> NoReturn:
    raise Slip(f"the number `{number[:SHOWN]}` is not finite", "write a number that float64 can hold, or a text")
