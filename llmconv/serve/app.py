"""The ASGI app: OpenAI's endpoints, `/health`, and the chat page."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from llmconv.errors import LlmconvError
from llmconv.serve.api_errors import ApiError, as_api_error
from llmconv.serve.openai_schema import CompletionRequest, chat_request, completion_request, parse_json
from llmconv.serve.request_origin import AccessGuard, AccessRules
from llmconv.serve.scheduler import Job, Scheduler
from llmconv.serve.served_model import ChoiceDelta, CompletionChoice, ServedModel

log = logging.getLogger("llmconv.serve")

Result = TypeVar("Result")

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a request: about a million tokens of text."""
DISCARDED_BYTES = 64 << 20
"""Of a body that is too large, this many are read and discarded: most clients read no answer until all is sent."""
SMALL_BODY = 1 << 16
"""Larger requests are parsed in a thread, so that others do not wait."""
BODY_SECONDS = 30
"""Maximum time to receive a request."""
KEEP_ALIVE_SECONDS = 15
"""A stream without new text for this long gets a comment, to keep the connection alive."""


@dataclass
class Endpoints:
    """The handlers of all routes, over one model and its scheduler."""

    served: ServedModel
    scheduler: Scheduler
    created: int = field(default_factory=lambda: int(time.time()))

    async def page(self, request: HttpRequest) -> Response:
        """`GET /`."""
        return page_response()

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while requests are accepted."""
        kinds = {"chat": self.served.chats, "images": self.served.sees}
        known = {"model": self.served.name, **kinds, "defaults": self.served.defaults}
        status = {"status": "ok", **known, **self.scheduler.load()}
        return JSONResponse(status)

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        if name != self.served.name:
            raise ApiError(f"the model `{name[:80]}` does not exist", status=404, code="model_not_found")
        return JSONResponse(self._model())

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, chat_request)

    async def complete(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, completion_request)

    def _model(self) -> dict[str, Any]:
        context = self.served.model.context_length
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "llmconv",
            "context_length": context,
        }

    async def _answer(self, http: HttpRequest, parse: Callable[[Any], CompletionRequest]) -> Response:
        body = await read_body(http)
        request = await asyncio.to_thread(_parsed, parse, body) if len(body) > SMALL_BODY else _parsed(parse, body)
        choices = await while_connected(http, self.scheduler.call(lambda: self.served.choices(request)))
        reply = ResponseBuilder(request, self.served.name, choices)
        job = self.scheduler.submit(self.served.steps(choices))
        if request.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events(job, reply), media_type="text/event-stream", headers=headers)
        await collect(http, job, reply)
        return JSONResponse(reply.whole())


def _parsed(parse: Callable[[Any], CompletionRequest], body: bytes) -> CompletionRequest:
    return parse(parse_json(body))


async def read_body(http: HttpRequest) -> bytes:
    """The body of a request; raises ApiError if it is too large or too slow, or its content type is not JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # HTML forms of other sites cannot send this type
        raise ApiError("send `Content-Type: application/json`", status=415, code="unsupported_media_type")
    too_large = ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")
    length = http.headers.get("content-length", "0")
    waits = http.headers.get("expect", "").lower() == "100-continue"  # the client reads the answer before it sends
    if not length.isdecimal() or int(length[:20]) > (MAX_BODY_BYTES if waits else DISCARDED_BYTES):
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                size += len(part)
                if size <= MAX_BODY_BYTES:
                    body += part
                elif size > DISCARDED_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError("timeout while reading the body", status=408, code="timeout") from None
    if size > MAX_BODY_BYTES:
        raise too_large
    return bytes(body)


async def collect(http: HttpRequest, job: Job[ChoiceDelta], reply: ResponseBuilder) -> None:
    """Waits for the whole answer; raises ClientDisconnect if the client disconnects first."""

    async def gather() -> None:
        async for delta in job.items():
            if delta is not None:
                reply.add(delta)

    try:
        await while_connected(http, gather())
    finally:
        job.cancel()


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is canceled when the client disconnects.

    The body of `http` has been read. Raises ClientDisconnect.
    """
    working, disconnected = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(http))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(http: HttpRequest) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await http.receive()


async def events(job: Job[ChoiceDelta], reply: ResponseBuilder) -> AsyncIterator[bytes]:
    """The event stream of an answer; the job is canceled when the client disconnects."""
    try:
        async for delta in job.items(every=KEEP_ALIVE_SECONDS):
            if delta is None:
                yield KEEP_ALIVE
                continue
            for chunk in reply.chunks(delta):
                yield chunk
        for chunk in reply.last():
            yield chunk
    except Exception as error:
        yield event(as_api_error(error).body())
    finally:
        job.cancel()


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    """The response to any error, see `as_api_error`; bugs are logged."""
    if not isinstance(error, ApiError | LlmconvError):
        log.error("a request failed", exc_info=error)
    answer = as_api_error(error)
    return JSONResponse(answer.body(), answer.status, answer.headers)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """The response to an unknown path or method, in the same form as every other error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    answer = ApiError(f"no such endpoint: {request.method} {request.url.path[:200]}", status=status, headers=headers)
    return JSONResponse(answer.body(), answer.status, answer.headers)


