"""An S3 server for tests: nanio, with the conditional writes that it lacks, a count of requests, and faults on demand.

    python -m tests.stores.server PORT FOLDER

`GET /_requests` lists the requests so far, `GET /_taken` also forgets them, `GET /_holding` asks whether one is held.
`POST /_faults` sets `Server.faults` while it runs, and forgets the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
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
            `careless`: conditions are ignored; `denied`: requests with these methods are answered 403; `revoked`: all
            after so many requests are; `full`: status and code of the answer to all writes, after `room` of them;
            `hold`: this change of the store, counted from 1, and all later ones are never answered; `late`: it is
            carried out before; `mute`: these methods are never answered; `delay`: most seconds that a
            request waits, by chance; `seed`: of all chances.
        requests: method and path of each request.
    """

    def __init__(self, folder: Path, faults: dict[str, Any]) -> None:
        self.folder, self.faults = folder, faults
        self.app = build_app(Settings(data_dir=folder.resolve(), credentials=StaticCredentialResolver({KEY: SECRET})))
        self.requests: list[str] = []
        self.changes, self.holding = 0, False
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
        listed = list(self.requests)
        if path == "/_taken":
            self.requests.clear()
        elif path == "/_faults":
            self.faults = json.loads((await receive())["body"])
            self.requests.clear()
            self.changes, self.holding = 0, False
            self.chance = random.Random(self.faults.get("seed", 0))
        await answer(send, 200, json.dumps(self.holding if path == "/_holding" else listed).encode())

    async def request(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request of a client, unless it is chosen to fail."""
        method, path = scope["method"], unquote(scope["path"]).lstrip("/")
        self.requests.append(f"{method} {path}")
        await asyncio.sleep(self.chance.random() * self.faults.get("delay", 0))
        if method not in ("GET", "HEAD"):
            self.changes += 1
        held = method not in ("GET", "HEAD") and self.changes >= self.faults.get("hold", math.inf)
        held = held or method in self.faults.get("mute", ())
        if fault := self.fault(method, takes_room=method in ("PUT", "POST") and scope["query_string"] != b"delete="):
            await answer(send, *fault)
        elif held:
            if self.faults.get("late") and self.changes == self.faults.get("hold"):
                await self.carry_out(scope, receive, to_nobody)
            self.holding = True
            await asyncio.Event().wait()
        else:
            await self.carry_out(scope, receive, self.cutting(send) if method == "GET" else send)

    async def carry_out(self, scope: Any, receive: Any, send: Any) -> None:
        """Asks nanio, which knows no conditions."""
        path = unquote(scope["path"]).lstrip("/")
        if dict(scope["headers"]).get(b"if-none-match") != b"*" or self.faults.get("careless"):
            await self.app(scope, receive, send)
            return
        async with self.locks[path]:
            if (self.folder / path).exists():
                await answer(send, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
            else:
                await self.app(scope, receive, send)

    def fault(self, method: str, *, takes_room: bool) -> tuple[int, bytes] | None:
        """Status and body of an injected error."""
        if method in self.faults.get("denied", ()) or len(self.requests) > self.faults.get("revoked", math.inf):
            return 403, b"<Error><Code>AccessDenied</Code></Error>"
        if takes_room and self.changes > self.faults.get("room", 0) and "full" in self.faults:
            status, code = self.faults["full"]
            return status, f"<Error><Code>{code}</Code><Message>no room</Message></Error>".encode()
        if self.chance.random() < self.faults.get("busy", 0):
            return 503, b"<Error><Code>SlowDown</Code></Error>"
        return None

    def cutting(self, send: Any) -> Any:
        """`send`, or one that ends the connection in the middle of a body."""
        if self.chance.random() >= self.faults.get("cut", 0):
            return send

        async def cut(message: Any) -> None:
            body = message.get("body", b"")
            if len(body) > 1000:
                await send({**message, "body": body[: len(body) // 2], "more_body": True})
                raise ConnectionAbortedError
            await send(message)

        return cut


async def to_nobody(message: Any) -> None:
    """For an answer that is lost."""


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
