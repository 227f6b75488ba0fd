"""serve: runs the server for a model folder until SIGINT or SIGTERM."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from llmconv.argument_checks import checked
from llmconv.errors import OutputFailed
from llmconv.files.sources import remove_downloads
from llmconv.generation import TextModel
from llmconv.generation.chat.templates import TOKENIZER
from llmconv.progress import warn
from llmconv.serve.app import make_app
from llmconv.serve.connections import ConnectionLimit, LimitedProtocol
from llmconv.serve.request_origin import AccessRules
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ServedModel

SLACK = 5
"""Seconds after the grace period in which connections may still close by themselves."""


@dataclass(frozen=True)
class ServerSettings:
    """How a model is served.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        name: model name for clients; default: the folder's name.
        parallel: maximum number of answers that are generated in turn.
        queue: maximum number of further requests that wait.
        max_new_tokens: limit for requests that set none; default: the model's own.
        template: chat template.
        system: system message of chats that have none.
        grace: seconds that running answers get when the server stops.
        allow_hosts, allow_origins, api_key: see `AccessRules`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    parallel: int = 4
    queue: int = 32
    max_new_tokens: int | None = None
    template: str = TOKENIZER
    system: str = ""
    grace: float = 3.0
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()
    api_key: str = ""


@checked
def serve(
    open_model: Callable[[], TextModel] | TextModel | str | Path,
    settings: ServerSettings | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; running answers then get a short grace period.

    Args:
        open_model: opens the model, called after the port is open, so that a port in use is reported before a model
            is loaded; or the model itself, or its folder.
        settings: address, limits and access rules.
        on_ready: called with the address and the model name when requests are accepted.

    Raises:
        OutputFailed: the port cannot be opened.
        InputRefused: the model cannot be run.
    """
    settings = settings or ServerSettings()
    access = AccessRules((*settings.allow_hosts, settings.host), settings.allow_origins, settings.api_key)
    with listen(settings.host, settings.port) as listener:
        model = _opened(open_model)
        served = ServedModel(
            model,
            settings.name or model.folder.resolve().name,
            template=settings.template,
            system=settings.system,
            max_new_tokens=settings.max_new_tokens,
            kept=settings.parallel,
        )
        if not served.chats:
            warn("the tokenizer has no chat template: chat requests are refused unless `--template` gives one")
        scheduler = Scheduler(settings.parallel, settings.queue)
        server = _Server(make_app(served, scheduler, access), scheduler, settings.grace)
        server.ready = lambda: on_ready(_address(listener), served.name) if on_ready else None
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            server.run([listener])
    if scheduler.is_running:  # a step takes too long, and its thread cannot be stopped
        sys.stdout.flush()
        remove_downloads()
        os._exit(0)


def _opened(model: Callable[[], TextModel] | TextModel | str | Path) -> TextModel:
    if isinstance(model, TextModel):
        return model
    return TextModel.open(model) if isinstance(model, str | Path) else model()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OutputFailed: the address is not available, or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        hint = "give an address of this machine: `--host 127.0.0.1`, or 0.0.0.0 for all of them"
        raise OutputFailed(
            f"cannot listen on {host} port {port}: {reason or error}",
            hint=hint if is_host else "give another `--port` (0 for any free one)",
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
