"""Reads the fields of a JSON object one by one, and refuses the fields that nobody read."""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar

from llmconv.serve.api_errors import ApiError

Number = TypeVar("Number", int, float)

NAMES: dict[Any, str] = {str: "a text", list: "a list", dict: "an object", str | list: "a text or a list"}


class Fields:
    """The fields of one object; null counts as missing.

    Args:
        content: the parsed JSON.
        prefix: prepended to field names in error messages.

    Raises:
        ApiError: `content` is not an object.
    """

    def __init__(self, content: Any, prefix: str = "") -> None:
        if not isinstance(content, dict):
            raise ApiError("the body must be a JSON object")
        self._left, self._prefix = dict(content), prefix

    def take(self, name: str, kind: type | UnionType) -> Any:
        """Removes and returns a field of type `kind`; None if it is missing.

        Raises:
            ApiError: it has another type.
        """
        value = self._left.pop(name, None)
        if value is None or isinstance(value, kind):
            return value
        raise self._wrong(name, NAMES.get(kind, "of another type"))

    def flag(self, name: str) -> bool:
        """Removes and returns a boolean field; False if it is missing.

        Raises:
            ApiError: it has another type.
        """
        value = self._left.pop(name, None)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(name, "true or false")

    def number(
        self, name: str, kind: type[Number], least: float | None = None, most: float | None = None
    ) -> Number | None:
        """Removes and returns a number; None if it is missing. An integer may be written with `.0`.

        Args:
            name: of the field.
            kind: int or float.
            least: minimum; None for none.
            most: maximum; None for none.

        Raises:
            ApiError: it is not a number of this type, or out of range.
        """
        value = self._left.pop(name, None)
        if value is None:
            return None
        words = "an integer" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, words)
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise self._wrong(name, words)
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = f" of at least {least:,}" if most is None else f" from {least:,} to {most:,}"
            raise self._wrong(name, words + bounds)
        try:
            return kind(value)
        except OverflowError:
            raise self._wrong(name, words) from None

    def nothing_else(self, ignored: frozenset[str]) -> None:
        """Refuses remaining fields that are not `ignored`.

        Raises:
            ApiError: there is one: a misspelled field would silently have no effect.
        """
        for name in sorted(self._left.keys() - ignored):
            shown = f"{self._prefix}{name[:80]}"
            raise ApiError(f"unrecognized request argument: {shown}", parameter=shown, code="unknown_parameter")

    def _wrong(self, name: str, words: str) -> ApiError:
        name = f"{self._prefix}{name}"
        return ApiError(f"`{name}` must be {words}", parameter=name)
