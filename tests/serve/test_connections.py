"""Connections without a request have a time limit and a limited number; the error beyond is OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmconv.errors import OutputFailed
from llmconv.serve import server
from llmconv.serve.server import ConnectionLimit, LimitedProtocol, listen

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[[bytes], Awaitable[Stream]]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, before the body."""
    await JSONResponse("hello")(scope, receive, send)


def talk(conversation: Callable[[Open], Awaitable[None]]) -> None:
    """Runs a conversation with a server on a free port of 127.0.0.1; it gets a function that connects and sends."""

    async def run() -> None:
        limited = ConnectionLimit(hello)
        config = uvicorn.Config(limited, port=0, http=LimitedProtocol, lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        limited.connections = server.server_state.connections
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        writers: list[asyncio.StreamWriter] = []

        async def opened(content: bytes) -> Stream:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(content)
            return reader, writer

        try:
            await conversation(opened)
        finally:
            for writer in writers:
                writer.close()
            for writer in writers:
                with suppress(OSError):
                    await writer.wait_closed()
        server.should_exit = server.force_exit = True
        await serving

    asyncio.run(run())


async def _all(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the connection ends, however that is."""
    found = b""
    with suppress(OSError):
        while part := await reader.read(65536):
            found += part
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of a moment, and room for four."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(server, "MAX_IDLE", 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD, HEAD + b"Content-Length: 99\r\n\r\n{"])
def test_a_client_that_drips_is_disconnected(sent: bytes) -> None:
    async def drip(opened: Open) -> None:
        reader, writer = await opened(sent)
        received = asyncio.create_task(_all(reader))
        for _ in range(400):
            if received.done():
                break
            writer.write(b"X" if sent else b"")
            await asyncio.sleep(0.05)
        assert received.done()
        assert (b"408 Request Timeout" in received.result()) == sent.endswith(HEAD)

    talk(drip)


@pytest.mark.usefixtures("short")
def test_a_connection_without_a_request_gives_its_place_to_a_newer_one() -> None:
    async def crowd(opened: Open) -> None:
        silent = [await opened(HEAD) for _ in range(6)]
        await asyncio.wait_for(_all(silent[0][0]), 20)
        reader, _ = await opened(HEAD + b"\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"hello"), 20)

    talk(crowd)


def test_the_error_beyond_the_limit_is_that_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PER_ADDRESS", 1)

    async def crowd(opened: Open) -> None:
        first, _ = await opened(HEAD + b"\r\n")
        await first.readuntil(b"hello")
        reader, _ = await opened(HEAD + b"\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        assert b"503 Service Unavailable" in head and (error["type"], error["code"]) == (
            "server_error",
            "too_many_connections",
        )

    talk(crowd)


def test_another_host_is_the_hint_where_the_address_is_not_of_this_machine() -> None:
    with pytest.raises(OutputFailed) as caught:
        listen("192.0.2.1", 0)
    assert "--host" in caught.value.hint and "--port" not in caught.value.hint
