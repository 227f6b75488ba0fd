"""Structured answers, tools and reasoning over the endpoints, written by a real model whose tokens a grammar forces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from llmconv.generation import TextModel
from llmconv.serve.app import make_app
from llmconv.serve.openai_schema import chat_request
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ServedModel
from tests.builders.worded_models import (
    COLUMNS,
    DEEPSEEK_TEMPLATE,
    HERMES_TEMPLATE,
    MISTRAL_TEMPLATE,
    byte_level,
    fast,
    save_worded,
    sentence_pieces,
)

pytest.importorskip("llguidance")
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, NOW]
SCHEMA = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "n": {"type": "integer", "maximum": 9}}}


def opened(model: TextModel, **options: Any) -> TestClient:
    served = ServedModel(model, "worded", **options)
    return TestClient(make_app(served, Scheduler(2, 4)), base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    tokenizer = fast(
        byte_level(["<|im_start|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"]), HERMES_TEMPLATE
    )
    return TextModel.open(save_worded(tmp_path_factory.mktemp("hermes"), tokenizer))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    marks = ["[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    tokenizer = fast(sentence_pieces(marks), MISTRAL_TEMPLATE)
    return TextModel.open(save_worded(tmp_path_factory.mktemp("mistral"), tokenizer))


@pytest.fixture(scope="module")
def client(hermes: TextModel) -> Iterator[TestClient]:
    with opened(hermes) as made:
        yield made


def ask(client: TestClient, status: int = 200, path: str = CHAT, **body: Any) -> Any:
    first: dict[str, Any] = {"messages": USER} if path == CHAT else {}
    response = client.post(path, json={"temperature": 0, "max_tokens": 300, **first, **body})
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def streamed(client: TestClient, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas of a stream add up to, as clients add them, and the events."""
    response = client.post(CHAT, json={"temperature": 0, "max_tokens": 300, "messages": USER, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                message["tool_calls"].append({**call["function"], "id": call["id"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return {**message, "finish": events[-1]["choices"][0]["finish_reason"]}, events


def test_ids_of_a_prompt_may_be_any_that_the_model_has(client: TestClient) -> None:
    """Its embedding has more rows than its tokenizer has tokens, as published models have."""
    path = "/v1/completions"
    assert ask(client, path=path, prompt=[5, COLUMNS - 1], max_tokens=1)["usage"]["prompt_tokens"] == 2
    refused = ask(client, 400, path=path, prompt=[5, COLUMNS, 7], max_tokens=1)
    assert refused["param"] == "prompt"
    assert f"the token id {COLUMNS}, outside the model's vocabulary of {COLUMNS}" in refused["message"]


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nHi<|im_end|>", "two  spaces ", "Hi<|im_end|> x"])
def test_echo_is_the_prompt_as_it_was_given(client: TestClient, prompt: str) -> None:
    answer = ask(client, path="/v1/completions", prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert answer["text"] == prompt
    tokens, starts = answer["logprobs"]["tokens"], answer["logprobs"]["text_offset"]
    assert [prompt[start:][: len(token)] for token, start in zip(tokens, starts, strict=True)] == tokens


def says(text: str) -> dict[str, Any]:
    """Fields with which the model writes exactly this."""
    return {"guided_choice": [text]}


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_valid_by_its_schema(client: TestClient, form: dict[str, Any]) -> None:
    answer = ask(client, **form, n=2, temperature=1, seed=3)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.slow
def test_a_stream_has_the_same_structured_text(client: TestClient) -> None:
    whole = ask(client, **FORMS[0])["choices"][0]["message"]
    assert streamed(client, **FORMS[0])[0]["content"] == whole["content"]
    assert set(whole) == {"role", "content", "refusal"}


def test_other_kinds_of_structured_text(client: TestClient) -> None:
    assert ask(client, guided_regex="[ab]{3}c")["choices"][0]["message"]["content"][3] == "c"
    assert ask(client, guided_grammar='root ::= "x" "y"')["choices"][0]["message"]["content"] == "xy"
    assert ask(client, path="/v1/completions", prompt="a", guided_choice=["no"])["choices"][0]["text"] == "no"
    content = ask(client, response_format={"type": "json_object"}, max_tokens=20)["choices"][0]["message"]["content"]
    assert content.startswith("{")


def test_a_short_answer_and_a_stop_end_structured_text(client: TestClient) -> None:
    choice = ask(client, guided_regex="[a-z]{40}", max_tokens=2)["choices"][0]
    assert choice["finish_reason"] == "length"
    choice = ask(client, **says('{"a": "b; c"}'), stop=[";"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": "b', "stop")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": ["now"]}}}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "strict": True, "parameters": {"properties": {"b": {"not": {}}}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
        ({"functions": [{}]}, "functions"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"messages": [*USER, {"role": "tool", "content": "a", "tool_call_id": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": [{**USER[0], "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_invalid_forms_are_refused_by_name(client: TestClient, fields: dict[str, Any], parameter: str) -> None:
    assert ask(client, 400, **fields)["param"] == parameter


def test_a_refused_schema_names_its_place(client: TestClient) -> None:
    message = ask(client, 400, guided_json={"properties": {"a": {"items": {"not": {}}}}})["message"]
    assert 'at `#/properties/a/items`: Unimplemented keys: ["not"]' in message


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
NOTHING = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"{CALL}\n{NOTHING}", None, ["get_weather", "now"]),
        (f"I look.\n\n{CALL}", "I look.", ["get_weather"]),
        ("No call: <tool", "No call: <tool", []),
        (CALL.replace("}}", "}"), CALL.replace("}}", "}"), []),
    ],
)
def test_calls_and_content_of_an_answer(client: TestClient, text: str, content: str | None, names: list[str]) -> None:
    choice = ask(client, tools=TOOLS, **says(text))["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert message["content"] == content
    assert [name for name, _ in calls] == names
    assert all(json.loads(given) == ({"city": "Zürich"} if name == "get_weather" else {}) for name, given in calls)
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    made, _ = streamed(client, tools=TOOLS, **says(text))
    assert made["content"] == (content or "")
    assert [(call["name"], call["arguments"]) for call in made["tool_calls"]] == calls
    assert made["finish"] == choice["finish_reason"]


def test_without_tools_the_marks_are_text(client: TestClient) -> None:
    several: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in several:
        choice = ask(client, **fields, **says(CALL))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_one_call_where_several_are_not_allowed(client: TestClient) -> None:
    for text in (f"{CALL}\n{NOTHING}", f"{CALL}{CALL}"):
        choice = ask(client, tools=TOOLS, parallel_tool_calls=False, **says(text))["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off_is_no_call(client: TestClient) -> None:
    choice = ask(client, tools=TOOLS, **says(CALL), max_tokens=12)["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert CALL.startswith(choice["message"]["content"])


def test_of_a_tool_that_is_not_strict_only_what_can_be_is_enforced(client: TestClient) -> None:
    properties = {
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
        "name": {"type": "string", "pattern": "^(?!x)[a-z]{1,2}$", "maxLength": 3},
        "odd": {"type": "integer", "not": {"const": 3}},
    }
    parameters = {**PARAMETERS, "properties": properties, "required": ["tags", "name"]}
    function: dict[str, Any] = {"name": "f", "parameters": parameters}
    body: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "temperature": 1,
    }
    choice = ask(client, **body, seed=3, parallel_tool_calls=False)["choices"][0]
    made = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert set(made["tags"]) <= {"a", "b"} and len(made["tags"]) <= 2 and len(made["name"]) <= 3
    function["parameters"] = {"type": "object", "properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}}
    message = ask(client, **body, max_tokens=40, seed=1)["choices"][0]["message"]
    begun = (message["content"] or "").startswith('<tool_call>\n{"name": "f", "arguments": {')
    assert begun or message["tool_calls"][0]["function"]["name"] == "f"


def test_a_choice_among_some_of_the_tools(client: TestClient) -> None:
    names = [{"type": "function", "function": {"name": "now"}}]
    some: dict[str, Any] = {"mode": "required", "tools": names}
    allowed: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": some}}
    calls = ask(client, **allowed)["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"now"}
    some["mode"] = "auto"
    assert ask(client, **allowed, **says(CALL))["choices"][0]["message"]["content"] == CALL
    assert ask(client, **allowed, **says(NOTHING))["choices"][0]["finish_reason"] == "tool_calls"
    odd: list[Any] = [[], 3, [3], [{"function": 3}]]
    for wrong in ({"mode": "none"}, *({"tools": one} for one in odd)):
        some |= wrong
        assert ask(client, 400, **allowed)["param"] == "tool_choice"
        some |= {"mode": "auto", "tools": names}


def test_a_json_object_may_have_a_schema(client: TestClient) -> None:
    form = {"type": "json_object", "schema": SCHEMA}
    jsonschema.validate(json.loads(ask(client, response_format=form)["choices"][0]["message"]["content"]), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_forced_call_is_valid(request: pytest.FixtureRequest, name: str, choice: Any) -> None:
    with opened(request.getfixturevalue(name)) as client:
        for seed in range(2):
            body = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
            answer = ask(client, **body, parallel_tool_calls=seed > 0)["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            calls = answer["message"]["tool_calls"]
            assert answer["message"]["content"] is None
            assert len(calls) == 1 or (choice == "required" and seed)
            for call in calls:
                if call["function"]["name"] == "get_weather":
                    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
            assert all(len(call["id"]) == (9 if name == "mistral" else 29) for call in calls)
            made, _ = streamed(client, **body, parallel_tool_calls=seed > 0)
            assert [one["arguments"] for one in made["tool_calls"]] == [one["function"]["arguments"] for one in calls]
            assert made["finish"] == "tool_calls"


HISTORY = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0123456789",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
]


def prompt_of(served: ServedModel, messages: list[Any], **body: Any) -> str:
    from llmconv.serve.openai_schema import chat_request  # noqa: PLC0415 - of this test alone

    request = chat_request({"messages": messages, "max_tokens": 1, **body})
    return str(served.model.tokenizer.decode(list(served.choices(request)[0].ids)))


@pytest.mark.slow
def test_calls_and_answers_of_tools_reach_the_template(hermes: TextModel, mistral: TextModel) -> None:
    prompt = prompt_of(ServedModel(hermes, "a"), HISTORY, tools=TOOLS)
    assert '"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nrain" in prompt and '"description": "The time."' in prompt
    prompt = prompt_of(ServedModel(mistral, "a"), HISTORY, tools=TOOLS)
    assert '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}' in prompt.replace("] ", "]") and "rain" in prompt


def test_a_template_that_wants_arguments_as_text_gets_them(hermes: TextModel, tmp_path: Path) -> None:
    (tmp_path / "deepseek.jinja").write_text(DEEPSEEK_TEMPLATE)
    served = ServedModel(hermes, "a", template=str(tmp_path / "deepseek.jinja"))
    assert served.format.dialect == "deepseek_v3"
    assert 'get_weather\n```json\n{"city": "Zürich"}\n```[tool]rain' in prompt_of(served, HISTORY)
    with opened(hermes, template=str(tmp_path / "deepseek.jinja")) as client:
        assert "takes no tools" in ask(client, 400, tools=TOOLS)["message"]


def test_a_dialect_that_is_not_known_is_refused(hermes: TextModel, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    plain = replace(hermes, tokenizer=fast(byte_level()))
    with opened(plain, template=str(tmp_path / "own.jinja")) as client:
        assert "--tool-parser" in ask(client, 400, tools=TOOLS)["message"]
        assert (
            ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)["choices"][0]["finish_reason"]
            == "tool_calls"
        )
    with opened(hermes, template=str(tmp_path / "own.jinja"), tool_parser="hermes", reasoning_parser=False) as client:
        assert ask(client, tools=TOOLS, **says(CALL))["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_a_strict_call_that_the_model_begins_is_valid(client: TestClient) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    fields: dict[str, Any] = {
        "tools": [strict],
        "temperature": 2,
        "top_k": 0,
        "max_tokens": 3000,
        "parallel_tool_calls": False,
    }
    choices = [ask(client, **fields, seed=seed)["choices"][0] for seed in range(3)]
    calls = [call["function"] for choice in choices for call in choice["message"].get("tool_calls", ())]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
    cut = [choice for choice in choices if choice["finish_reason"] == "length"]
    assert all("<tool_call>" not in (one["message"]["content"] or "") for one in choices if one not in cut)


THINKS: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.slow
def test_reasoning_comes_before_structured_text(client: TestClient) -> None:
    fields = {**THINKS, **FORMS[0], "temperature": 2, "top_k": 0, "seed": 1, "max_tokens": 3000}
    choice = ask(client, **fields)["choices"][0]
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    made, _ = streamed(client, **fields)
    assert made["content"] == choice["message"]["content"]
    assert made["reasoning_content"] == choice["message"]["reasoning_content"]


def test_reasoning_stays_text_without_its_parser(hermes: TextModel) -> None:
    with opened(hermes, reasoning_parser=False) as client:
        message = ask(client, **THINKS, **says("a</think>b"))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "a</think>b", "refusal": None}


@pytest.mark.parametrize("name", ["none", "auto", "required", "get"])
def test_a_tool_that_is_named_is_called_whatever_its_name(name: str) -> None:
    tools = [{"type": "function", "function": {"name": one}} for one in (name, "other")]
    chosen = {"type": "function", "function": {"name": name}}
    use = chat_request({"messages": USER, "tools": tools, "tool_choice": chosen}).tools
    assert use.active and [*use.forced] == [name]
    assert not chat_request({"messages": USER, "tools": tools, "tool_choice": "auto"}).tools.forced
