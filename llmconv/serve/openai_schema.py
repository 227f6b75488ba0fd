"""OpenAI's requests, parsed strictly: unsupported fields are refused by name, fields without effect are ignored.

Errors go to clients as OpenAI's error object, never with a traceback. Images in messages are parts of type `image_url`
whose URL contains the image; the server fetches nothing.

Sources: OpenAI's API reference, "Create chat completion" and "Create completion"; RFC 2397 for `data:` URLs.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, TypeVar

from llmconv.checkpoint import StrictJsonError, parse_strictly
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


MAX_CHOICES = 4
MAX_IMAGES = 8
MAX_PROMPTS = 16
MAX_STOPS = 4
MAX_TOKENS = 1_000_000
COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for completions; chat answers have none
# role of a message to the role in chat templates
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# fields that clients may send to any server, and that do not change the text
WITHOUT_EFFECT = frozenset(
    [
        *("metadata", "moderation", "modalities", "parallel_tool_calls", "prediction", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user"),
        "verbosity",
    ]
)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling fields, None for the model's default; some are not OpenAI's, but common in servers of open models."""

    max_tokens: int | None  # maximum number of new tokens per choice
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]  # texts that end an answer
    choices: int  # answers per prompt, 1 to 4


@dataclass(frozen=True)
class CompletionRequest:
    """A request to either endpoint."""

    model: str | None  # model name; None if the request has none
    # role and content of a chat; empty for a completion. Content is a text, or a list of parts: `{"type": "image"}`
    # stands for the next of `images`
    messages: tuple[Mapping[str, Any], ...]
    prompts: tuple[str | tuple[int, ...], ...]  # texts or token ids of a completion; empty for a chat
    sampling: SamplingOptions
    stream: bool  # send the answer in pieces
    include_usage: bool  # end the stream with token counts
    echo: bool = False  # begin a completion with its prompt
    images: tuple[bytes, ...] = ()  # image files of the chat, in order

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def parse_json(body: bytes) -> Any:
    """A request's JSON; ApiError if invalid, too deep, with a duplicate key or a number not finite or too long."""
    try:
        return parse_strictly(body)
    except StrictJsonError as slip:
        raise ApiError(f"in the body: {slip}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None


def chat_request(content: Any) -> CompletionRequest:
    """Parses the body of `/v1/chat/completions`; raises ApiError for missing, invalid and unsupported fields."""
    fields = Fields(content)
    if not (messages := fields.take("messages", list)):
        raise ApiError("`messages` must be a list of at least one message", parameter="messages")
    _refuse_tools(fields)
    for name, wanted in (("logprobs", fields.flag("logprobs")), ("top_logprobs", fields.number("top_logprobs", int))):
        if wanted:
            raise ApiError(f"log probabilities are not supported: leave `{name}` out", parameter=name)
    most = fields.number("max_completion_tokens", int, 1, MAX_TOKENS)
    deprecated = fields.number("max_tokens", int, 1, MAX_TOKENS)
    images: list[bytes] = []
    found = tuple(_message(message, f"messages[{at}]", images) for at, message in enumerate(messages))
    request = _request(fields, most if most is not None else deprecated, messages=found)
    return replace(request, images=tuple(images))


def completion_request(content: Any) -> CompletionRequest:
    """Parses the body of `/v1/completions`; raises ApiError for missing, invalid and unsupported fields."""
    fields = Fields(content)
    prompts = _prompts(fields.take("prompt", str | list))
    if fields.number("logprobs", int) is not None:
        raise ApiError("log probabilities are not supported: leave `logprobs` out", parameter="logprobs")
    if fields.take("suffix", str):
        raise ApiError("`suffix` is not supported", parameter="suffix")
    if fields.number("best_of", int, 1) not in (None, 1):
        raise ApiError("`best_of` must be 1", parameter="best_of")
    most = fields.number("max_tokens", int, 1, MAX_TOKENS)
    return _request(fields, COMPLETION_TOKENS if most is None else most, prompts=prompts, echo=fields.flag("echo"))


def _request(
    fields: Fields,
    max_tokens: int | None,
    messages: tuple[Mapping[str, Any], ...] = (),
    prompts: tuple[str | tuple[int, ...], ...] = (),
    echo: bool = False,
) -> CompletionRequest:
    for name in ("presence_penalty", "frequency_penalty"):
        if fields.number(name, float):
            raise ApiError(f"`{name}` must be 0: use `repetition_penalty`, as in transformers", parameter=name)
    if fields.take("logit_bias", dict):
        raise ApiError("`logit_bias` is not supported", parameter="logit_bias")
    options = Fields(fields.take("stream_options", dict) or {}, "stream_options.")
    include_usage = options.flag("include_usage")
    options.flag("include_obfuscation")
    options.nothing_else(frozenset())
    sampling, stream, model = _sampling(fields, max_tokens), fields.flag("stream"), fields.take("model", str)
    fields.nothing_else(WITHOUT_EFFECT)
    return CompletionRequest(model, messages, prompts, sampling, stream, include_usage, echo)


def _sampling(fields: Fields, max_tokens: int | None) -> SamplingOptions:
    choices = fields.number("n", int, 1, MAX_CHOICES)
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", float, 0, 2),
        top_p=fields.number("top_p", float, 0, 1),
        top_k=fields.number("top_k", int, 0),
        min_p=fields.number("min_p", float, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", float, 0.01, 100),
        seed=fields.number("seed", int, -(2**63), 2**63 - 1),
        stop=_stops(fields.take("stop", str | list)),
        choices=1 if choices is None else choices,
    )


def _stops(value: str | list[Any] | None) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(f"`stop` must be one to {MAX_STOPS} texts that are not empty", parameter="stop")
    return tuple(_text(stop, "stop") for stop in stops)


def _refuse_tools(fields: Fields) -> None:
    for name in ("tools", "functions"):
        if fields.take(name, list):
            raise ApiError(f"`{name}` is not supported: this server returns only text", parameter=name)
    for name in ("tool_choice", "function_call"):
        if fields.take(name, str | dict) not in (None, "none", "auto"):
            raise ApiError(f"`{name}` is not supported", parameter=name)
    wanted = fields.take("response_format", dict)
    if wanted and wanted.get("type") != "text":
        raise ApiError('`response_format` must be {"type": "text"}', parameter="response_format")
    for name in ("audio", "web_search_options"):
        if fields.take(name, dict):
            raise ApiError(f"`{name}` is not supported", parameter=name)


def _message(message: Any, where: str, images: list[bytes]) -> Mapping[str, Any]:
    """A checked message; its images are added to `images`."""
    if not isinstance(message, dict):
        raise ApiError(f"`{where}` must be an object with role and content", parameter=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(f"'{name}'" for name in ROLES)
        raise ApiError(f"`{where}.role` must be one of {known}", parameter=f"{where}.role")
    if message.get("tool_calls") or message.get("function_call"):
        raise ApiError(f"`{where}.tool_calls` is not supported", parameter=f"{where}.tool_calls")
    if message.get("content") is None:
        found = "is null" if "content" in message else "is missing"
        problem = f"`{where}.content` {found} but must be a text: tool calls, which need none, are not supported"
        raise ApiError(problem, parameter=f"{where}.content")
    return {"role": ROLES[role], "content": _content(message["content"], f"{where}.content", images)}


def _content(content: Any, where: str, images: list[bytes]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list) or not content:
        raise ApiError(f"`{where}` must be a text or a list of parts of text", parameter=where)
    return [_part(part, f"{where}[{at}]", images) for at, part in enumerate(content)]


def _part(part: Any, where: str, images: list[bytes]) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "image_url":
        if len(images) == MAX_IMAGES:
            raise ApiError(f"a chat has at most {MAX_IMAGES} images", parameter=where)
        images.append(image_of(part, where))
        return {"type": "image"}
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ApiError(f"`{where}` must be a part of type 'text' or 'image_url'", parameter=where)
    return {"type": "text", "text": _text(part["text"], where)}


def _prompts(prompt: str | list[Any] | None) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str) or (prompt and all(map(_is_token, prompt))):
        return (_prompt(prompt, "prompt"),)
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise ApiError(
            f"`prompt` must be a text, token ids, or a list of one to {MAX_PROMPTS} of either", parameter="prompt"
        )
    return tuple(_prompt(one, f"prompt[{at}]") for at, one in enumerate(prompt))


def _prompt(prompt: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return _text(prompt, where)
    if isinstance(prompt, Sequence) and prompt and all(map(_is_token, prompt)):
        return tuple(prompt)
    raise ApiError(f"`{where}` must be a text or a list of token ids", parameter=where)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows half of a surrogate pair, tokenizers do not
        raise ApiError(f"`{where}` contains half of a surrogate pair", parameter=where) from None
    return text


Number = TypeVar("Number", int, float)
NAMES: dict[Any, str] = {str: "a text", list: "a list", dict: "an object", str | list: "a text or a list"}


class Fields:
    """A JSON object's fields, null as missing, else ApiError, its names after `prefix`."""

    def __init__(self, content: Any, prefix: str = "") -> None:
        if not isinstance(content, dict):
            raise ApiError("the body must be a JSON object")
        self._left, self._prefix = dict(content), prefix

    def take(self, name: str, kind: type | UnionType) -> Any:
        """Removes and returns a field, None if it is missing; raises ApiError for another type than `kind`."""
        if (value := self._left.pop(name, None)) is None or isinstance(value, kind):
            return value
        raise self._wrong(name, NAMES.get(kind, "of another type"))

    def flag(self, name: str) -> bool:
        """Removes and returns a boolean field, False if it is missing; raises ApiError for another type."""
        if (value := self._left.pop(name, None)) is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(name, "true or false")

    def number(
        self, name: str, kind: type[Number], least: float | None = None, most: float | None = None
    ) -> Number | None:
        """Removes and returns a number or None, `1.0` for 1, too; ApiError unless from `least` to `most`."""
        if (value := self._left.pop(name, None)) is None:
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

    def nothing_else(self, ignored: frozenset[str]) -> None:
        """Raises ApiError for a remaining field that is not `ignored`; a misspelled one would have no effect."""
        for name in sorted(self._left.keys() - ignored):
            shown = f"{self._prefix}{name[:80]}"
            raise ApiError(f"unrecognized request argument: {shown}", parameter=shown, code="unknown_parameter")

    def _wrong(self, name: str, words: str) -> ApiError:
        name = f"{self._prefix}{name}"
        return ApiError(f"`{name}` must be {words}", parameter=name)


DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
DETAILS = ("auto", "low", "high")  # values of `detail`, which has no effect: the model's processor decides


def image_of(part: dict[str, Any], where: str) -> bytes:
    """The bytes of the image file in a part of type `image_url`; raises ApiError without a `data:` URL of an image."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not isinstance(given, dict) or given.get("detail", "auto") not in DETAILS:
        raise ApiError(f"`{where}.image_url` must be an object with a `url`", parameter=where)
    if not (start := DATA.match(url)):
        raise ApiError(
            f"`{where}.image_url.url` must be a URL that begins with `data:image/png;base64,` or the like: this server "
            "fetches no images",
            parameter=where,
        )
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"`{where}.image_url.url` is not valid base64", parameter=where) from None
