"""A TCP relay that delivers late and in small pieces, as a distant network does, where the kernel has no netem."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE = 1400
"""Bytes at once, about an Ethernet frame."""


@contextmanager
def slow_relay(address: str, delay: float) -> Iterator[str]:
    """The address of a relay to `address`, where each piece arrives `delay` seconds after it was sent."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(_late(reader, back, delay), _late(there, writer, delay))
            await asyncio.sleep(2 * delay)
        finally:
            writer.transport.abort()
            back.transport.abort()

    starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(relay, "127.0.0.1", 0), loop)
    server = starting.result()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Passes on what arrives; pieces that are on their way do not hold up each other."""
    loop = asyncio.get_running_loop()
    while piece := await reader.read(PIECE):
        loop.call_later(delay, writer.write, piece)
    loop.call_later(delay, writer.close)


async def _stop(server: asyncio.Server) -> None:
    server.close()
    mine = asyncio.current_task()
    running = [task for task in asyncio.all_tasks() if task is not mine]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(0.1)  # the loop closes the sockets
