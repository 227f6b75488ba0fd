"""The endpoints, over ASGI: what OpenAI's reference says of requests and responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmconv.generation import TextModel
from tests.builders.chatting import CONTEXT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def ask(client: TestClient, path: str = CHAT, **body: Any) -> Any:
    """The answer's JSON; a chat says hello by default, greedily and shortly."""
    first: dict[str, Any] = {"messages": HELLO} if path == CHAT else {}
    response = client.post(path, json={"max_tokens": 8, "temperature": 0, **first, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(client: TestClient, path: str = CHAT, **body: Any) -> list[Any]:
    """The events of a stream; the last is `[DONE]`."""
    first: dict[str, Any] = {"messages": HELLO} if path == CHAT else {}
    response = client.post(path, json={"max_tokens": 8, "temperature": 0, "stream": True, **first, **body})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


@pytest.mark.slow
def test_a_chat_answer_has_the_fields_of_openai(client: TestClient, model: TextModel) -> None:
    answer = ask(client)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny-chat")
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    assert len(choice["message"]["content"]) == 8
    count = len(model.encode_chat(HELLO))
    assert {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": count,
        "completion_tokens": 8,
        "total_tokens": count + 8,
    }


def test_a_completion_begins_with_the_space_behind_its_prompt(client: TestClient, words: None) -> None:
    """As sentencepiece's decoder drops it where a text begins; the text of a chat does begin."""
    whole = ask(client, COMPLETIONS, prompt="Hello")["choices"][0]["text"]
    assert whole.startswith(" w")
    assert "".join(event["choices"][0]["text"] for event in events(client, COMPLETIONS, prompt="Hello")) == whole
    assert ask(client)["choices"][0]["message"]["content"].startswith("w")


def test_a_stream_gives_the_same_text_as_the_whole_answer(client: TestClient) -> None:
    whole = ask(client)["choices"][0]["message"]["content"]
    chunks = events(client, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_only_when_asked_for(client: TestClient) -> None:
    assert all("usage" not in chunk for chunk in events(client))


def test_a_completion_continues_every_prompt(client: TestClient, model: TextModel) -> None:
    one, two = ("Once upon", "The quick")
    answer = ask(client, "/v1/completions", prompt=[one, two], n=2)
    assert answer["object"] == "text_completion"
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [
        ask(client, "/v1/completions", prompt=prompt)["choices"][0]["text"] for prompt in (one, one, two, two)
    ]
    assert answer["usage"]["prompt_tokens"] == len(one) + len(two)
    assert answer["usage"]["completion_tokens"] == 32


def test_token_ids_are_a_prompt(client: TestClient, model: TextModel) -> None:
    text = ask(client, "/v1/completions", prompt="Hello")["choices"][0]["text"]
    ids = model.encode("Hello")
    assert ask(client, "/v1/completions", prompt=ids)["choices"][0]["text"] == text
    assert ask(client, "/v1/completions", prompt=[ids])["choices"][0]["text"] == text


def test_echo_puts_the_prompt_first(client: TestClient) -> None:
    plain = ask(client, "/v1/completions", prompt="Hello")["choices"][0]["text"]
    assert ask(client, "/v1/completions", prompt="Hello", echo=True)["choices"][0]["text"] == "Hello" + plain


def test_streamed_completions_have_text_not_deltas(client: TestClient) -> None:
    whole = ask(client, "/v1/completions", prompt="Hello")["choices"][0]["text"]
    chunks = events(client, "/v1/completions", prompt="Hello")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_completions_have_sixteen_tokens_by_default(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "Hello", "temperature": 0})
    assert response.json()["usage"]["completion_tokens"] <= 16
    assert response.json()["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["TEXT", ["absent", "TEXT"]])
def test_a_stop_text_ends_the_answer_and_is_not_in_it(client: TestClient, stop: str | list[str]) -> None:
    whole = ask(client)["choices"][0]["message"]["content"]
    wanted = whole[3:5]
    stops = wanted if isinstance(stop, str) else [text.replace("TEXT", wanted) for text in stop]
    (choice,) = ask(client, stop=stops)["choices"]
    assert choice["message"]["content"] == whole[: whole.index(wanted)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_seed_gives_the_same_answers_and_choices_differ(client: TestClient) -> None:
    first, again, other = (
        [c["message"]["content"] for c in ask(client, temperature=1.5, seed=seed, n=2, max_tokens=24)["choices"]]
        for seed in (7, 7, 70)
    )
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.slow
def test_without_a_seed_answers_differ(client: TestClient) -> None:
    answers = {ask(client, temperature=2, max_tokens=24)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(answers) > 1


@pytest.mark.slow
def test_a_second_turn_runs_only_new_tokens(client: TestClient) -> None:
    answer = ask(client)
    content = answer["choices"][0]["message"]["content"]
    longer = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
    second = ask(client, messages=longer)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["total_tokens"] - 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.slow
def test_a_kept_cache_changes_no_answer(clients: Any) -> None:
    longer = [*HELLO, {"role": "assistant", "content": "?"}, {"role": "user", "content": "And?"}]
    fresh = ask(clients(), messages=longer)
    client = clients()
    ask(client)
    for _ in range(2):
        assert ask(client, messages=longer)["choices"] == fresh["choices"]


def test_content_may_come_in_parts(client: TestClient) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert ask(client, messages=parts)["choices"] == ask(client)["choices"]


@pytest.mark.slow
def test_a_developer_message_is_a_system_message(client: TestClient) -> None:
    answers = [
        ask(client, messages=[{"role": role, "content": "Be"}, *HELLO])["choices"] for role in ("system", "developer")
    ]
    assert answers[0] == answers[1] != ask(client)["choices"]


@pytest.mark.slow
def test_the_answer_ends_with_the_context(client: TestClient, model: TextModel) -> None:
    prompt = "a" * (CONTEXT - 3)
    answer = ask(client, "/v1/completions", prompt=prompt, max_tokens=3)
    assert answer["usage"]["total_tokens"] <= CONTEXT
    response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_models_and_health_name_the_model(client: TestClient) -> None:
    (found,) = client.get("/v1/models").json()["data"]
    assert (found["id"], found["object"], found["context_length"]) == ("tiny-chat", "model", CONTEXT)
    assert client.get("/v1/models/tiny-chat").json() == found
    assert client.get("/v1/models/other").status_code == 404
    health = client.get("/health").json()
    kinds = {"chat": True, "images": False}
    assert health.pop("defaults")["max_tokens"] == 64
    assert health == {"status": "ok", "model": "tiny-chat", **kinds, "active": 0, "waiting": 0}


@pytest.mark.slow
def test_the_model_may_be_omitted(client: TestClient) -> None:
    assert ask(client)["choices"] == ask(client, model="tiny-chat")["choices"]


@pytest.mark.quick_rows("False")
@pytest.mark.parametrize("chat", [True, False])
def test_of_a_text_that_can_never_fit_only_the_beginning_becomes_tokens(
    client: TestClient, model: TextModel, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    seen: list[int] = []
    plain = type(model.tokenizer).__call__

    def counted(self: Any, text: str, **options: Any) -> Any:
        seen.append(len(text))
        return plain(self, text, **options)

    monkeypatch.setattr(type(model.tokenizer), "__call__", counted)
    path, text = "/v1/chat/completions" if chat else "/v1/completions", "a" * 3_000_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    error = client.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded" and "more than 4096 tokens" in error["message"]
    assert sum(seen) < 20 * CONTEXT


def test_a_chat_of_more_messages_than_tokens_is_refused(client: TestClient) -> None:
    messages = [{"role": "user", "content": ""}] * (CONTEXT + 1)
    error = client.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "2049 messages" in error["message"]
