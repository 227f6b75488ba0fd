"""Messages between a client and the stage of a model in another process, over a TCP socket with a time limit per wait.

A message is data, never code:

4 bytes    b"LST" and the version of the protocol
4 bytes    length of the header, little-endian
8 bytes    length of the body
header     {"kind": "run", fields …, "tensors": [{"name": "hidden_states.8", "dtype": "float32", "shape": [1, 1, 64]}]}
body       the elements of the tensors, little-endian, in the order of the header

In the first messages, both sides prove that they run the same protocol, model and export:

    stage     greeting   protocol, nonce
    client    hello      proof (of the shared token), fingerprint of every stage, seconds of silence that it accepts
    stage     stage      its number, its fingerprint, shapes and names of its inputs by use
    either    refused    message, hint

The token itself is never sent: the proof is HMAC-SHA256 of the nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from llmconv.checkpoint import parse_object
from llmconv.errors import LlmconvError, StageFailed, UsageProblem
from llmconv.tensors import Array

MAGIC = b"LST1"
PREFIX = struct.Struct("<4sIQ")
# maximum sizes in bytes: hidden states of 65,000 tokens at a width of 4,096 in float32
MAX_HEADER, MAX_BODY = 1 << 20, 1 << 30
MAX_TENSORS, MAX_AXES = 64, 8

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float32", "float16", "float64", "int64", "int32", "int8", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class BadMessage(ValueError):
    """Bytes that are not a message of this protocol."""


@dataclass(frozen=True)
class Message:
    """One message: what it asks or answers, other fields of its header, and arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Array] = field(default_factory=dict)

    def encode(self) -> list[bytes]:
        """The bytes, as a list of pieces; raises BadMessage for more than the receiver accepts."""
        arrays = {name: np.asarray(array) for name, array in self.tensors.items()}
        listed = [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in arrays.items()]
        header = json.dumps({**self.fields, "kind": self.kind, "tensors": listed}).encode()
        prefix = _checked_prefix(len(header), sum(array.nbytes for array in arrays.values()), MAX_BODY)
        body = (array.astype(DTYPES[array.dtype.name], copy=False).tobytes() for array in arrays.values())
        return [prefix, header, *body]

    def number(self, name: str, most: int = 2**53) -> int:
        """A field that is a whole number from 0 to `most`; raises BadMessage if it is missing or something else."""
        return as_number(self.fields.get(name), f"`{name}`", most)

    def text(self, name: str) -> str:
        """A field that is a text; raises BadMessage if it is missing or something else."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise BadMessage(f"`{name}` is not a text")
        return value


def as_number(value: Any, what: str, most: int = 2**53) -> int:
    """A header value that must be a whole number from 0 to `most`; else raises BadMessage, which calls it `what`."""
    if type(value) is not int or not 0 <= value <= most:
        raise BadMessage(f"{what} is not a number from 0 to {most}")
    return value


def read_message(read: Callable[[int], bytearray], max_body: int = MAX_BODY) -> Message:
    """The next message; `read(n)` returns n bytes; BadMessage for another, or tensors over `max_body` bytes."""
    magic, header_bytes, body_bytes = PREFIX.unpack(read(PREFIX.size))
    if magic != MAGIC:
        other = magic[:3] == MAGIC[:3]
        raise BadMessage("another version of the protocol" if other else "not a message of a stage of llmconv")
    _checked_prefix(header_bytes, body_bytes, max_body)
    header = _header(read(header_bytes))
    kind, listed = header.pop("kind", None), header.pop("tensors", [])
    if not isinstance(kind, str) or not isinstance(listed, list) or len(listed) > MAX_TENSORS:
        raise BadMessage("the header is not that of a message")
    places = [_place(one) for one in listed]
    if sum(size for *_, size in places) != body_bytes or len({name for name, *_ in places}) != len(places):
        raise BadMessage("the sizes of the tensors are not that of the body")
    return Message(kind, header, _tensors(places, read(body_bytes)))


def _checked_prefix(header_bytes: int, body_bytes: int, max_body: int) -> bytes:
    if header_bytes > MAX_HEADER or body_bytes > max_body:
        raise BadMessage(f"a message of {header_bytes + body_bytes:,} bytes is too large")
    return PREFIX.pack(MAGIC, header_bytes, body_bytes)


def _header(content: bytearray) -> dict[str, Any]:
    try:
        return parse_object(bytes(content), "header")
    except LlmconvError as error:
        raise BadMessage(error.message) from error


def _place(listed: Any) -> tuple[str, np.dtype[Any], list[int], int]:
    """Name, dtype, shape and size in bytes of a tensor in a header."""
    if not isinstance(listed, dict):
        raise BadMessage("a tensor is not an object")
    name, dtype, shape = (listed.get(key) for key in ("name", "dtype", "shape"))
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadMessage("a tensor has no name, or an unknown dtype")
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise BadMessage("the shape of a tensor is not a list of a few numbers")
    sizes = [as_number(axis, "an axis", MAX_BODY) for axis in shape]
    return name, DTYPES[dtype], sizes, prod(sizes) * DTYPES[dtype].itemsize


def _tensors(places: list[tuple[str, np.dtype[Any], list[int], int]], body: bytearray) -> dict[str, Array]:
    tensors, start = {}, 0
    for name, dtype, shape, size in places:
        tensors[name] = np.require(np.frombuffer(body, dtype, prod(shape), start).reshape(shape), requirements="A")
        start += size
    return tensors


CHUNK = 1 << 20  # bytes that are received at a time: memory grows with what arrives, and not with what is announced
# after this many seconds the system tests whether a silent peer still exists: it is gone a minute later
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class Address:
    """A TCP address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """From HOST:PORT, with brackets around an IPv6 address; raises UsageProblem, which names the option."""
        host, _, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit() and int(port) < 65536):
            problem = f"`{option} {text}` is not an address"
            raise UsageProblem(problem, hint="give HOST:PORT, such as 127.0.0.1:7700 or [::1]:7700")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connection:
    """A connection between a client and a stage; owns its socket; `seconds` limits every wait for bytes of the peer."""

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
        """Sends a message; OSError if the peer is gone or takes nothing, BadMessage if the message is too large."""
        prefix, header, *body = message.encode()
        self._socket.settimeout(self.seconds)
        for part in [b"".join([prefix, header, *body])] if sum(map(len, body)) < CHUNK else [prefix + header, *body]:
            rest = memoryview(part)
            while rest:
                rest = rest[self._socket.send(rest[:CHUNK]) :]

    def receive(self, *, idle: bool = False, max_body: int = MAX_BODY, within: float | None = None) -> Message:
        """The next message; `idle`: waits any time until it begins; its tensors have at most `max_body` bytes.

        All of it must come `within` these seconds (None: no limit but that of every wait). Raises EOFError if the peer
        has closed the connection, OSError if it is gone or silent, BadMessage for something else.
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
            if not (part := self._socket.recv(min(size - len(content), CHUNK))):
                raise EOFError("the connection was closed")
            content += part
            self._socket.settimeout(self.seconds)
        return content


# environment variable with the shared token, the same on both sides; empty or missing for none
TOKEN = "LLMCONV_STAGE_TOKEN"
PROTOCOL = 1

OTHER_EXPORT = (
    "the folders on both sides must be copies of one export: copy llmconv.json and the files of the stage again"
)


def token() -> str:
    return os.environ.get(TOKEN, "")


class Refused(Exception):
    """The peer is refused; it gets the reason, one line, and a hint with the way out."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def answer(self) -> Message:
        return Message("refused", {"message": str(self), "hint": self.hint})


