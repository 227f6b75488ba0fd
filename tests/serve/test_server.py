"""The server as a process: OpenAI's own client, parallel requests, signals, clients that disconnect."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.builders.chatting import CONTEXT
from tests.builders.server_process import Served, serving, start

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ENDLESS: dict[str, Any] = {"messages": HELLO, "max_tokens": 1900, "temperature": 0}
"""The greedy tiny model never gives an end token."""


@pytest.fixture(scope="module")
def served(chatting: Path) -> Iterator[Served]:
    """One server for the tests that leave it running."""
    with serving(chatting, "--parallel", "2", "--queue", "8") as server:
        yield server


@pytest.fixture(scope="module")
def api(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def load(served: Served) -> dict[str, int]:
    """The number of active and of waiting answers."""
    with urllib.request.urlopen(f"{served.address}/health") as response:
        health: dict[str, int] = json.load(response)
    return health


def wait_for(served: Served, active: int, seconds: float = 20) -> None:
    """Waits until this number of answers is active."""
    end = time.monotonic() + seconds
    while load(served)["active"] != active:
        assert time.monotonic() < end, load(served)
        time.sleep(0.02)


def post(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a chat request."""
    address = urlsplit(served.address)
    connection = socket.create_connection((address.hostname, address.port), timeout=30)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def everything(connection: socket.socket) -> str:
    """All data until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_openais_client_chats(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny-chat", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    stream = api.chat.completions.create(
        model="tiny-chat",
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_openais_client_completes_and_lists(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="tiny-chat", prompt=["Once", "The"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = api.completions.create(model="tiny-chat", prompt="Once", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    assert [model.id for model in api.models.list()] == ["tiny-chat"]


def test_openais_client_raises_the_right_errors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.chat.completions.create(model="gpt-4o", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny-chat", messages=[{"role": "user", "content": "a" * (CONTEXT + 88)}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="`logit_bias` must be"):
        api.chat.completions.create(model="tiny-chat", messages=HELLO, logit_bias={"a": 1})


def test_parallel_requests_get_the_same_answers_as_alone(served: Served, api: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        stream = api.chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": f"Question {number}"}],
            max_tokens=24,
            temperature=1,
            seed=number,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) == 8
    wait_for(served, 0)


def test_beyond_the_queue_clients_get_a_retry_time(served: Served, api: openai.OpenAI) -> None:
    connections = [post(served, ENDLESS) for _ in range(10)]
    end = time.monotonic() + 20
    while sum(load(served)[name] for name in ("active", "waiting")) < 10:
        assert time.monotonic() < end
    with pytest.raises(openai.RateLimitError) as caught:
        api.chat.completions.create(model="tiny-chat", messages=HELLO)
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    for connection in connections:
        connection.close()
    wait_for(served, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_place(served: Served, stream: bool) -> None:
    connection = post(served, {**ENDLESS, "n": 4, "stream": stream})
    wait_for(served, 1)
    connection.close()
    wait_for(served, 0, 5)


def test_a_client_that_sends_too_much_reads_the_answer(api: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than 4194304 bytes") as refused:
        api.completions.create(model="tiny-chat", prompt="x" * 9_000_000, max_tokens=2)
    assert refused.value.status_code == 413


def test_an_idle_client_blocks_nobody(served: Served, api: openai.OpenAI) -> None:
    address = urlsplit(served.address)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert api.completions.create(model="tiny-chat", prompt="Once", max_tokens=2).choices


def test_silent_connections_shut_out_nobody(served: Served, api: openai.OpenAI) -> None:
    address, head = urlsplit(served.address), b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    sent = [b"", head, head + b"\r\n", b"POST /x HTTP/1.1\r\nHost: foreign\r\nContent-Length: 99\r\n\r\n{"]
    opened: list[socket.socket] = []
    try:
        for number in range(700):  # more than an address may have, in every state without a request
            opened.append(socket.create_connection((address.hostname, address.port), timeout=10))
            opened[-1].sendall(sent[number % len(sent)])
            if number % len(sent) > 1:
                assert opened[-1].recv(65536)  # the answer, or its refusal
        assert api.completions.create(model="tiny-chat", prompt="Once", max_tokens=2).choices
    finally:
        for connection in opened:
            connection.close()


def test_garbage_instead_of_http_is_refused(served: Served, api: openai.OpenAI) -> None:
    address = urlsplit(served.address)
    for garbage in (b"\x16\x03\x01\x00\xa5\x01\x00\x00", b"GET\r\n\r\n", b"A" * 200_000):
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert b"200 OK" not in connection.recv(65536)
            except OSError:
                pass  # closed while it was still sent
    assert api.models.list().data
    assert not any("Traceback" in line for line in served.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_server_with_0(chatting: Path, number: int) -> None:
    with serving(chatting) as served:
        assert served.end(number) == 0
    assert [line for line in served.log if not line.startswith("http://")] == []


def test_running_answers_finish_in_the_grace_period(chatting: Path) -> None:
    with serving(chatting) as served:
        connection = post(served, {**ENDLESS, "max_tokens": 60, "stream": True})
        wait_for(served, 1)
        served.process.send_signal(signal.SIGTERM)
        text = everything(connection)
        assert "data: [DONE]" in text
        assert served.process.wait(30) == 0


def test_a_second_signal_ends_running_answers_with_an_error(chatting: Path) -> None:
    with serving(chatting) as served:
        whole, stream = (post(served, {**ENDLESS, "n": 4, "stream": wanted}) for wanted in (False, True))
        wait_for(served, 2)
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        served.process.send_signal(signal.SIGTERM)
        texts = [everything(connection) for connection in (whole, stream)]
        assert texts[0].startswith("HTTP/1.1 503")
        assert all('"code":"shutting_down"' in text for text in texts)
        assert "[DONE]" not in texts[1]
        assert served.process.wait(30) == 0


def test_a_port_in_use_is_reported_at_once(chatting: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(chatting, "--port", str(taken.getsockname()[1]))
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 4
    assert stderr.startswith("error: cannot listen on 127.0.0.1 port")
    assert "hint: give another `--port`" in stderr


def test_a_folder_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.splitlines()[0]) == (3, f"error: `{tmp_path}` is an empty folder")


def test_the_key_comes_from_the_environment_and_is_never_printed(chatting: Path) -> None:
    with (
        serving(chatting, LLMCONV_API_KEY="secret") as served,
        openai.OpenAI(base_url=f"{served.address}/v1", api_key="wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="secret").models.list().data
    assert "secret" not in "".join(served.log)


def test_serving_graphs_does_not_import_torch(chatting: Path) -> None:
    """The server starts several times faster without it."""
    with serving(chatting) as served:
        maps = Path(f"/proc/{served.process.pid}/maps")
        if not maps.exists():
            pytest.skip("only Linux tells what a process has loaded")
        assert "libtorch" not in maps.read_text()


def test_a_thread_of_requests_ends_with_the_server(chatting: Path) -> None:
    with serving(chatting) as served:
        threads = [threading.Thread(target=lambda: everything(post(served, ENDLESS))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(served, 3)
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
