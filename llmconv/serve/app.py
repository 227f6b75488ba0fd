"""The application: who may send requests, the routes of OpenAI's API, and the chat page.

Programs of this machine and the chat page may send requests, pages of other sites may not. A page of another site can
make a browser post to localhost (cross-site request forgery), and can make its own host name point to 127.0.0.1 (DNS
rebinding). The browser reveals the first in the header `Origin`, the second in `Host`.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmconv.errors import LlmconvError, UsageProblem, short
from llmconv.serve.embeddings import EmbeddingReply, EmbeddingRequest, ServedEmbedder, embedding_request
from llmconv.serve.fields import ApiError, as_api_error
from llmconv.serve.metrics import FORMAT, Metrics, RequestRecord
from llmconv.serve.openai_schema import CompletionRequest, chat_request, completion_request, parse_json
from llmconv.serve.replies import KEEP_ALIVE, Reply, ResponseBuilder
from llmconv.serve.responses import ResponsesReply, response_request
from llmconv.serve.scheduler import Job, Scheduler
from llmconv.serve.served_model import Deltas, ServedModel
from llmconv.serve.tokenizing import info_of, text_of, tokens_of

# paths without API key: the page asks the user for the key, and a monitor has none
PUBLIC = frozenset({"/", "/health"})
ORIGIN = re.compile(r"https?://[^/\s]+", re.IGNORECASE)

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class AccessRules:
    """Which requests the server accepts; raises UsageProblem for an invalid origin."""

    hosts: Sequence[str] = ()  # host names of this server, in addition to `localhost` and IP addresses
    origins: Sequence[str] = ()  # other sites whose pages may send requests, such as `https://chat.example`
    api_key: str = ""  # key that every request must have; empty for none

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                problem = f"`{origin}` is not an origin"
                raise UsageProblem(problem, hint="give scheme and host only, such as https://chat.example")

    def check(self, path: str, headers: Headers) -> None:
        """Raises ApiError: 403 for an unknown host or origin, 401 for a missing or wrong key."""
        host = headers.get("host", "")
        if not self._known(host):
            raise ApiError(
                f"unknown host `{host[:80]}`: it needs the server option `--allow-host`",
                status=403,
                code="unknown_host",
            )
        origin = headers.get("origin")
        own = (f"http://{host}", f"https://{host}")
        if origin is not None and origin.lower() not in map(str.lower, (*own, *self.origins)):
            raise ApiError(
                f"requests from pages of `{origin[:80]}` need the server option `--allow-origin`",
                status=403,
                code="foreign_origin",
            )
        if self.api_key and path not in PUBLIC:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self.api_key.encode()):
                problem = "wrong API key" if key else "give the API key: `Authorization: Bearer KEY`"
                raise ApiError(problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _known(self, host: str) -> bool:
        """Whether `host` is a name of this server or an IP address, which DNS rebinding cannot fake."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in map(str.lower, self.hosts):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class AccessGuard:
    """ASGI middleware that checks every request and adds security headers to every response."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._access.check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


log = logging.getLogger("llmconv.serve")
Result = TypeVar("Result")
MAX_BODY_BYTES = 4 << 20  # maximum size of a request: about a million tokens of text
# of a body that is too large, this many are read and discarded: most clients read no answer until all is sent
CLOSED = 499  # status of a request whose client disconnected
DISCARDED_BYTES = 64 << 20
SMALL_BODY = 1 << 16  # larger requests are parsed in a thread, so that others do not wait
BODY_SECONDS = 30  # maximum time to receive a request
KEEP_ALIVE_SECONDS = 15  # a stream without new text for this long gets a comment, to keep the connection alive


@dataclass
class Endpoints:
    """The handlers of all routes, over a model, its adapters and their scheduler."""

    served: ServedModel | ServedEmbedder
    scheduler: Scheduler
    adapters: Sequence[ServedModel] = ()  # the same model with an adapter each
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    async def page(self, request: HttpRequest) -> Response:
        """`GET /`, with its content security policy."""
        self._named(None)
        text, policy = _page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: 200 while requests are accepted."""
        served, known = self.served, {"model": self.served.name, "chat": False, "images": False}
        if isinstance(served, ServedModel):
            known |= {"chat": served.chats, "images": served.sees, "defaults": served.defaults}
        return JSONResponse({"status": "ok", **known, **self.scheduler.load()})

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(one) for one in (self.served, *self.adapters)]})

    async def model(self, request: HttpRequest) -> Response:
        return JSONResponse(self._model(self._one(request.path_params["name"])))

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat_request, ResponseBuilder)

    async def complete(self, request: HttpRequest) -> Response:
        return await self._answer(request, completion_request, ResponseBuilder)

    async def respond(self, request: HttpRequest) -> Response:
        shown: list[Any] = []

        def parse(content: Any) -> CompletionRequest:
            found, repeated = response_request(content)
            shown.append(repeated)
            return found

        return await self._answer(request, parse, lambda found, *given: ResponsesReply(found, shown[0], *given))

    async def embed(self, request: HttpRequest) -> Response:
        """`POST /v1/embeddings`; 404 for a model that generates texts."""
        served = self.served
        if not isinstance(served, ServedEmbedder):
            problem = "this model generates texts, and has no embeddings: `llmconv serve` a folder of "
            raise ApiError(f"{problem}`llmconv export MODEL --task embed`", status=404, code="no_embeddings")
        body = await read_body(request)
        record = self.metrics.begin(request.url.path)

        def read() -> tuple[EmbeddingRequest, list[list[int]]]:
            content = parse_json(body)
            record.note(content)
            found = embedding_request(content)
            self._one(found.model)
            return found, served.rows(found)

        with ended(record):
            found, rows = await while_connected(request, self.scheduler.call(read))
            record.unknown, record.model = found.unknown, served.name
            reply = EmbeddingReply(found, served.name, rows)
            job = self.scheduler.submit(served.steps(rows))

            async def gather() -> None:
                async for some in job.items():
                    if some is not None:
                        reply.add(some)

            try:
                await while_connected(request, gather())
            finally:
                job.cancel()
            answer = await asyncio.to_thread(lambda: JSONResponse(reply.whole()))  # of up to millions of numbers
        record.end(200, reply.prompt_tokens)
        return answer

    async def tokenize(self, request: HttpRequest) -> Response:
        content = parse_json(await read_body(request))
        return JSONResponse(await self.scheduler.call(lambda: tokens_of(self._named, content)))

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """`GET /tokenizer_info`, as vLLM's: what lm-eval needs to use `/tokenize`."""
        return JSONResponse(info_of(self._named(None)))

    async def detokenize(self, request: HttpRequest) -> Response:
        content = parse_json(await read_body(request))
        return JSONResponse(await self.scheduler.call(lambda: text_of(self._named, content)))

    async def measures(self, request: HttpRequest) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(self.metrics.text(self.scheduler.load()), media_type=FORMAT)

    def _named(self, name: str | None) -> ServedModel:
        """The model of that name, which generates texts; ApiError for an unknown one, and for one of embeddings."""
        found = self._one(name)
        if isinstance(found, ServedEmbedder):
            problem = "this model has embeddings, and generates no texts: use /v1/embeddings"
            raise ApiError(problem, status=404, code="no_texts")
        return found

    def _one(self, name: str | None) -> ServedModel | ServedEmbedder:
        """The model of that name, None for the one without adapter; ApiError for an unknown one."""
        base = self.served
        if name is None:
            return base
        for one in (base, *self.adapters):
            if name in (one.name, f"{base.name}:{one.name}" if one is not base else None):
                return one
        known = ", ".join(f"`{one.name}`" for one in (base, *self.adapters))
        problem = f"the model `{short(name, 80)}` does not exist; this server has {known}"
        raise ApiError(problem, status=404, parameter="model", code="model_not_found")

    def _model(self, served: ServedModel | ServedEmbedder) -> dict[str, Any]:
        known = {"id": served.name, "object": "model", "created": self.created, "owned_by": "llmconv"}
        parent = {} if served is self.served else {"parent": self.served.name}
        return {**known, **parent, "context_length": served.context_length}

    async def _answer(
        self, http: HttpRequest, parse: Callable[[Any], CompletionRequest], build: Callable[..., Reply]
    ) -> Response:
        body = await read_body(http)
        record = self.metrics.begin(http.url.path)

        def read() -> CompletionRequest:
            content = parse_json(body)
            record.note(content)
            return parse(content)

        with ended(record):
            request = await asyncio.to_thread(read) if len(body) > SMALL_BODY else read()
            record.unknown = request.unknown
            served = self._named(request.model)
            record.model = served.name
            choices = await while_connected(http, self.scheduler.call(lambda: served.choices(request)))
            reply = build(request, served.name, choices, served.format.id_of_call, served.bytes_of)
            job = self.scheduler.submit(served.steps(choices, self.scheduler))
            if request.stream:
                headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
                stream = events(job, reply, record)
                return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
            await collect(http, job, reply, record)
        record.end(200, reply.prompt_tokens, reply.completion_tokens)
        return JSONResponse(reply.whole())