def greet(connection: Connection, number: int, fingerprints: Sequence[str], shared: str, within: float) -> float:
    """Greets a client and checks its answer; returns the seconds of silence that the client accepts.

    `fingerprints` are those of all stages of the export; `shared` is the token that the client must have, or empty; the
    whole answer must come `within` these seconds. Raises Refused for another token, model or export, BadMessage for
    something else, EOFError or OSError if the client is gone, or silent.
    """
    nonce = secrets.token_hex(16)
    connection.send(Message("greeting", {"protocol": PROTOCOL, "nonce": nonce}))
    hello = connection.receive(max_body=0, within=within)
    if hello.kind != "hello":
        raise BadMessage("the first message is not `hello`")
    if shared and not hmac.compare_digest(_bytes(hello.text("proof")), _bytes(_proof(shared, nonce))):
        raise Refused("the token is not that of the stage", f"set {TOKEN} to the same text on both sides")
    if hello.fields.get("fingerprints") != list(fingerprints):
        raise Refused(f"stage {number} is one of another model or export", OTHER_EXPORT)
    return hello.number("silence", 1_000_000) / 1000


def introduce(connection: Connection, fingerprints: Sequence[str], silence: float) -> int:
    """Answers the greeting of a stage and checks what it is; returns its number.

    After `silence` seconds without a heartbeat the stage is given up. Raises StageFailed if it refuses, or is of
    another model or export, BadMessage for something else, EOFError or OSError if it is gone, or silent.
    """
    greeting = connection.receive(max_body=0)
    if greeting.kind != "greeting" or greeting.number("protocol") != PROTOCOL:
        raise BadMessage("another version of the protocol")
    proof = _proof(token(), greeting.text("nonce"))
    fields = {"proof": proof, "fingerprints": list(fingerprints), "silence": round(silence * 1000)}
    connection.send(Message("hello", fields))
    stage = connection.receive(max_body=0)
    if stage.kind == "refused":
        raise StageFailed(stage.text("message"), hint=stage.text("hint"))
    if stage.kind != "stage":
        raise BadMessage("the answer is not `stage`")
    number = stage.number("number", len(fingerprints))
    if number < 1 or stage.text("fingerprint") != fingerprints[number - 1]:
        raise StageFailed("it is a stage of another model or export", hint=OTHER_EXPORT)
    return number


def _proof(shared: str, nonce: str) -> str:
    return hmac.new(_bytes(shared), _bytes(nonce), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
