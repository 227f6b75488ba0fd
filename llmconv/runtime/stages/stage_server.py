"""StageServer: runs one stage for clients that connect over TCP; every client has its own caches."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from llmconv.errors import LlmconvError, first_line
from llmconv.memory import reporting_out_of_memory
from llmconv.progress import say
from llmconv.runtime.stages.connection import Connection
from llmconv.runtime.stages.handshake import Refused, greet
from llmconv.runtime.stages.held_caches import HeldCaches
from llmconv.runtime.stages.local_stage import LocalStage
from llmconv.runtime.stages.message import BadMessage, Message
from llmconv.runtime.stages.staged_export import StagedExport

log = logging.getLogger("llmconv.stages")

MAX_CLIENTS = 64
MAX_GREETERS = 256
"""Connections that have not proved that they are clients; beyond that the oldest is closed."""
POLL = 0.2
"""Seconds between two looks at whether the server has to stop."""
PATIENCE = 30.0
"""Seconds that a client may take for the rest of a message that it has begun."""
HELLO_SECONDS = 10.0
"""Time limit of the whole answer to the greeting."""
SIGNS = 4
"""Heartbeats, during a run, in the time of silence that a client accepts."""


class StageServer:
    """Serves one stage.

    Args:
        stage: runs the layers, one request at a time.
        export: the stages of the folder.
        shared: token that clients must have, or empty.
    """

    def __init__(self, stage: LocalStage, export: StagedExport, shared: str = "") -> None:
        self._stage, self._export, self._shared = stage, export, shared
        self._worker = ThreadPoolExecutor(1, "llmconv-stage")
        self._greeters: dict[Connection, None] = {}  # in the order of their arrival
        self._clients: set[Connection] = set()
        self._change = threading.Lock()
        self._running: Future[Message] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the stage is running."""
        return self._running is not None and not self._running.done()

    def serve(self, listener: socket.socket, stop: Callable[[], bool]) -> None:
        """Accepts clients until `stop` returns true, and then closes their connections.

        Args:
            listener: a listening socket.
            stop: whether to stop; called a few times per second.
        """
        listener.settimeout(POLL)
        while not stop():
            with suppress(OSError):  # nobody came, or the client is gone already
                accepted, address = listener.accept()
                self._start(accepted, f"{address[0]}:{address[1]}")
        with self._change:
            connections = [*self._greeters, *self._clients]
        for connection in connections:
            connection.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _start(self, accepted: socket.socket, name: str) -> None:
        connection = Connection(accepted, HELLO_SECONDS)
        with self._change:
            self._greeters[connection] = None
            oldest = next(iter(self._greeters)) if len(self._greeters) > MAX_GREETERS else None
            if oldest:
                del self._greeters[oldest]
        if oldest:
            oldest.close()
        threading.Thread(target=self._serve_client, args=(connection, name), daemon=True).start()

    def _serve_client(self, connection: Connection, name: str) -> None:
        """Answers one client until it leaves, which frees its caches."""
        caches, reason = HeldCaches(self._stage), "the server stops"
        try:
            self._converse(connection, caches, name)
        except Refused as refusal:
            reason = str(refusal)
            with suppress(OSError):
                connection.send(refusal.answer())
        except BadMessage as error:
            reason = f"invalid message: {first_line(error)}"
            with suppress(OSError):
                connection.send(Refused(reason, "both sides need the same version of llmconv").answer())
        except EOFError:
            reason = "it left"
        except OSError as error:
            reason = error.strerror or first_line(error)
        except (CancelledError, RuntimeError):  # the worker has ended
            pass
        finally:
            connection.close()
            with self._change:
                self._greeters.pop(connection, None)
                self._clients.discard(connection)
            say(f"client {name}: disconnected ({reason}), {len(caches)} caches freed")

    def _converse(self, connection: Connection, caches: HeldCaches, name: str) -> None:
        prints, number = self._export.fingerprints, self._stage.number
        silence = greet(connection, number, prints, self._shared, HELLO_SECONDS)
        self._admit(connection)
        connection.send(Message("stage", {"number": number, "fingerprint": prints[number - 1]}))
        connection.seconds = PATIENCE
        say(f"client {name}: connected")
        while True:
            asked = connection.receive(idle=True)
            self._running = running = self._worker.submit(_answer, caches, asked)
            connection.send(_awaited(running, connection, max(silence / SIGNS, 0.05)))

    def _admit(self, connection: Connection) -> None:
        """Makes a client of a connection that has greeted.

        Raises:
            Refused: there are too many clients.
        """
        with self._change:
            if len(self._clients) >= MAX_CLIENTS:
                raise Refused(f"the stage has {MAX_CLIENTS} clients", "try again later, or start another stage")
            self._greeters.pop(connection, None)
            self._clients.add(connection)


def _awaited(running: Future[Message], connection: Connection, every: float) -> Message:
    """The result of a run; until it is there, the client gets heartbeats."""
    while True:
        try:
            return running.result(every)
        except TimeoutError:
            if running.done():
                return running.result()
            connection.send(Message("busy"))


def _answer(caches: HeldCaches, asked: Message) -> Message:
    """The answer to a request; errors of the run are answers, too.

    Raises:
        BadMessage: it is not a request.
    """
    try:
        with reporting_out_of_memory("in a stage"):
            return caches.run(asked)
    except BadMessage:
        raise
    except LlmconvError as error:
        return Message("failed", {"message": error.message, "hint": error.hint})
    except Exception:
        log.exception("a request failed")
        return Message("failed", {"message": "internal error", "hint": "see the log of the stage"})
