"""A bucket on the S3 server of the tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.stores.server import KEY, SECRET

ROOT = Path(__file__).resolve().parents[2]
NAME = "bucket"


@dataclass(frozen=True)
class Bucket:
    """A folder in a bucket, whose objects lie as files in `folder`."""

    folder: Path
    port: int
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{NAME}/{self.prefix}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a client finds it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }

    def set_faults(self, **faults: Any) -> None:
        """Sets the server's faults, and forgets the requests so far."""
        self._ask("_faults", json.dumps(faults).encode())

    def requests(self) -> list[str]:
        """Method and path of all requests since `set_faults`."""
        answer: list[str] = json.loads(self._ask("_requests"))
        return answer

    def take_requests(self) -> list[str]:
        """As `requests`, which are then forgotten."""
        answer: list[str] = json.loads(self._ask("_taken"))
        return answer

    def changes(self, name: str = "out") -> list[str]:
        """What was written and deleted since `set_faults`, in order, by its path in a folder."""
        found = (line for line in self.requests() if not line.startswith(("GET", "HEAD")))
        return [line.replace(f"{NAME}/{self.prefix}/{name}/", "") for line in found]

    def wait_until_held(self, process: subprocess.Popen[str]) -> bool:
        """Waits for the request that the fault `hold` names; whether it came before the process ended."""
        while process.poll() is None:
            if json.loads(self._ask("_holding")):
                return True
            time.sleep(0.01)
        return False

    def _ask(self, name: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{name}", body) as answer:
            return bytes(answer.read())

    def files(self, name: str = "out") -> dict[str, bytes]:
        """The objects below a folder, by their path in it."""
        top = self.folder / self.prefix / name
        there = (path for path in sorted(top.rglob("*")) if not path.name.startswith(".tmp."))  # uploads in progress
        return {str(path.relative_to(top)): path.read_bytes() for path in there if path.is_file()}

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that are open."""
        client = boto3.client("s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], region_name="us-east-1")
        found = client.list_multipart_uploads(Bucket=NAME, Prefix=self.prefix).get("Uploads", ())
        client.close()
        return [upload["Key"] for upload in found if upload["Key"].startswith(self.prefix)]


@contextmanager
def served(home: Path) -> Iterator[Bucket]:
    """A bucket on a server of its own."""
    (home / NAME).mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.stores.server", str(port), str(home)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"}) as server:
        try:
            _wait(port)
            yield Bucket(home / NAME, port)
        finally:
            server.kill()


def _wait(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("the S3 server of the tests did not start")
