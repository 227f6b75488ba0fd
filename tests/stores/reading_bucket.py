"""A bucket for readers: what they ask for is counted, and some answers are 503 or cut short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

from tests.stores import bucket


@dataclass(frozen=True)
class Bucket:
    """A bucket of a running server.

    Attributes:
        served: the server's.
    """

    served: bucket.Bucket

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a client finds it."""
        return self.served.environment

    def uri(self, name: str) -> str:
        return f"s3://{bucket.NAME}/{name}"

    def put(self, name: str, content: bytes = b"{}") -> str:
        """Writes an object, with an ETag, and returns its address."""
        obstore.put(S3Store(bucket.NAME, client_options={"allow_http": True}), name, content)
        self.requests()
        return self.uri(name)

    def put_folder(self, name: str, folder: Path) -> str:
        """Writes all files of a folder, and returns the address of the folder in the bucket."""
        for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return self.uri(name)

    def requests(self) -> list[tuple[str, str]]:
        """Method and key of all requests since the last call; a listing has no key."""
        lines = (line.split(" ", 1) for line in self.served.take_requests())
        return [(method, path.removeprefix(bucket.NAME).lstrip("/")) for method, path in lines]


@contextmanager
def serving(folder: Path, *, busy: float = 0, cut: float = 0) -> Iterator[Bucket]:
    """Serves a folder.

    Args:
        folder: to serve.
        busy: share of the requests that are answered with 503.
        cut: share of the bodies that end early.
    """
    with bucket.served(folder) as found:
        found.set_faults(busy=busy, cut=cut, seed=5)
        yield Bucket(found)
