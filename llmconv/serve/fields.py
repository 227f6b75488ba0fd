"""The fields of a request, taken one by one, and the error that a client gets for a wrong one.

Errors go to clients as OpenAI's error object, never with a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from llmconv.errors import LlmconvError, StageFailed

# HTTP status to OpenAI's error `type`; all others are `invalid_request_error`
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """A failed request: `message` for a person, HTTP `status`, `headers` of the response.

    `parameter` is the invalid field, such as `messages[0].role`; `code` is for programs, such as
    `context_length_exceeded`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _encodable(message), code
        self.parameter = None if parameter is None else _encodable(parameter)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object for the response or for an event of a stream."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


def _encodable(text: str) -> str:
    """The text with lone surrogates escaped: JSON allows them, UTF-8 does not."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: BaseException) -> ApiError:
    """The error for the client: llmconv's errors with message and hint, a bug without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StageFailed):
        return ApiError(f"{error.message} ({error.hint})", status=503, code="stage_failed")
    if isinstance(error, LlmconvError):
        return ApiError(f"{error.message} ({error.hint})")
    return ApiError("internal server error; see the log of the server", status=500, code="internal_error")


Number = TypeVar("Number", int, float)
NAMES: dict[Any, str] = {
    str: "a text",
    list: "a list",
    dict: "an object",
    str | list: "a text or a list",
    bool: "true or false",
}


class Fields:
    """A JSON object's fields, null as missing, else ApiError, its names after `prefix`."""

    def __init__(self, content: Any, prefix: str = "") -> None:
        if not isinstance(content, dict):
            raise ApiError("the body must be a JSON object")
        self._left, self._prefix = dict(content), prefix
        self.asked: set[str] = set()  # names that were looked for

    def take(self, name: str, kind: Any) -> Any:
        """Removes and returns a field, None if it is missing; raises ApiError for another type than `kind`."""
        if (value := self._pop(name)) is None or isinstance(value, kind):
            return value
        raise self._wrong(name, NAMES.get(kind, "of another type"))

    def flag(self, name: str) -> bool:
        """Removes and returns a boolean field, False if it is missing; raises ApiError for another type."""
        return bool(self.take(name, bool))

    def number(
        self, name: str, kind: type[Number], least: float | None = None, most: float | None = None
    ) -> Number | None:
        """Removes and returns a number or None, `1.0` for 1, too; ApiError unless from `least` to `most`."""
        if (value := self._pop(name)) is None:
            return None
        words = "an integer" if kind is int else "a number"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (kind is int and isinstance(value, float) and not value.is_integer()):
            raise self._wrong(name, words)
        if (least is not None and value < least) or (most is not None and value > most):
            bounds = f" of at least {least:,}" if most is None else f" from {least:,} to {most:,}"
            raise self._wrong(name, words + bounds)
        try:
            return kind(value)
        except OverflowError:
            raise self._wrong(name, words) from None

    @property
    def left(self) -> list[str]:
        """The names of fields that nothing has taken, null ones left out, in alphabetical order."""
        return sorted(name for name, value in self._left.items() if value is not None)

    def nothing_else(self) -> None:
        """Raises ApiError for a remaining field: where a misspelled one would change what the others mean."""
        for name in self.left:
            shown = f"{self._prefix}{name[:80]}"
            raise ApiError(f"unrecognized request argument: {shown}", parameter=shown, code="unknown_parameter")

    def _pop(self, name: str) -> Any:
        self.asked.add(name)
        return self._left.pop(name, None)

    def _wrong(self, name: str, words: str) -> ApiError:
        name = f"{self._prefix}{name}"
        return ApiError(f"`{name}` must be {words}", parameter=name)


def checked_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows half of a surrogate pair, tokenizers do not
        raise ApiError(f"`{where}` contains half of a surrogate pair", parameter=where) from None
    return text
