"""serve_stage: runs a server for one stage of a folder until SIGINT or SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from llmconv.errors import OutputFailed
from llmconv.progress import warn
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.stages.connection import TOKEN, Address, token
from llmconv.runtime.stages.local_stage import LocalStage, StagedExport
from llmconv.runtime.stages.stage_server import StageServer
from llmconv.runtime.stages.staged_runner import NO_CHECKSUMS

LOCAL = ("127.0.0.1", "::1", "localhost")


def serve_stage(
    folder: Path,
    number: int,
    listen: str,
    settings: SessionSettings | None = None,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serves a stage until SIGINT or SIGTERM.

    Args:
        folder: has llmconv.json, the graphs of the stage, and the weights that they map.
        number: of the stage, from 1.
        listen: HOST:PORT.
        settings: session settings; those of the stage are taken from them.
        on_ready: called with the address and the number of stages when clients are accepted.

    Raises:
        InputRefused: the folder has no graphs in stages, or files of the stage are missing or were changed.
        OutputFailed: the address is not available.
        UsageProblem: the stage does not exist, or the address is invalid.
    """
    address, export = Address.parse(listen, "--listen"), StagedExport.read(folder)
    if address.host not in LOCAL and not token():
        warn(f"anyone who can reach {address.host} can use the stage: set {TOKEN}, and use a private network")
    if not export.knows_weights:
        warn(NO_CHECKSUMS)
    stopped = threading.Event()
    with _listen(address) as listener:
        server = StageServer(LocalStage(export, number, settings), export, token())
        for sent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sent, lambda *_: stopped.set())
        if on_ready:
            on_ready(str(Address(*listener.getsockname()[:2])), export.count)
        server.serve(listener, stopped.is_set)
    if server.is_running:  # a step takes too long, and its thread cannot be stopped
        sys.stdout.flush()
        os._exit(0)


def _listen(address: Address) -> socket.socket:
    """A listening socket."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[:2], family=family, backlog=128)
    except OSError as error:
        raise OutputFailed(
            f"cannot listen on {address}: {error.strerror or error}", hint="give another `--listen` (port 0 for any)"
        ) from error
