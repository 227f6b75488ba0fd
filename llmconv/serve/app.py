"""The ASGI app: OpenAI's endpoints, `/health`, and the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

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
from llmconv.serve.openai_responses import WAITING, ResponseBuilder, event
from llmconv.serve.openai_schema import CompletionRequest, chat_request, completion_request, parse_json
from llmconv.serve.page import page_response
from llmconv.serve.request_origin import AccessGuard, AccessRules
from llmconv.serve.scheduler import Job, Scheduler
from llmconv.serve.served_model import ChoiceDelta, ServedModel

log = logging.getLogger("llmconv.serve")

MOST_BODY = 4 << 20
"""Bytes of a request: a million tokens of text."""
BODY_SECONDS = 30
"""So long a client may take to send one."""
QUIET_SECONDS = 15
"""After so long without a piece a stream gets a comment."""


@dataclass
class Endpoints:
    """What the routes need: the model, who runs it, and since when."""

    answering: ServedModel
    scheduler: Scheduler
    created: int = field(default_factory=lambda: int(time.time()))

    async def page(self, request: HttpRequest) -> Response:
        """`GET /`."""
        return page_response()

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while requests are taken."""
        told = {"status": "ok", "model": self.answering.name, "chat": self.answering.chats, **self.scheduler.load()}
        return JSONResponse(told)

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        if name != self.answering.name:
            raise ApiError(f"the model `{name[:80]}` does not exist", status=404, code="model_not_found")
        return JSONResponse(self._model())

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, chat_request)

    async def complete(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, completion_request)

    def _model(self) -> dict[str, Any]:
        context = self.answering.model.context_length
        return {
            "id": self.answering.name,
            "object": "model",
            "created": self.created,
            "owned_by": "llmconv",
            "context_length": context,
        }

    async def _answer(self, http: HttpRequest, parse: Callable[[Any], CompletionRequest]) -> Response:
        request = parse(parse_json(await read_body(http)))
        choices = await self.scheduler.call(lambda: self.answering.choices(request))
        reply = ResponseBuilder(request, self.answering.name, choices)
        job = self.scheduler.submit(self.answering.steps(choices))
        if request.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events(job, reply), media_type="text/event-stream", headers=headers)
        await collect(http, job, reply)
        return JSONResponse(reply.whole())


async def read_body(http: HttpRequest) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is no JSON by its type, it is too large, or it takes too long.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of any other site's page can be of three other types
        raise ApiError("send `Content-Type: application/json`", status=415, code="unsupported_media_type")
    too_large = ApiError(f"the body is larger than {MOST_BODY} bytes", status=413, code="request_too_large")
    length = http.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > MOST_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                body += part
                if len(body) > MOST_BODY:
                    raise too_large
    except TimeoutError:
        raise ApiError("the body took too long", status=408, code="timeout") from None
    return bytes(body)


async def collect(http: HttpRequest, job: Job[ChoiceDelta], reply: ResponseBuilder) -> None:
    """Waits for the whole answer, or for the client to hang up.

    Raises:
        ClientDisconnect: it did.
    """

    async def gather() -> None:
        async for delta in job.items():
            if delta is not None:
                reply.add(delta)

    answer, gone = asyncio.create_task(gather()), asyncio.create_task(_hung_up(http))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        answer.result()
    finally:
        job.cancel()
        answer.cancel()
        gone.cancel()


async def _hung_up(http: HttpRequest) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await http.receive()


async def events(job: Job[ChoiceDelta], reply: ResponseBuilder) -> AsyncIterator[bytes]:
    """The stream of an answer; it is cancelled when the client hangs up, and then gives its place back."""
    try:
        async for delta in job.items(every=QUIET_SECONDS):
            if delta is None:
                yield WAITING
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
    """OpenAI's error object; of a defect no more than that it is one."""
    if not isinstance(error, ApiError | LlmconvError):
        log.error("a request failed", exc_info=error)
    told = as_api_error(error)
    return JSONResponse(told.body(), told.status, told.headers)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """An unknown path or method, in the form of every other error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    told = ApiError(f"no such endpoint: {request.method} {request.url.path[:200]}", status=status, headers=headers)
    return JSONResponse(told.body(), told.status, told.headers)


async def on_disconnect(request: HttpRequest, error: Exception) -> Response:
    """Nobody reads it; 499 is what servers log of a client that left."""
    return Response(status_code=499)


def make_app(answering: ServedModel, scheduler: Scheduler, access: AccessRules | None = None) -> Starlette:
    """The app; its lifespan is that of the scheduler's thread."""
    access = access or AccessRules()
    endpoints = Endpoints(answering, scheduler)

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