async def on_disconnect(request: HttpRequest, error: Exception) -> Response:
    """Status 499, which servers log for a client that disconnected; nobody receives it."""
    return Response(status_code=499)


def make_app(served: ServedModel, scheduler: Scheduler, access: AccessRules | None = None) -> Starlette:
    """The app, which starts and stops the scheduler's thread; `access` is for local requests only by default."""
    access = access or AccessRules()
    endpoints = Endpoints(served, scheduler)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.stop)

    middleware = [Middleware(AccessGuard, access=access)]
    if access.origins:
        shared = Middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        middleware.insert(0, shared)
    handlers = {LlmconvError: on_api_error, ApiError: on_api_error, Exception: on_api_error}
    return Starlette(
        routes=[
            Route("/", endpoints.page),
            Route("/health", endpoints.health),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.complete, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={**handlers, HTTPException: on_http_error, ClientDisconnect: on_disconnect},
        lifespan=lifespan,
    )


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, so that no proxy closes a connection without traffic."""


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class ResponseBuilder:
    """Builds the response to one request while its `choices` are generated; `model` is the public name of the model."""

    request: CompletionRequest
    model: str
    choices: Sequence[CompletionChoice]
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: dict[int, list[str]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chat = self.request.is_chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        if chat and self.request.stream:
            self._head["object"] = "chat.completion.chunk"
        self._begun: set[int] = set()

    def add(self, delta: ChoiceDelta) -> None:
        """Adds the result of a step."""
        self.completion_tokens += delta.tokens
        self.cached_tokens += delta.cached
        self.texts.setdefault(delta.choice, []).append(delta.text)
        if delta.finish:
            self.finishes[delta.choice] = delta.finish

    def whole(self) -> dict[str, Any]:
        """The complete response, for a request without `stream`."""
        return {
            **self._head,
            "choices": [self._choice(index) for index in range(len(self.choices))],
            "usage": self.usage(),
        }

    def chunks(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of one step: the role before the first text, the text, and the finish reason."""
        self.add(delta)
        if self.request.is_chat and delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield self._chunk(delta.choice, {"role": "assistant", "content": ""}, None)
        if delta.text:
            yield self._chunk(delta.choice, {"content": delta.text}, None)
        if delta.finish:
            yield self._chunk(delta.choice, {}, delta.finish)

    def last(self) -> Iterator[bytes]:
        """The events at the end of a stream: token counts if the request asks for them."""
        if self.request.include_usage:
            yield event({**self._head, "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Token counts so far; a prompt with several answers counts once."""
        prompts = self.choices[:: self.request.sampling.choices]
        count = sum(len(choice.ids) for choice in prompts)
        return {
            "prompt_tokens": count,
            "completion_tokens": self.completion_tokens,
            "total_tokens": count + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self.texts.get(index, []))
        content = {"message": {"role": "assistant", "content": text}} if self.request.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": self.finishes.get(index, "stop")}

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None) -> bytes:
        content = {"delta": delta} if self.request.is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})


PARTS = {"style": ("page.css",), "script": ("markdown.js", "page.js")}
"""Empty elements of page.html, and the files whose content goes there."""


def page_response() -> HTMLResponse:
    """The page with its content security policy."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@functools.cache
def _page() -> tuple[str, str]:
    text = _part("page.html")
    for tag, names in PARTS.items():
        content = "\n".join(_part(name) for name in names)
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>\n{content}</{tag}>")
    return text, content_security_policy(text)


def _part(name: str) -> str:
    return resources.files("llmconv.serve").joinpath(name).read_text("utf-8")


def content_security_policy(html: str) -> str:
    """A policy that allows only the page's own script and style, by their hashes, and requests to the same server."""
    sources = {"script": "script-src", "style": "style-src"}
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    for tag, rule in sources.items():
        hashes = [_hash(content) for content in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)]
        rules.append(f"{rule} {' '.join(hashes)}")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
