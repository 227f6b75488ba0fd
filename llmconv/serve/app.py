"""The ASGI app: OpenAI's endpoints, `/health`, and the chat page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from llmconv.errors import LlmconvError
from llmconv.serve.api_errors import ApiError, as_api_error
from llmconv.serve.openai_responses import KEEP_ALIVE, ResponseBuilder, event
from llmconv.serve.openai_schema import CompletionRequest, chat_request, completion_request, parse_json
from llmconv.serve.page import page_response
from llmconv.serve.request_origin import AccessGuard, AccessRules
from llmconv.serve.scheduler import Job, Scheduler
from llmconv.serve.served_model import ChoiceDelta, ServedModel

log = logging.getLogger("llmconv.serve")

Result = TypeVar("Result")

MAX_BODY_BYTES = 4 << 20
DISCARDED_BYTES = 64 << 20
"""Of a body that is too large, so many are read all the same: most clients read no answer before they sent it."""
"""Maximum size of a request: about a million tokens of text."""
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
    """The body of a request.

    Raises:
        ApiError: the content type is not JSON, or the body is too large or too slow.
    """
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
    """Waits for the whole answer, or until the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected first.
    """

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

    Args:
        http: its body has been read.
        work: any coroutine.

    Raises:
        ClientDisconnect: the client disconnected first.
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
    """The app, which starts and stops the scheduler's thread.

    Args:
        served: the model and its name.
        scheduler: runs the model.
        access: hosts, origins and API key; default: local requests only.
    """
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
