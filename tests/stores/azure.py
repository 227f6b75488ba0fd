"""A container on azurite, Microsoft's emulator of Azure Blob Storage; its one account has a public key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from benchmarks import environments

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / environments.folder("azurite")
PORT = 10000
"""obstore expects the emulator there."""

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-12-02"

ENVIRONMENT = {
    "AZURE_STORAGE_USE_EMULATOR": "true",
    "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": KEY,
}


def is_free() -> bool:
    """Whether nothing listens on the port."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", PORT)) != 0


@contextmanager
def container(folder: Path, name: str) -> Iterator[str]:
    """The URI of a new container on a server of its own."""
    program = HOME / "node_modules/azurite/dist/src/blob/main.js"
    command = ["node", str(program), "--silent", "--skipApiVersionCheck", "--location", str(folder)]
    with subprocess.Popen([*command, "--blobPort", str(PORT)], stdout=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 60
            while is_free() and time.monotonic() < end:
                time.sleep(0.1)
            _create(name)
            yield f"az://{name}"
        finally:
            server.kill()


def _create(name: str) -> None:
    """Creates a container, see https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
    date = formatdate(usegmt=True)
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{VERSION}", f"/{ACCOUNT}/{ACCOUNT}/{name}"]
    signed = "\n".join([*lines, "restype:container"])
    proof = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": VERSION, "Authorization": f"SharedKey {ACCOUNT}:{proof}"}
    address = f"http://127.0.0.1:{PORT}/{ACCOUNT}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(address, None, headers, method="PUT")) as answer:
        assert answer.status == 201
