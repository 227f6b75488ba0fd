"""Runs the server for a model folder until SIGINT or SIGTERM, with limits on idle connections.

uvicorn looks at a connection when the headers of a request are complete. Before that, and between two requests, a
connection is idle here: time and number of idle connections are limited, and the place of one is given to a newer one
before that is refused.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmconv.argument_checks import checked
from llmconv.embedding import Embedder, embeds
from llmconv.errors import OutputFailed, UsageProblem, printable
from llmconv.files.sources import model_name, remove_downloads
from llmconv.generation import TextModel
from llmconv.progress import say, warn
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.tokenizer import TOKENIZER
from llmconv.serve.app import AccessRules, make_app
from llmconv.serve.embeddings import ServedEmbedder
from llmconv.serve.fields import ApiError
from llmconv.serve.metrics import Metrics
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ConversationPool, ServedModel

SLACK = 5  # seconds after the grace period in which connections may still close by themselves


@dataclass(frozen=True)
class ServerSettings:
    """How a model is served.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        name: model name for clients; default: the folder's name.
        parallel: maximum number of answers that are generated at a time.
        queue: maximum number of further requests that wait.
        max_new_tokens: limit for requests that set none; default: the model's own.
        template: chat template.
        system: system message of chats that have none.
        tool_parser: the dialect of calls of tools; default: the one that the chat template tells.
        reasoning_parser: whether reasoning goes into `reasoning_content`.
        adapters: further names, each with its LoRA adapter, for graphs of `export --lora-inputs`.
        log_prompts: whether the log has the texts of requests.
        grace: seconds that running answers get when the server stops.
        allow_hosts, allow_origins, api_key: see `AccessRules`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    parallel: int = 16
    queue: int = 32
    max_new_tokens: int | None = None
    template: str = TOKENIZER
    system: str = ""
    tool_parser: str = ""
    reasoning_parser: bool = True
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    log_prompts: bool = False
    grace: float = 3.0
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()
    api_key: str = ""


