"""Connections: time limits and numbers of those that send no request, so that they keep out nobody.

uvicorn looks at a connection when the headers of a request are complete. Before that, and between two requests, it is
idle here: its place is limited, and given to a newer one before that is refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmconv.serve.api_errors import ApiError

MAX_CONNECTIONS = 900
"""Below the default limit of 1024 open files per process."""
MAX_PER_ADDRESS = 600
MAX_IDLE = 256
"""Connections without a request; beyond that the one that has been idle longest is closed."""
HEADER_SECONDS = 10.0
"""Maximum time from the connection, or from the first byte of a further request, to the end of the headers."""


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits for connections that are idle."""

    _timer: asyncio.TimerHandle | None = None
    idle_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._idle()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
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
            answer = ApiError("timeout while reading the headers", status=408, code="timeout")
            body = json.dumps(answer.body()).encode()
            head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConnectionLimit:
    """ASGI app that answers requests of too many connections with an error.

    Args:
        app: answers the others.

    Attributes:
        connections: those of the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.connections: set[Any] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
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
