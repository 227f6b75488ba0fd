"""What was reported of other servers that speak OpenAI's API, and of their clients, tried on this one.

Each test names the reports: issues, or pull requests, of repositories on GitHub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from starlette.testclient import TestClient

from llmconv.generation import TextModel
from llmconv.serve.app import make_app
from llmconv.serve.embeddings import embedding_request
from llmconv.serve.field_table import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, RESPONSES, TABLE
from llmconv.serve.openai_schema import chat_request, completion_request
from llmconv.serve.responses import response_request
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ServedModel
from tests.builders.worded_models import ANSWER, RESULT, THOUGHTS, save_scripted

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", RESPONSES: "/v1/responses"}
PARSERS: dict[str, Any] = {CHAT: chat_request, COMPLETIONS: completion_request}
PARSERS |= {RESPONSES: response_request, EMBEDDINGS: embedding_request}
USER = {"role": "user", "content": "Hello"}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A model that greets, or calls a tool twice."""
    model = TextModel.open(save_scripted(tmp_path_factory.mktemp("scripted")))
    app = make_app(ServedModel(model, "scripted"), Scheduler(2, 4))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def ask(client: TestClient, endpoint: str = CHAT, **body: Any) -> Any:
    first: dict[str, Any] = {"messages": [USER]} if endpoint == CHAT else {}
    answer = client.post(PATHS[endpoint], json={**first, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(client: TestClient, endpoint: str = CHAT, **body: Any) -> list[Any]:
    first: dict[str, Any] = {"messages": [USER]} if endpoint == CHAT else {}
    answer = client.post(PATHS[endpoint], json={**first, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert answer.status_code == 200 and (endpoint == RESPONSES or lines.pop() == "[DONE]")
    return [json.loads(line) for line in lines]


def with_results(client: TestClient) -> list[dict[str, Any]]:
    """The messages after a round of calls."""
    message = ask(client, tools=TOOLS)["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in message["tool_calls"]]
    return [USER, message, *answers]


@pytest.mark.parametrize(
    ("fields", "finish"), [({}, "stop"), ({"max_tokens": 2}, "length"), ({"tools": TOOLS}, "tool_calls")]
)
def test_the_last_chunk_alone_has_the_reason_and_no_text(
    scripted: TestClient, fields: dict[str, Any], finish: str
) -> None:
    """vllm-project/vllm 35705, 36944, 27572 and 47963; waybarrios/vllm-mlx 628; Arthur-Ficial/apfel 100."""
    found = [chunk["choices"][0] for chunk in chunks(scripted, **fields)]
    assert [one["finish_reason"] for one in found] == [None] * (len(found) - 1) + [finish]
    assert found[-1]["delta"] == {} and found[0]["delta"]["role"] == "assistant"


def test_the_usage_comes_in_a_chunk_without_choices(scripted: TestClient) -> None:
    """deepset-ai/haystack 8507; gradio-app/gradio 11729; pydantic/pydantic-ai 5170."""
    *others, last = chunks(scripted, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all(one["choices"] and one["usage"] is None for one in others)


def test_parallel_calls_have_numbers_and_ids_of_their_own(scripted: TestClient) -> None:
    """ollama/ollama 15457 and 7881; LibreChat-AI/agents 260; BerriAI/litellm 11407; sgl-project/sglang 7117."""
    deltas = [
        call for one in chunks(scripted, tools=TOOLS) for call in one["choices"][0]["delta"].get("tool_calls", ())
    ]
    heads = [one for one in deltas if "id" in one]
    assert [one["index"] for one in heads] == [0, 1] and len({one["id"] for one in heads}) == 2
    made = ["".join(one["function"]["arguments"] for one in deltas if one["index"] == at) for at in (0, 1)]
    assert list(map(json.loads, made)) == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]


def test_no_chunk_ends_within_a_character(scripted: TestClient) -> None:
    """vllm-project/vllm 931; abetlen/llama-cpp-python 372; SillyTavern/SillyTavern 354."""
    pytest.importorskip("llguidance")
    wanted = "a € 語 🔥 👩‍🚀 é"
    found = [one["choices"][0]["delta"].get("content", "") for one in chunks(scripted, guided_choice=[wanted])]
    assert "".join(found) == wanted and len(found) > 8 and not any("\ufffd" in one for one in found)


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}])
def test_the_usual_forms_are_taken(scripted: TestClient, form: dict[str, Any]) -> None:
    """lmstudio-ai/lmstudio-bug-tracker 307 and 189; willmiao/ComfyUI-Lora-Manager 1033; microsoft/autogen 6588."""
    pytest.importorskip("llguidance")
    content = ask(scripted, response_format=form, max_tokens=5)["choices"][0]["message"]["content"]
    assert content.startswith("{") == (form["type"] == "json_object")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_role_may_have_parts_and_fields_of_clients(scripted: TestClient, role: str) -> None:
    """ggml-org/llama.cpp 8367; qualcomm/GenieX 683; vllm-project/vllm 10463 and 12864; trymirai/uzu 795."""
    messages = with_results(scripted)
    text = '[{"id": 1, "name": "item"}]'  # a text that looks like parts stays a text
    added = {
        "role": role,
        "name": "bob",
        "id": 7,
        "opts": {"visible": False},
        "tool_call_id": messages[-1]["tool_call_id"],
    }
    parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    fields: dict[str, Any] = {"tools": TOOLS, "continue_final_message": False}
    found = [ask(scripted, messages=[*messages, {**added, "content": one}], **fields) for one in (text, parts)]
    assert found[0]["usage"]["prompt_tokens"] == found[1]["usage"]["prompt_tokens"]
    assert found[0]["choices"][0]["message"]["content"] == found[1]["choices"][0]["message"]["content"]


def test_the_answer_may_be_begun_also_after_its_reasoning(scripted: TestClient) -> None:
    """ggml-org/llama.cpp 13174, 13608 and 21889; sgl-project/sglang 3971; openvinotoolkit/model_server 3877."""
    begun = {"role": "assistant", "content": "<think>Short.</think>The sum "}
    several: list[dict[str, Any]] = [{}, {"continue_final_message": True, "add_generation_prompt": False}]
    for fields in several:
        message = ask(scripted, messages=[USER, begun], **fields)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "is 5.", "refusal": None}


def test_an_answer_may_be_sent_back_as_it_came(scripted: TestClient) -> None:
    """mlcommons/endpoints 133; vercel/ai 17779: null content, `refusal`, reasoning, and fields that clients add."""
    messages = with_results(scripted)
    final = ask(scripted, messages=messages, tools=TOOLS)["choices"][0]["message"]
    assert (final["content"], final["reasoning_content"], final["refusal"]) == (RESULT, THOUGHTS, None)
    added: dict[str, Any] = {"annotations": [], "audio": None, "function_call": None, "refusal": None}
    empty = {"role": "assistant", "content": None, "tool_calls": None, **added}
    history = [{**one, **added} if one["role"] == "assistant" else one for one in messages]
    again = ask(scripted, messages=[*history, {**final, **added}, empty, USER])
    assert again["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_is_as_if_a_field_were_missing(endpoint: str) -> None:
    """The fields of clients that write all they know: `max_tokens`, `stop`, `tools`, `logprobs`, `stream_options` …"""
    texts: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "a"}}
    first = texts.get(endpoint, {"input": "a"})
    nothing = {row.name: None for row in TABLE if endpoint in row.endpoints}
    parse: Any = PARSERS[endpoint]
    assert parse({**nothing, **first}) == parse(first)


