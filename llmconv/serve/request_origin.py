"""Who may ask: programs of this machine and the page itself, not pages of other sites that a browser has open.

A page elsewhere can make a browser post to localhost (cross-site request forgery), and can make its own name point to
127.0.0.1 to be taken for this server (DNS rebinding). The browser tells both: the former in `Origin`, the latter in
`Host`.
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
"""Paths that need no key: the page asks for it, and a monitor has none."""

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
    """What the server lets in.

    Attributes:
        hosts: names under which it is known beside `localhost` and addresses.
        origins: of other sites whose pages may ask, such as `https://chat.example`.
        api_key: that every request must bear; empty for none.

    Raises:
        UsageProblem: an origin that no browser sends.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    api_key: str = ""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageProblem(
                    f"`{origin}` is no origin", hint="scheme and host alone, such as https://chat.example"
                )

    def check(self, path: str, headers: Headers) -> None:
        """Lets a request pass.

        Raises:
            ApiError: 403, host or origin is foreign; 401, the key is missing or wrong.
        """
        host = headers.get("host", "")
        if not self._known(host):
            raise ApiError(
                f"the host `{host[:80]}` is none of this server's: start it with `--allow-host` for it",
                status=403,
                code="unknown_host",
            )
        origin = headers.get("origin")
        own = (f"http://{host}", f"https://{host}")
        if origin is not None and origin.lower() not in map(str.lower, (*own, *self.origins)):
            raise ApiError(
                f"pages of `{origin[:80]}` may not ask this server: start it with `--allow-origin` for them",
                status=403,
                code="foreign_origin",
            )
        if self.api_key and path not in PUBLIC:
            self._check_key(headers.get("authorization", ""))

    def _known(self, host: str) -> bool:
        """Whether a browser under that name was not led astray: an address cannot be rebound."""
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
        problem = "the API key is wrong" if key else "give the API key: `Authorization: Bearer KEY`"
        raise ApiError(problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class AccessGuard:
    """Checks every request before the app sees it, and adds headers to every response."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
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
