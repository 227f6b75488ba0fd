"""Errors for clients, as OpenAI's error object and never with a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.errors import LlmconvError, StageFailed

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""HTTP status to OpenAI's error `type`; all others are `invalid_request_error`."""


class ApiError(Exception):
    """A failed request.

    Attributes:
        status: HTTP status.
        message: one or two sentences for a person.
        parameter: the invalid field, such as `messages[0].role`.
        code: error code for programs, such as `context_length_exceeded`.
        headers: headers of the response.
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
