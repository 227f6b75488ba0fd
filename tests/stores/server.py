"""An S3 server for tests: nanio, with the conditional writes that it lacks, a count of requests, and faults on demand.

    python -m tests.stores.server PORT FOLDER

`GET /_requests` lists the requests so far; `POST /_faults` sets `Server.faults` while it runs, and forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import uvicorn
from nanio.app import build_app
from nanio.auth.credentials import StaticCredentialResolver
from nanio.config import Settings

KEY, SECRET = "canary-key", "canary-secret-6f1d"


class Server:
    """An ASGI application around nanio's.

    Attributes:
        faults: `busy`: share of requests that are answered 503; `cut`: share of bodies of ranges that end early;
            `careless`: conditions are ignored; `denied`: requests with these methods are answered 403; `hold`: this
            change of the store, counted from 1, is never answered.
        requests: method and path of each request.
    """

    def __init__(self, folder: Path, faults: dict[str, Any]) -> None:
        self.folder, self.faults = folder, faults
        self.app = build_app(Settings(data_dir=folder.resolve(), credentials=StaticCredentialResolver({KEY: SECRET})))
        self.requests: list[str] = []
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.chance = random.Random(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith("/_"):
            await self.control(scope["path"], receive, send)
        else:
            await self.request(scope, receive, send)

    async def control(self, path: str, receive: Any, send: Any) -> None:
        """Answers a request of the tests themselves."""
        if path == "/_faults":
            self.faults = json.loads((await receive())["body"])
            self.requests.clear()
        await answer(send, 200, json.dumps(self.requests).encode())

    async def request(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request of a client, unless it is chosen to fail."""
        headers, method, path = dict(scope["headers"]), scope["method"], unquote(scope["path"]).lstrip("/")
        self.requests.append(f"{method} {path}")
        if fault := self.fault(method):
            await answer(send, *fault)
        elif method not in ("GET", "HEAD") and self.changes() == self.faults.get("hold"):
            await asyncio.Event().wait()
        elif headers.get(b"if-none-match") == b"*" and not self.faults.get("careless"):
            async with self.locks[path]:
                if (self.folder / path).exists():
                    await answer(send, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
                else:
                    await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, self.cutting(send) if method == "GET" else send)

    def fault(self, method: str) -> tuple[int, bytes] | None:
        """Status and body of an injected error."""
        if method in self.faults.get("denied", ()):
            return 403, b"<Error><Code>AccessDenied</Code></Error>"
        if self.chance.random() < self.faults.get("busy", 0):
            return 503, b"<Error><Code>SlowDown</Code></Error>"
        return None

    def changes(self) -> int:
        """How many requests changed something."""
        return sum(not request.startswith(("GET ", "HEAD ")) for request in self.requests)

    def cutting(self, send: Any) -> Any:
        """`send`, or one that ends the connection in the middle of a body."""
        if self.chance.random() >= self.faults.get("cut", 0):
            return send

        async def cut(message: Any) -> None:
            if message["type"] == "http.response.body" and len(message.get("body", b"")) > 1000:
                raise ConnectionAbortedError
            await send(message)

        return cut


async def answer(send: Any, status: int, body: bytes) -> None:
    """A whole response."""
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    uvicorn.run(Server(given.folder, {}), host="127.0.0.1", port=given.port, log_level="critical", access_log=False)


if __name__ == "__main__":
    main()
