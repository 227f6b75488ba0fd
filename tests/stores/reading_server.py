"""A small S3 server on the loopback for readers: it counts requests, answers some with 503 and cuts some bodies short.

`python -m tests.stores.reading_server FOLDER BUSY CUT` serves a folder, whose folders are the buckets, on a free port.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import obstore
import uvicorn
from nanio.app import build_app
from nanio.config import Settings
from obstore.store import S3Store

BUCKET = "models"
REQUESTS = "/-/requests"
"""The path under which the server lists the requests since it was asked last."""

CUT_AT = 64 << 10
"""Bytes after which a body is cut."""

KEYS = {
    "NANIO_ACCESS_KEY": "reader",
    "NANIO_SECRET_KEY": "not-a-secret",
    "AWS_ACCESS_KEY_ID": "reader",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@dataclass(frozen=True)
class Bucket:
    """A bucket of a running server.

    Attributes:
        endpoint: address of the server.
    """

    endpoint: str

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def put(self, name: str, content: bytes = b"{}") -> str:
        """Writes an object, with an ETag, and returns its address."""
        obstore.put(S3Store(BUCKET), name, content)
        self.requests()
        return self.uri(name)

    def put_folder(self, name: str, folder: Path) -> str:
        """Writes all files of a folder, and returns the address of the folder in the bucket."""
        for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return self.uri(name)

    def requests(self) -> list[tuple[str, str]]:
        """Method and key of all requests since the last call; a listing has no key."""
        with urlopen(self.endpoint + REQUESTS) as answer:
            return [(method, path.removeprefix(f"/{BUCKET}").lstrip("/")) for method, path in json.load(answer)]


@contextmanager
def serving(folder: Path, *, busy: float = 0, cut: float = 0) -> Iterator[Bucket]:
    """Serves a folder as the bucket `models`.

    Args:
        folder: to serve.
        busy: share of the requests that are answered with 503.
        cut: share of the bodies that end early.
    """
    (folder / BUCKET).mkdir(parents=True)
    command = [sys.executable, "-m", "tests.stores.reading_server", str(folder), str(busy), str(cut)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, **KEYS}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=root, env=environment, **pipes) as process:
        assert process.stdout
        try:
            yield Bucket(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        finally:
            process.kill()


class Faulty:
    """nanio with faults."""

    def __init__(self, app: Any, busy: float, cut: float) -> None:
        self.app, self.busy, self.cut = app, busy, cut
        self.chance = random.Random(5)
        self.requests: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] == REQUESTS:
            listed, self.requests = self.requests, []
            await answer(send, 200, json.dumps(listed).encode())
        elif self.chance.random() < self.busy:
            await answer(send, 503, b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
        else:
            self.requests.append((scope["method"], scope["path"]))
            is_cut = scope["method"] == "GET" and self.chance.random() < self.cut
            await self.app(scope, receive, cutting(send) if is_cut else send)


def cutting(send: Any) -> Any:
    """Sends up to `CUT_AT` bytes, then breaks the connection."""
    sent = 0

    async def out(message: Any) -> None:
        nonlocal sent
        if message["type"] == "http.response.body":
            sent += len(message.get("body", b""))
            if sent > CUT_AT:
                raise ConnectionError("cut")
        await send(message)

    return out


async def answer(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/xml")]})
    await send({"type": "http.response.body", "body": body})


def main(folder: str, busy: str, cut: str) -> None:
    app = Faulty(build_app(Settings(data_dir=Path(folder).resolve())), float(busy), float(cut))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="critical", access_log=False)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
