"""The fields of a JSON object, taken one by one, so that what nobody took is known."""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar

from llmconv.serve.api_errors import ApiError

Number = TypeVar("Number", int, float)

NAMES: dict[Any, str] = {str: "a text", list: "a list", dict: "an object", str | list: "a text or a list"}


class Fields:
    """The fields of one object; null is a field that is not there.

    Args:
        content: what the JSON holds.
        prefix: of the names in messages.

    Raises:
        ApiError: it is no object.
    """

    def __init__(self, content: Any, prefix: str = "") -> None:
        if not isinstance(content, dict):
            raise ApiError("the body must be a JSON object")
        self._left, self._prefix = dict(content), prefix

    def take(self, name: str, kind: type | UnionType) -> Any:
        """A field of a kind, None where it is not there.

        Raises:
            ApiError: it is of another kind.
        """
        value = self._left.pop(name, None)
        if value is None or isinstance(value, kind):
            return value
        raise self._wrong(name, NAMES.get(kind, "of another kind"))

    def flag(self, name: str) -> bool:
        """A true or false field, false where it is not there.

        Raises:
            ApiError: it is of another kind.
        """
        value = self._left.pop(name, None)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(name, "true or false")

    def number(
        self, name: str, kind: type[Number], least: float | None = None, most: float | None = None
    ) -> Number | None:
        """A number, None where it is not there; a whole one may be written with `.0`.

        Raises:
            ApiError: it is none, not whole where `kind` is int, or out of its range.
        """
        value = self._left.pop(name, None)
        if value is None:
            return None
        words = "a whole number" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, words)
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise self._wrong(name, words)
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = f" of at least {least:g}" if most is None else f" from {least:g} to {most:g}"
            raise self._wrong(name, words + bounds)
        try:
            return kind(value)
        except OverflowError:
            raise self._wrong(name, words) from None

    def nothing_else(self, ignored: frozenset[str]) -> None:
        """Sees that nothing is left but fields without effect.

        Raises:
            ApiError: something is: a misspelt field would change nothing in silence.
        """
        for name in sorted(self._left.keys() - ignored):
            shown = f"{self._prefix}{name[:80]}"
            raise ApiError(f"unrecognized request argument: {shown}", parameter=shown, code="unknown_parameter")

    def _wrong(self, name: str, words: str) -> ApiError:
        name = f"{self._prefix}{name}"
        return ApiError(f"`{name}` must be {words}", parameter=name)