@contextmanager
def ended(record: RequestRecord) -> Iterator[None]:
    """Counts a request that fails, by its status."""
    try:
        yield
    except ClientDisconnect:
        record.end(CLOSED)
        raise
    except Exception as error:
        record.end(as_api_error(error).status)
        raise


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


async def collect(http: HttpRequest, job: Job[Deltas], reply: Reply, record: RequestRecord) -> None:
    """Waits for the whole answer; raises ClientDisconnect if the client disconnects first."""

    async def gather() -> None:
        async for deltas in job.items():
            for delta in deltas or ():
                if delta.tokens:
                    record.token()
                reply.add(delta)

    try:
        await while_connected(http, gather())
    finally:
        job.cancel()


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, canceled (ClientDisconnect) when the client leaves; `http`'s body has been read."""
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
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def events(job: Job[Deltas], reply: Reply, record: RequestRecord) -> AsyncIterator[bytes]:
    """The event stream of an answer; the job is canceled when the client disconnects."""
    status = CLOSED
    try:
        async for deltas in job.items(every=KEEP_ALIVE_SECONDS):
            if deltas is None:
                yield KEEP_ALIVE
                continue
            for delta in deltas:
                if delta.tokens:
                    record.token()
                for chunk in reply.chunks(delta):
                    yield chunk
        for chunk in reply.last():
            yield chunk
        status = 200
    except Exception as error:
        status = as_api_error(error).status
        yield reply.failed(as_api_error(error))
    finally:
        record.end(status, reply.prompt_tokens, reply.completion_tokens)
        job.cancel()


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    """The response to any error, see `as_api_error`; bugs are logged."""
    if not isinstance(error, ApiError | LlmconvError):
        log.error("a request failed", exc_info=error)
    answer = as_api_error(error)
    return JSONResponse(answer.body(), answer.status, answer.headers)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    """The response to an unknown path or method, in the same form as every other error."""
    assert isinstance(error, HTTPException)
    problem = f"no such endpoint: {request.method} {request.url.path[:200]}"
    return await on_api_error(request, ApiError(problem, status=error.status_code, headers=error.headers))