@checked
def serve(
    open_model: Callable[[], TextModel | Embedder] | TextModel | Embedder | str | Path,
    settings: ServerSettings | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; running answers then get a short grace period.

    Args:
        open_model: opens the model, called after the port is open, so that a port in use is reported before a model
            is loaded; or the model itself, or its folder. One with embeddings takes of the settings address, name,
            limits and access rules.
        settings: address, limits and access rules.
        on_ready: called with the address and the model name when requests are accepted.

    Raises:
        OutputFailed: the port cannot be opened.
        InputRefused: the model cannot be run.
        UsageProblem: a classifier or a reranker, which have no endpoint; or an event loop runs in this thread.
    """
    settings = settings or ServerSettings()
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        problem = "an event loop runs in this thread, as in a notebook, and the server needs one of its own"
        raise UsageProblem(problem, hint="call it in a thread of its own, with `threading.Thread`")
    access = AccessRules((*settings.allow_hosts, settings.host), settings.allow_origins, settings.api_key)
    with listen(settings.host, settings.port) as listener:
        model = opened(open_model) if isinstance(open_model, str | Path) else open_model
        model = model if isinstance(model, TextModel | Embedder) else model()
        served, adapters = _served(model, settings)
        scheduler = Scheduler(settings.parallel, settings.queue)
        metrics = Metrics(lambda line: say(printable(line)), settings.log_prompts)
        server = _Server(make_app(served, scheduler, access, adapters, metrics), scheduler, settings.grace)
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server.ready = lambda: on_ready(address, served.name) if on_ready else None
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            server.run([listener])
    if scheduler.is_running:  # a step takes too long, and its thread cannot be stopped
        sys.stdout.flush()
        remove_downloads()
        os._exit(0)


def opened(folder: str | Path, settings: SessionSettings | None = None) -> TextModel | Embedder:
    """The model of a folder, or the embedder if its graphs have embeddings; raises as `TextModel.open`."""
    return Embedder(folder, settings) if embeds(folder) else TextModel.open(folder, settings=settings)


def _served(
    model: TextModel | Embedder, settings: ServerSettings
) -> tuple[ServedModel | ServedEmbedder, list[ServedModel]]:
    """The model as it is served, and with each adapter."""
    name = settings.name or model_name(model.folder)
    if isinstance(model, Embedder):
        return ServedEmbedder(model, name), []
    given: dict[str, Any] = {
        "template": settings.template,
        "system": settings.system,
        "max_new_tokens": settings.max_new_tokens,
        "tool_parser": settings.tool_parser,
        "reasoning_parser": settings.reasoning_parser,
    }
    names = [name, *settings.adapters]
    pools = [ConversationPool(settings.parallel, models=len(names)) for _ in names]
    served = ServedModel(model, name, pool=pools[0], **given)
    adapters = with_adapters(served, settings.adapters, pools[1:], given)
    if not served.chats:
        warn("the tokenizer has no chat template: chat requests are refused unless `--template` gives one")
    return served, adapters


def with_adapters(
    served: ServedModel,
    adapters: Mapping[str, str | Path],
    pools: Sequence[ConversationPool],
    options: Mapping[str, Any],
) -> list[ServedModel]:
    """The model with each adapter, by names of their own; they share its graphs and weights.

    Each has a pool of caches of its own; `options` are those of `ServedModel`. Raises UsageProblem for a name that the
    model has; and as `TextModel.with_adapter`.
    """
    found = []
    for (name, path), pool in zip(adapters.items(), pools, strict=True):
        if name == served.name or not name:
            raise UsageProblem(f"the adapter of `{path}` has the name of the model", hint="`--adapter NAME=PATH`")
        found.append(ServedModel(served.model.with_adapter(path), name, pool=pool, **options))
    return found


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OutputFailed if the address is not available, or the port is in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        hint = "give an address of this machine: `--host 127.0.0.1`, or 0.0.0.0 for all of them"
        problem = f"cannot listen on {host} port {port}: {reason or error}"
        raise OutputFailed(problem, hint=hint if is_host else "give another `--port` (0 for any free one)") from error


class _Server(uvicorn.Server):
    """uvicorn's server, which stops the scheduler as soon as a signal arrives."""

    ready: Callable[[], None]

    def __init__(self, app: ASGIApp, scheduler: Scheduler, grace: float) -> None:
        limited = ConnectionLimit(app)
        super().__init__(
            uvicorn.Config(
                limited,
                http=LimitedProtocol,
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(grace) + SLACK,
            )
        )
        limited.connections = self.server_state.connections
        self._scheduler, self._grace = scheduler, grace
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # llmconv has its own messages

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and then calls `ready`."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal gives running answers the grace period, a second one ends them."""
        self._scheduler.drain(0 if self.should_exit else self._grace)
        super().handle_exit(sig, frame)


MAX_CONNECTIONS = 900  # below the default limit of 1024 open files per process
MAX_PER_ADDRESS = 600
MAX_IDLE = 256  # connections without a request; beyond that the one that has been idle longest is closed
# maximum time from the connection, or from the first byte of a further request, to the end of the headers
HEADER_SECONDS = 10.0


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits for connections that are idle."""

    _timer: asyncio.TimerHandle | None = None
    idle_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Looks at what has arrived; called for every piece of it, and after every response."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self.idle_since = None
        else:
            self._watch()

    def on_response_complete(self) -> None:
        """The connection waits for the next request, or for the rest of one that was refused."""
        self._idle()
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Starts the time limit of an idle connection of which more has to come."""
        has_more = self.conn.trailing_data[0] or self.conn.our_state is h11.DONE
        if has_more and self._timer is None and self.idle_since is not None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _idle(self) -> None:
        """Makes this connection idle, and closes the one that has been so longest if there are too many."""
        self.idle_since = time.monotonic()
        idle = [one for one in self.connections if getattr(one, "idle_since", None) is not None]
        if len(idle) > MAX_IDLE:
            oldest: Any = min(idle, key=lambda one: getattr(one, "idle_since", 0.0))
            oldest.idle_since = None
            oldest.transport.close()

    def _too_slow(self) -> None:
        """Closes the connection, with a response if a request has begun."""
        self._timer = None
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            body = json.dumps(ApiError("timeout while reading the headers", status=408, code="timeout").body()).encode()
            head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConnectionLimit:
    """ASGI app that answers with an error if the server has too many `connections`; `app` answers otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.connections: set[Any] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        client = scope["client"] and scope["client"][0]
        same = sum(bool(one.client) and one.client[0] == client for one in self.connections)
        if len(self.connections) <= MAX_CONNECTIONS and same <= MAX_PER_ADDRESS:
            return None
        limit = MAX_PER_ADDRESS if same > MAX_PER_ADDRESS else MAX_CONNECTIONS
        whose = " from one address" if same > MAX_PER_ADDRESS else ""
        return ApiError(
            f"the server has {limit} connections{whose}: try again later",
            status=503,
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )
