"""Invalid requests get OpenAI's error object and the right status, and free their place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from llmconv.generation import TextModel
from llmconv.serve.app import MAX_BODY_BYTES
from llmconv.serve.embeddings import embedding_request
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import chat_request, completion_request
from llmconv.serve.responses import response_request
from tests.builders.chatting import CONTEXT
from tests.serve.conftest import Clients

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello"}


def refusal(client: TestClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that is refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


@pytest.fixture(autouse=True)
def no_place_is_lost(client: TestClient) -> Iterator[None]:
    """After every refusal the server is idle."""
    yield
    end = time.monotonic() + 30
    while (load := client.get("/health").json()) and load["active"] + load["waiting"] and time.monotonic() < end:
        time.sleep(0.05)  # an answer may arrive before the worker has noticed its end
    assert (load["active"], load["waiting"]) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"text"',
        b"{" * 200_000,
        b"[" * 200_000 + b"]" * 200_000,
        b'{"messages": NaN}',
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: body[:12].decode("latin1"),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_not_a_json_object_is_refused(client: TestClient, path: str, body: bytes) -> None:
    assert refusal(client, path, body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "in the body: duplicate key `prompt`"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "duplicate key `content`"),
        (b'{"prompt": "a", "metadata": {"a": 1e400}}', "the number `1e400` is not finite"),
        (b'{"prompt": "a", "metadata": -Infinity}', "the number `-Infinity` is not finite"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_mistakes_in_the_body_are_refused_by_name(client: TestClient, path: str, body: bytes, problem: str) -> None:
    error = refusal(client, path, body)
    assert problem in error["message"] and error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hello"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": ["user"], "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_messages_of_another_form_are_refused(client: TestClient, fields: dict[str, Any], parameter: str) -> None:
    assert refusal(client, CHAT, fields)["param"] == parameter


@pytest.mark.parametrize(
    ("role", "message", "found"),
    [
        *((role, {"content": None}, "is null") for role in ("user", "system")),
        *((role, {}, "is missing") for role in ("user", "assistant", "system")),
    ],
)
def test_a_message_without_a_text_is_refused(
    client: TestClient, role: str, message: dict[str, Any], found: str
) -> None:
    error = refusal(client, CHAT, {"messages": [{"role": role, **message}]})
    assert error["param"] == "messages[0].content"
    assert error["message"].startswith(f"`messages[0].content` {found} but must be a text")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("max_tokens", 10**30),
        ("n", 17),
        ("n", 0),
        ("seed", 2**70),
        ("seed", "x"),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", 5),
        ("stream", "yes"),
        ("stream_options", [1]),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"96": 1}),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("stop_token_ids", [96]),
        ("stop_token_ids", ["a"]),
        ("min_tokens", 3_000_000),
        ("continue_final_message", True),
        ("tool_choice", "required"),
        ("response_format", {"type": "xml"}),
        ("model", 7),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: TestClient, field: str, value: Any) -> None:
    assert refusal(client, CHAT, {"messages": [USER], field: value})["param"] == field


def test_fields_of_other_endpoints_are_refused(client: TestClient) -> None:
    error = refusal(client, CHAT, {"messages": [USER], "best_of": 2})
    assert error["message"] == "`best_of` is a field of requests for completions, not of this one"
    assert refusal(client, COMPLETIONS, {"prompt": "a", "messages": [USER]})["param"] == "messages"
    assert (
        refusal(client, CHAT, {"messages": [USER], "structured_outputs": {"x": 1}})["param"] == "structured_outputs.x"
    )


def test_fields_that_responses_names_otherwise_say_how(client: TestClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    error = refusal(client, "/v1/responses", {"input": "a", "response_format": schema})
    assert error["message"] == "`response_format` is not supported: give it as `text`: {`format`: …}"
    assert "max_output_tokens" in refusal(client, "/v1/responses", {"input": "a", "max_tokens": 3})["message"]
    assert "`messages`" in refusal(client, CHAT, {"messages": [USER], "input": "a"})["message"]
    plain = {"input": "a", "max_output_tokens": 1, "response_format": {"type": "text"}}
    assert client.post("/v1/responses", json=plain).status_code == 200


def test_unknown_fields_are_ignored(client: TestClient) -> None:
    body = {"messages": [USER], "max_tokens": 1, "chat_id": "a", "stream_options": {"x": 1}, "\n": 3, "best_of": None}
    assert client.post(CHAT, json=body).status_code == 200
    assert chat_request(body).unknown == ("\n", "chat_id")


@pytest.mark.slow
def test_fields_without_effect_are_ignored(client: TestClient) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "logit_bias": {}, "tools": []}
    neutral |= {"use_beam_search": False, "length_penalty": 1, "functions": [], "function_call": "auto", "audio": {}}
    others = {"user": "me", "metadata": {}, "store": False, "stop": None, "response_format": {"type": "text"}}
    body = {"messages": [USER], "max_tokens": 2.0, **neutral, **others}
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 7, [1, "a"], [[1, "a"]], [True], ["a"] * 129, [-1], [[96]], "\udfff"]
)
def test_a_prompt_of_another_form_is_refused(client: TestClient, prompt: Any) -> None:
    assert refusal(client, COMPLETIONS, {"prompt": prompt})["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", 21), ("logprobs", True), ("best_of", 17), ("suffix", "end"), ("max_tokens", -1)]
)
def test_unsupported_fields_of_completions_are_refused_by_name(client: TestClient, field: str, value: Any) -> None:
    assert refusal(client, COMPLETIONS, {"prompt": "a", field: value})["param"] == field


@pytest.mark.quick_rows("False")
@pytest.mark.parametrize("stream", [True, False])
def test_too_long_a_context_is_refused_before_anything_streams(client: TestClient, stream: bool) -> None:
    long = [{"role": "user", "content": "a" * CONTEXT}]
    assert refusal(client, CHAT, {"messages": long, "stream": stream})["code"] == "context_length_exceeded"


def test_another_model_is_not_found(client: TestClient) -> None:
    error = refusal(client, CHAT, {"messages": [USER], "model": "gpt-4o"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_messages_on_which_the_template_fails_are_refused(client: TestClient) -> None:
    assert "bad is refused" in refusal(client, CHAT, {"messages": [{"role": "user", "content": "bad"}]})["message"]


@pytest.mark.slow
def test_a_model_without_a_chat_template_still_completes(clients: Clients, plain: Path) -> None:
    client = clients(served=TextModel.open(plain))
    assert "chat template" in refusal(client, CHAT, {"messages": [USER]})["message"]
    assert client.post(COMPLETIONS, json={"prompt": "Hello"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_content_types_of_html_forms_are_refused(client: TestClient, kind: str) -> None:
    body = json.dumps({"messages": [USER]})
    response = client.post(CHAT, content=body, headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_too_large_a_body_is_refused(client: TestClient) -> None:
    assert refusal(client, CHAT, b" " * (MAX_BODY_BYTES + 1), 413)["code"] == "request_too_large"


def test_a_body_that_hides_its_size_is_refused_too(client: TestClient) -> None:
    parts = (b" " * 2**20 for _ in range(6))
    response = client.post(CHAT, content=parts, headers={"Content-Type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("POST", "/", 405), ("GET", "/v2", 404)])
def test_unknown_paths_and_methods_get_the_error_object(
    client: TestClient, method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"] == f"no such endpoint: {method} {path}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("messages", "prompt", "max_tokens", "temperature", "n", "stop", "seed", "stream", "stream_options", "tools"),
        *("input", "text", "reasoning", "include", "logprobs", "logit_bias", "stop_token_ids", "best_of", "echo"),
    ]
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, JSON))
def test_no_json_makes_the_parser_fail_with_another_error(content: dict[str, Any]) -> None:
    for parse in (chat_request, completion_request, response_request, embedding_request):
        try:
            parse(content)
        except ApiError as error:
            assert 400 <= error.status < 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "\ud800", "messages": [{"role": "\ud800", "content": "a"}], "prompt": ["\ud800"]}',
        rb'{"messages": [{"role": "user", "content": "\ud800"}], "prompt": "\ud800"}',
        rb'{"stop": ["\ud800"], "messages": [{"role": "user", "content": "a"}], "prompt": "a"}',
    ],
)
def test_half_a_surrogate_pair_anywhere_is_an_error_of_the_request(client: TestClient, path: str, body: bytes) -> None:
    assert "Traceback" not in refusal(client, path, body)["message"]


def test_a_bound_is_written_as_a_number(client: TestClient) -> None:
    error = refusal(client, COMPLETIONS, {"prompt": "a", "max_tokens": 2_000_000})
    assert "from 0 to 1,000,000" in error["message"]