async def on_disconnect(request: HttpRequest, error: Exception) -> Response:
    """Status 499, which servers log for a client that disconnected; nobody receives it."""
    return Response(status_code=CLOSED)


def make_app(
    served: ServedModel | ServedEmbedder,
    scheduler: Scheduler,
    access: AccessRules | None = None,
    adapters: Sequence[ServedModel] = (),
    metrics: Metrics | None = None,
) -> Starlette:
    """The app, which starts and stops the scheduler's thread.

    Args:
        served: the model, which generates texts or has embeddings.
        scheduler: runs the answers.
        access: who may send requests; by default programs and pages of this machine.
        adapters: the same model with an adapter each, by names of their own.
        metrics: counts requests, and has their log; by default there is none.
    """
    access = access or AccessRules()
    endpoints = Endpoints(served, scheduler, adapters, metrics or Metrics())

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
            Route("/v1/responses", endpoints.respond, methods=["POST"]),
            Route("/v1/embeddings", endpoints.embed, methods=["POST"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/tokenizer_info", endpoints.tokenizer_info),
            Route("/detokenize", endpoints.detokenize, methods=["POST"]),
            Route("/metrics", endpoints.measures),
        ],
        middleware=middleware,
        exception_handlers={**handlers, HTTPException: on_http_error, ClientDisconnect: on_disconnect},
        lifespan=lifespan,
    )


# empty elements of page.html, and the files whose content goes there
PARTS = {"style": ("page.css",), "script": ("markdown.js", "page.js")}


@functools.cache
def _page() -> tuple[str, str]:
    text = _part("page.html")
    for tag, names in PARTS.items():
        content = "\n".join(_part(name) for name in names)
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>\n{content}</{tag}>")
    # a policy that allows only the page's own script and style, by their hashes, and requests to the same server
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    for tag in ("script", "style"):
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        rules.append(" ".join([f"{tag}-src", *(f"'sha256-{one}'" for one in hashes)]))
    return text, "; ".join([*rules, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


def _part(name: str) -> str:
    return resources.files("llmconv.serve").joinpath(name).read_text("utf-8")
