"""Connection: sends and receives messages over a TCP socket, with a time limit for every wait."""

from __future__ import annotations

import socket
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from llmconv.errors import UsageProblem
from llmconv.runtime.stages.message import MAX_BODY, Message, read_message

CHUNK = 1 << 20
"""Bytes that are received at a time: memory grows with what arrives, and not with what is announced."""

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""After this many seconds the system tests whether a silent peer still exists: it is gone a minute later."""


@dataclass(frozen=True)
class Address:
    """A TCP address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """From HOST:PORT, with brackets around an IPv6 address.

        Args:
            text: the address.
            option: where it was given, for the error.

        Raises:
            UsageProblem: it is not an address.
        """
        host, _, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise UsageProblem(
                f"`{option} {text}` is not an address", hint="give HOST:PORT, such as 127.0.0.1:7700 or [::1]:7700"
            )
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connection:
    """A connection between a client and a stage.

    Args:
        connected: the socket, which the connection owns from now on.
        seconds: time limit of every wait for the peer: until some bytes arrive, or are taken.
    """

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._socket, self.seconds = connected, seconds
        self._end: float | None = None  # of the message that is received
        weakref.finalize(self, connected.close)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            with suppress(AttributeError, OSError):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            OSError: the peer is gone, or takes nothing for too long.
            BadMessage: the message is too large.
        """
        prefix, header, *body = message.encode()
        self._socket.settimeout(self.seconds)
        for part in chain(
            [b"".join([prefix, header, *body])] if sum(map(len, body)) < CHUNK else [prefix + header, *body]
        ):
            rest = memoryview(part)
            while rest:
                rest = rest[self._socket.send(rest[:CHUNK]) :]

    def receive(self, *, idle: bool = False, max_body: int = MAX_BODY, within: float | None = None) -> Message:
        """The next message.

        Args:
            idle: wait any time until it begins.
            max_body: maximum size of its tensors in bytes.
            within: time limit of the whole message in seconds; None for none but that of every wait.

        Raises:
            EOFError: the peer has closed the connection.
            OSError: the peer is gone, or sends nothing for too long.
            BadMessage: what arrives is not a message.
        """
        self._end = None if within is None else time.monotonic() + within
        self._socket.settimeout(None if idle else self.seconds)
        return read_message(self._read, max_body)

    def close(self) -> None:
        """Closes the connection; a thread that waits for it gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray()
        while len(content) < size:
            if self._end is not None:
                rest = self._end - time.monotonic()
                if rest <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(min(rest, self.seconds))
            part = self._socket.recv(min(size - len(content), CHUNK))
            if not part:
                raise EOFError("the connection was closed")
            content += part
            self._socket.settimeout(self.seconds)
        return content
