"""A cheap S3 server: it serves files as they lie, drops the bodies of large objects, and hashes nothing.

`python -m benchmarks.bucket_server FOLDER` serves the files of a folder as the objects of any bucket, on a free port,
which it prints. What is put is kept if it is small; of the rest, the size.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape, unescape

KEPT = 1 << 20
"""Bytes of the largest body that is kept."""

BUFFER = 1 << 20
"""Bytes that are received and dropped by one call."""

REQUESTS = "/-/requests"
"""The path under which the server lists the requests since it was asked last."""

DATE, ISO = "Mon, 02 Nov 2026 10:00:00 GMT", "2026-11-02T10:00:00.000Z"


@dataclass
class Content:
    """An object that was put: its size, and its bytes if they were kept."""

    size: int
    body: bytes = b""


class Server(ThreadingHTTPServer):
    """The server's state."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.folder, self.lock = folder, Lock()
        self.objects: dict[str, Content] = {}
        self.parts: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing where a client was killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def size(self, key: str) -> int | None:
        """Bytes of an object, None if there is none."""
        if key in self.objects:
            return self.objects[key].size
        path = self.folder / key
        return path.stat().st_size if key and path.is_file() else None

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, which is empty or ends with a slash."""
        files = (str(path.relative_to(self.folder)) for path in (self.folder / prefix).rglob("*") if path.is_file())
        return sorted({*files, *(key for key in self.objects if key.startswith(prefix))})


class Request(BaseHTTPRequestHandler):
    """One connection; S3's names of methods and parameters."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def parse_request(self) -> bool:
        """Also splits the path into key and parameters, and counts the request."""
        if not super().parse_request():
            return False
        url = urlsplit(self.path)
        self.key = unquote(url.path).lstrip("/").partition("/")[2]
        self.query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if url.path != REQUESTS:
            self.server.requests.append((self.command, self.key))
        return True

    def do_HEAD(self) -> None:
        """Size and ETag."""
        size = self.server.size(self.key)
        self.answer(404 if size is None else 200, length=size or 0)

    def do_GET(self) -> None:
        """A range, a listing, or the requests so far."""
        if self.path == REQUESTS:
            listed, self.server.requests = self.server.requests, []
            self.answer(200, json.dumps(listed).encode())
        elif "list-type" in self.query:
            self.answer(200, self.listing(self.query.get("prefix", "")).encode())
        elif (size := self.server.size(self.key)) is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send_range(size)

    def listing(self, prefix: str) -> str:
        """The answer to ListObjectsV2."""
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{self.server.size(key)}</Size>"
            f'<LastModified>{ISO}</LastModified><ETag>"{self.server.size(key)}"</ETag></Contents>'
            for key in self.server.keys(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"

    def send_range(self, size: int) -> None:
        """Part of an object, straight from its file; a hole is sent as zeros."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        self.answer(206 if found else 200, length=stop - start, place=f"bytes {start}-{stop - 1}/{size}")
        if kept := self.server.objects.get(self.key):
            self.wfile.write(kept.body[start:stop] or bytes(stop - start))
            return
        with open(self.server.folder / self.key, "rb") as file:
            while start < stop and (sent := os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)):
                start += sent

    def do_PUT(self) -> None:
        """An object, or a part of one."""
        content = self.receive()
        if upload := self.query.get("uploadId"):
            with self.server.lock:
                self.server.parts[upload] += content.size
            self.answer(200)
            return
        with self.server.lock:
            exists = self.headers.get("If-None-Match") == "*" and self.key in self.server.objects
            if not exists:
                self.server.objects[self.key] = content
        self.answer(*(412, b"<Error><Code>PreconditionFailed</Code></Error>") if exists else (200, b""))

    def receive(self) -> Content:
        """Takes the body, and keeps it if it is small."""
        size = rest = int(self.headers.get("Content-Length", 0))
        if size <= KEPT:
            return Content(size, self.rfile.read(size))
        buffer = memoryview(bytearray(BUFFER))
        while rest:
            rest -= self.rfile.readinto(buffer[: min(rest, BUFFER)])
        return Content(size)

    def do_POST(self) -> None:
        """Begins or completes an upload in parts, or deletes many objects."""
        body = self.receive().body.decode()
        if "delete" in self.query:
            keys = re.findall("<Key>.*?</Key>", body)
            for key in keys:
                self.server.objects.pop(unescape(key[5:-6]), None)
            name, inner = "DeleteResult", "".join(f"<Deleted>{key}</Deleted>" for key in keys)
        elif "uploads" in self.query:
            with self.server.lock:
                upload = str(len(self.server.parts))
                self.server.parts[upload] = 0
            name, inner = "InitiateMultipartUploadResult", self.named(f"<UploadId>{upload}</UploadId>")
        else:
            size = self.server.parts[self.query["uploadId"]]
            self.server.objects[self.key] = Content(size)
            name, inner = "CompleteMultipartUploadResult", self.named(f'<ETag>"{size}"</ETag>')
        self.answer(200, f"<{name}>{inner}</{name}>".encode())

    def named(self, inner: str) -> str:
        """Bucket and key, and what follows them."""
        return f"<Bucket>b</Bucket><Key>{escape(self.key)}</Key>{inner}"

    def do_DELETE(self) -> None:
        """Forgets an object."""
        self.server.objects.pop(self.key, None)
        self.answer(204)

    def answer(self, status: int, body: bytes = b"", length: int | None = None, place: str = "") -> None:
        """Status, headers, and a body that is at hand; the ETag is the size."""
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", f'"{self.server.size(self.key) or 0}"')
        self.send_header("Last-Modified", DATE)
        if place:
            self.send_header("Content-Range", place)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves a folder from another process; yields the server's address."""
    command = [sys.executable, "-m", "benchmarks.bucket_server", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which a client finds the server."""
    keys = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": endpoint}


def requests(endpoint: str) -> list[tuple[str, str]]:
    """Method and key of all requests since the last call."""
    with urlopen(endpoint + REQUESTS) as answer:
        return [(method, key) for method, key in json.load(answer)]


if __name__ == "__main__":
    server = Server(Path(sys.argv[1]).resolve())
    print(server.server_port, flush=True)
    server.serve_forever()
