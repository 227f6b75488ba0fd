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