OBJECTS: dict[str, tuple[type[BaseModel], TypeAdapter[Any]]] = {
    CHAT: (ChatCompletion, TypeAdapter(ChatCompletionChunk)),
    COMPLETIONS: (Completion, TypeAdapter(Completion)),
    RESPONSES: (Response, TypeAdapter(ResponseStreamEvent)),
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, {"tools": TOOLS, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "<|begins|>", "logprobs": 2}),
    (RESPONSES, {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    (RESPONSES, {"input": "Hello", "max_output_tokens": 2}),
    (RESPONSES, {"input": [USER], "tools": [{"type": "function", "strict": False, **ADD}]}),
]


@pytest.mark.parametrize(("endpoint", "body"), BODIES)
def test_objects_and_events_are_valid_by_openais_types(
    scripted: TestClient, endpoint: str, body: dict[str, Any]
) -> None:
    """BerriAI/litellm 28899 and 19130; ggml-org/llama.cpp 24957; ogx-ai/ogx 5309; vllm-project/vllm 35705."""
    whole, event = OBJECTS[endpoint]
    whole.model_validate(ask(scripted, endpoint, **body), strict=False)
    body = {name: value for name, value in body.items() if name != "stream_options"}
    for one in chunks(scripted, endpoint, **body):
        if endpoint == COMPLETIONS:  # the type has no null, which OpenAI's own chunks have
            one["choices"][0]["finish_reason"] = one["choices"][0]["finish_reason"] or "stop"
        event.validate_python(one)


def test_the_requests_of_open_webui(scripted: TestClient) -> None:
    """Its models, a chat, and its tasks, with fields that are its own: open-webui `routers/openai.py`, `tasks.py`."""
    (model,) = scripted.get("/v1/models").json()["data"]
    parts = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    chat: dict[str, Any] = {"model": model["id"], "messages": [{"role": "user", "content": parts}], "stream": True}
    chat |= {"stream_options": {"include_usage": True}, "logit_bias": {}, "chat_id": "c", "session_id": "s", "id": "m"}
    chat |= {"features": {"web_search": False}, "user": {"name": "a", "id": "b"}, "reasoning": {"effort": "low"}}
    found = chunks(scripted, **chat)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1]) == ANSWER
    assert found[-1]["usage"]["total_tokens"]
    task = {"model": model["id"], "messages": [USER], "stream": False, "max_completion_tokens": 1000}
    answer = ask(scripted, **task, metadata={"task": "title_generation", "task_body": {}, "chat_id": None})
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_the_fields_of_other_servers_that_would_change_the_answer_are_refused(scripted: TestClient) -> None:
    """deepjavalibrary/djl 3611 (`extra_body` in a body); llama.cpp's, SGLang's and DashScope's own fields."""
    odd: dict[str, Any] = {"extra_body": {"top_k": 1}, "grammar": "root ::= 'a'", "regex": "a", "json_schema": {"a": 1}}
    odd |= {"n_predict": 5, "repeat_penalty": 1.1, "mirostat": 2, "enable_thinking": False}
    for name, value in odd.items():
        error = scripted.post(PATHS[CHAT], json={"messages": [USER], name: value}).json()["error"]
        assert error["param"] == name and error["code"] == "unsupported_parameter"
    usual: dict[str, Any] = {
        "cache_prompt": True,
        "id_slot": -1,
        "n_predict": -1,
        "repeat_penalty": 1.0,
        "mirostat": 0,
        "keep_alive": 5,
    }
    assert ask(scripted, **usual)["choices"][0]["message"]["content"] == ANSWER
