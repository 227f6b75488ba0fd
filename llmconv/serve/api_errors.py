"""What a client is told when a request fails: OpenAI's error object, never a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmconv.errors import LlmconvError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""HTTP status to OpenAI's `type`; of all others it is `invalid_request_error`."""


class ApiError(Exception):
    """A request that gets no answer.

    Attributes:
        status: of HTTP.
        message: one or two sentences for the person behind the client.
        parameter: the field at fault, such as `messages[0].role`.
        code: what a program looks at, such as `context_length_exceeded`.
        headers: of the response.
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
        """The JSON object of the response, or of an event in a stream."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


def _encodable(text: str) -> str:
    """The text with half surrogate pairs, which JSON may hold and UTF-8 may not, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: BaseException) -> ApiError:
    """What a client may know of any error: ours in full, a defect by no more than that it is one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LlmconvError):
        return ApiError(f"{error.message} ({error.hint})")
    return ApiError("the server failed to answer; its log says why", status=500, code="internal_error")
