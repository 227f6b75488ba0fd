"""OpenAI's own client against the server: structured `parse`, tools, streams, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.builders.server_process import serving
from tests.builders.worded_models import HERMES_TEMPLATE, byte_level, fast, save_worded

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow
USER: Any = [{"role": "user", "content": "Hello"}]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class City(BaseModel):
    """A city."""

    name: str = Field(pattern="^[a-z]{1,5}$")
    color: Color
    size: int = Field(ge=0, le=99)
    near: list[Color] = Field(max_length=2)


class Tree(BaseModel):
    value: bool
    child: Tree | None


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokenizer = fast(
        byte_level(["<|im_start|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"]), HERMES_TEMPLATE
    )
    folder: Path = save_worded(tmp_path_factory.mktemp("clients"), tokenizer)
    with serving(folder) as served:
        yield f"{served.address}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 500, **fields}


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_parse_gives_objects(client: openai.OpenAI, model: str) -> None:
    for kind in (City, Tree):
        made = client.chat.completions.parse(**{**asked(model=model, temperature=1, seed=1), "response_format": kind})
        assert isinstance(made.choices[0].message.parsed, kind)


def test_a_streamed_parse_ends_with_the_object(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(**asked(model=model, temperature=1, seed=2), response_format=City) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_the_tools_helper_parses_arguments(client: openai.OpenAI, model: str) -> None:
    tools: Any = [openai.pydantic_function_tool(City)]
    fields = asked(model=model, tools=tools, tool_choice="required", temperature=1, seed=3, parallel_tool_calls=False)
    made = client.chat.completions.parse(**fields)
    (call,) = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)
    assert made.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        (again,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.done" in kinds
    assert again.function.arguments == call.function.arguments


def test_a_round_with_a_tool(client: openai.OpenAI, model: str) -> None:
    tools: Any = [openai.pydantic_function_tool(Tree)]
    first = client.chat.completions.create(**asked(model=model, tools=tools, tool_choice="required"))
    message = first.choices[0].message
    (call, *_) = message.tool_calls or []
    answers: Any = [{"role": "tool", "tool_call_id": one.id, "content": "ok"} for one in message.tool_calls or []]
    messages = [*USER, message.model_dump(exclude_unset=True), *answers]
    second = client.chat.completions.create(**{**asked(model=model, tools=tools, max_tokens=4), "messages": messages})
    assert second.usage and first.usage and second.usage.prompt_tokens > first.usage.prompt_tokens
    assert json.loads(call.function.arguments)


def test_log_probabilities_have_the_bytes_of_tokens(client: openai.OpenAI, model: str) -> None:
    fields = asked(model=model, logprobs=True, top_logprobs=2, extra_body={"guided_choice": ["€uro"]})
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.logprobs and choice.logprobs.content
    assert bytes(byte for one in choice.logprobs.content for byte in one.bytes or []).decode() == "€uro"
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)
    found = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**fields, stream=True)]
    streamed = [one.token for each in found for one in (each and each.content) or []]
    assert streamed == [one.token for one in choice.logprobs.content]
    for_completion = {"guided_choice": ["€uro"]}
    whole = client.completions.create(model=model, prompt="a", logprobs=0, max_tokens=9, extra_body=for_completion)
    parts = whole.choices[0].logprobs
    assert parts and parts.tokens and parts.tokens[0] == "bytes:\\xe2"
    assert parts.text_offset and parts.text_offset[:4] == [0, 0, 0, 1]


def test_several_answers_and_the_usage_of_a_stream(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 9, "max_tokens": 5}
    whole = client.chat.completions.create(**{**asked(model=model), **fields})
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    options: Any = {"include_usage": True}
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(
        **{**asked(model=model), **fields}, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert chunk.usage and whole.usage and chunk.usage.completion_tokens == whole.usage.completion_tokens


def test_the_responses_api(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "input": "Hello", "max_output_tokens": 500, "temperature": 1}
    parsed = client.responses.parse(**fields, text_format=City)
    assert isinstance(parsed.output_parsed, City)
    schema = {**City.model_json_schema(), "additionalProperties": False}
    tools: Any = [{"type": "function", "name": "look", "parameters": schema, "strict": True}]
    with client.responses.stream(**fields, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call" and City.model_validate_json(call.arguments)
    assert kinds.index("response.output_item.added") < kinds.index("response.function_call_arguments.done")
    answer: Any = [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    second = client.responses.create(**{**fields, "input": answer, "max_output_tokens": 3}, tools=tools)
    assert second.usage and final.usage and second.usage.input_tokens > final.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**fields, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_the_async_client(address: str, model: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            fields = asked(model=model, extra_body={"guided_choice": ["yes", "no"]})
            stream = await client.chat.completions.create(**fields, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            whole = await client.chat.completions.create(**fields)
            return [text, whole.choices[0].message.content or ""]

    text, whole = asyncio.run(run())
    assert text == whole and text in ("yes", "no")


def test_an_invalid_schema_is_a_bad_request(client: openai.OpenAI, model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(model=model, response_format=form))
    assert "uniqueItems" in str(refused.value)
