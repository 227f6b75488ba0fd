"""Access rules: programs of this machine and the chat page may send requests, pages of other sites may not.

A page of another site can make a browser post to localhost (cross-site request forgery), and can make its own host name
point to 127.0.0.1 (DNS rebinding). The browser reveals the first in the header `Origin`, the second in `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmconv.errors import UsageProblem
from llmconv.serve.api_errors import ApiError

PUBLIC = frozenset({"/", "/health"})
"""Paths without API key: the page asks the user for the key, and a monitor has none."""

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
    """Which requests the server accepts.

    Attributes:
        hosts: host names of this server, in addition to `localhost` and IP addresses.
        origins: other sites whose pages may send requests, such as `https://chat.example`.
        api_key: key that every request must have; empty for none.

    Raises:
        UsageProblem: an invalid origin.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    api_key: str = ""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageProblem(
                    f"`{origin}` is not an origin", hint="give scheme and host only, such as https://chat.example"
                )

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
            self._check_key(headers.get("authorization", ""))

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

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.api_key.encode()):
            return
        problem = "wrong API key" if key else "give the API key: `Authorization: Bearer KEY`"
        raise ApiError(problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class AccessGuard:
    """ASGI middleware that checks every request and adds security headers to every response."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
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
            refusal = JSONResponse(error.body(), error.status, error.headers)
            await refusal(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)
