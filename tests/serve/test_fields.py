"""Fields that change which tokens are picked, where an answer ends and what is told of its tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from llmconv.generation import TextModel
from llmconv.serve.field_table import CHAT as OF_CHATS
from llmconv.serve.field_table import COMPLETIONS as OF_COMPLETIONS
from llmconv.serve.field_table import IGNORED, REFUSED, TABLE
from llmconv.serve.fields import ApiError, Fields
from llmconv.serve.openai_schema import chat_request, completion_request
from tests.serve.conftest import Clients
from tests.serve.test_app import CHAT, HELLO, ask, events

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="session")
def exact(model: TextModel) -> Any:
    """The eager model, in float64."""
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float64)


def logprobs_of(exact: Any, ids: Sequence[int]) -> Any:
    """What transformers gives for each token after those before it, [tokens - 1, vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(exact(torch.tensor([ids])).logits[0], dim=-1)[:-1].numpy()


def text_of(client: TestClient, **body: Any) -> str:
    """The text of a completion of `Hello`."""
    text: str = ask(client, COMPLETIONS, prompt="Hello", **body)["choices"][0]["text"]
    return text


@pytest.mark.parametrize(("count", "most"), [(2, 0), (0, 1)])
def test_echo_gives_the_log_probability_of_every_token(
    client: TestClient, model: TextModel, exact: Any, count: int, most: int
) -> None:
    answer = ask(client, COMPLETIONS, prompt="Hello you", echo=True, logprobs=count, max_tokens=most)
    (choice,) = answer["choices"]
    found, prompt = choice["logprobs"], model.encode("Hello you")
    ids = [model.encode(one)[0] for one in found["tokens"]]
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + most == len(choice["text"])
    wanted = logprobs_of(exact, ids)
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(wanted[np.arange(len(ids) - 1), ids[1:]], abs=1e-4)
    assert found["text_offset"] == list(range(len(ids)))
    assert answer["usage"]["completion_tokens"] == most and choice["finish_reason"] == "length"
    if not count:
        assert found["top_logprobs"] is None
        return
    assert found["top_logprobs"][0] is None
    for row, top in zip(wanted, found["top_logprobs"][1:], strict=True):
        likeliest = np.sort(row)[::-1][:count]
        assert sorted(top.values(), reverse=True)[:count] == pytest.approx(likeliest, abs=1e-4)
        assert count <= len(top) <= count + 1


def test_log_probabilities_of_a_chat_are_those_before_temperature_and_bias(
    client: TestClient, model: TextModel, exact: Any
) -> None:
    fields: dict[str, Any] = {"temperature": 1.9, "seed": 3, "logit_bias": {"7": 1000}, "max_tokens": 3}
    choice = ask(client, logprobs=True, top_logprobs=2, **fields)["choices"][0]
    found = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in found) == choice["message"]["content"] == 3 * model.decode([7])
    prompt = model.encode_chat(HELLO)
    wanted = logprobs_of(exact, [*prompt, 7, 7, 7])[-3:]
    assert [one["logprob"] for one in found] == pytest.approx(wanted[:, 7], abs=1e-4)
    for one, row in zip(found, wanted, strict=True):
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-4)
        assert bytes(one["bytes"]).decode() == one["token"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_gives_the_same_log_probabilities(client: TestClient, path: str) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1, "prompt": "Hi"}
    whole = ask(client, path, **fields)["choices"][0]["logprobs"]
    found = [chunk["choices"][0]["logprobs"] for chunk in events(client, path, **fields)]
    if path == CHAT:
        entries = [entry for one in found if one for entry in one["content"]]
        wanted = [one["logprob"] for one in whole["content"]]
        assert [one["logprob"] for one in entries] == pytest.approx(wanted, abs=1e-5)
        assert [one["bytes"] for one in entries] == [one["bytes"] for one in whole["content"]]
        return
    joined = {name: [entry for one in found if one for entry in one[name]] for name in whole}
    assert joined.pop("token_logprobs") == pytest.approx(whole.pop("token_logprobs"), abs=1e-5)
    assert list(map(set, joined.pop("top_logprobs"))) == list(map(set, whole.pop("top_logprobs")))
    assert joined == whole


def test_tokens_of_a_stop_string_have_none_in_a_chat(client: TestClient) -> None:
    whole = ask(client)["choices"][0]["message"]["content"]
    stop = whole[3:5]
    at = whole.index(stop)
    for include in (False, True):
        fields: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
        answer = ask(client, logprobs=True, **fields)["choices"][0]
        tokens = [one["token"] for one in answer["logprobs"]["content"]]
        assert answer["message"]["content"] == whole[: at + 2 * include] == "".join(tokens)
        assert answer["finish_reason"] == "stop"


def test_every_new_token_of_a_completion_has_one_so_that_readers_can_leave_it_out(
    client: TestClient, model: TextModel
) -> None:
    body: dict[str, Any] = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {"5": 100}}
    (ended,) = ask(client, COMPLETIONS, stop_token_ids=[5], **body)["choices"]
    (stopped,) = ask(client, COMPLETIONS, stop=model.decode([5]), **body)["choices"]
    (plain,) = ask(client, COMPLETIONS, **body)["choices"]
    assert ended["text"] == stopped["text"] == "Hello" and ended["finish_reason"] == "stop"
    for one in (ended, stopped):
        assert one["logprobs"]["tokens"] == plain["logprobs"]["tokens"] == [*"Hello", model.decode([5])]


def test_tokens_may_be_named_by_their_ids(client: TestClient, model: TextModel) -> None:
    answer = ask(client, COMPLETIONS, prompt="H", logprobs=0, echo=True, max_tokens=0, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{model.encode('H')[0]}"]


def test_a_bias_bans_and_forces_tokens_of_a_greedy_answer(client: TestClient, model: TextModel) -> None:
    first = model.encode(text_of(client)[0])[0]
    assert text_of(client, logit_bias={str(first): -100})[0] != text_of(client)[0]
    assert set(text_of(client, logit_bias={"5": 100})) == {model.decode([5])}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_the_tokens_of_the_answer_by_the_formula(
    client: TestClient, model: TextModel, exact: Any, name: str
) -> None:
    bias = {5: 4.0, 9: 3.0, model.encode("H")[0]: 2.0}
    answer = ask(client, COMPLETIONS, prompt="Hello", logit_bias={str(k): v for k, v in bias.items()}, **{name: 1.5})
    ids: list[int] = model.encode("Hello")
    start = len(ids)
    for _ in range(8):
        with torch.no_grad():
            scores = exact(torch.tensor([ids])).logits[0, -1].numpy()
        for token, value in bias.items():
            scores[token] += value
        for token in set(ids[start:]):
            count = ids[start:].count(token)
            scores[token] -= 1.5 * (count if name == "frequency_penalty" else 1)
        ids.append(int(scores.argmax()))
    assert answer["choices"][0]["text"] == model.decode(ids[start:])
    assert len(set(ids[start:])) > 1


def test_end_tokens_end_unless_they_are_ignored_or_too_early(client: TestClient, model: TextModel) -> None:
    force = {"logit_bias": {"5": 100}}
    end: dict[str, Any] = {**force, "stop_token_ids": [5], "logprobs": 0}
    (choice,) = ask(client, COMPLETIONS, prompt="Hello", **end)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    late = ask(client, COMPLETIONS, prompt="Hello", min_tokens=3, **end)
    assert late["usage"]["completion_tokens"] == 4 and len(late["choices"][0]["text"]) == 3
    mark = model.decode([5])
    assert text_of(client, **force, stop=[mark * 2], min_tokens=3) == mark * 2


def test_ignore_eos_goes_on(clients: Clients, model: TextModel) -> None:
    ending = replace(model, defaults=model.defaults.but(eos_token_id=5))
    client = clients(served=ending)
    assert text_of(client, logit_bias={"5": 100}) == ""
    assert text_of(client, logit_bias={"5": 100}, ignore_eos=True) == 8 * model.decode([5])


def test_best_of_returns_the_likeliest_answers(client: TestClient) -> None:
    fields: dict[str, Any] = {"prompt": "Hello", "temperature": 1.5, "seed": 4, "max_tokens": 6}
    several = ask(client, COMPLETIONS, n=4, logprobs=0, **fields)["choices"]
    mean = {one["text"]: float(np.mean(one["logprobs"]["token_logprobs"])) for one in several}
    best = ask(client, COMPLETIONS, n=2, best_of=4, **fields)
    assert [one["text"] for one in best["choices"]] == sorted(mean, key=lambda text: -mean[text])[:2]
    assert [one["index"] for one in best["choices"]] == [0, 1] and best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 24


def test_the_end_of_a_chat_is_chosen_by_the_request(client: TestClient, model: TextModel) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "So"}]

    def tokens(**fields: Any) -> int:
        count: int = ask(client, messages=begun, **fields)["usage"]["prompt_tokens"]
        return count

    text = "[user]Hello[end][assistant]So"
    assert tokens() == tokens(continue_final_message=True, add_generation_prompt=False) == len(text)
    assert tokens(add_generation_prompt=True) == len(text + "[end][assistant]")
    assert tokens(add_generation_prompt=False) == len(text + "[end]")


def test_every_field_that_is_read_has_its_row_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fields] = []
    plain = Fields.__init__

    def noted(self: Fields, content: Any, prefix: str = "") -> None:
        plain(self, content, prefix)
        made.extend([self] if not prefix else [])

    monkeypatch.setattr(Fields, "__init__", noted)
    chat_request({"messages": HELLO})
    completion_request({"prompt": "a"})
    for fields, endpoint in zip(made, (OF_CHATS, OF_COMPLETIONS), strict=True):
        rows = [row.name for row in TABLE if endpoint in row.endpoints]
        assert sorted(rows) == sorted(fields.asked)


def test_refused_fields_are_named_and_their_neutral_values_accepted() -> None:
    for row in TABLE:
        for parse, first in ((chat_request, {"messages": HELLO}), (completion_request, {"prompt": "a"})):
            endpoint = OF_CHATS if parse is chat_request else OF_COMPLETIONS
            if endpoint not in row.endpoints or row.status not in (REFUSED, IGNORED):
                continue
            for value in row.neutral if row.status == REFUSED else ("x", {}):
                parse({**first, row.name: value})
            if row.status == REFUSED:
                with pytest.raises(ApiError) as caught:
                    parse({**first, row.name: {"a": 1}})
                assert caught.value.parameter == row.name


def test_rows_that_share_steps_keep_their_own_rules(clients: Clients, model: TextModel) -> None:
    client = clients(active=4)
    bodies: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"logit_bias": {"5": 6}, "frequency_penalty": 1.0, "logprobs": 0},
        {"logit_bias": {"9": 4}, "presence_penalty": 2.0},
        {"stop_token_ids": [7], "min_tokens": 2, "temperature": 1.2, "seed": 5, "logprobs": 2},
    ]
    bodies = [{"prompt": "Hello", "temperature": 0, "max_tokens": 24, **body} for body in bodies]
    alone = [client.post(COMPLETIONS, json=body).json()["choices"][0] for body in bodies]
    found: dict[int, Any] = {}

    def send(number: int) -> None:
        found[number] = client.post(COMPLETIONS, json=bodies[number]).json()["choices"][0]

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(alone):
        assert found[number]["text"] == one["text"]
        if one["logprobs"]:
            wanted = one["logprobs"]["token_logprobs"]
            assert found[number]["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-4)
    json.dumps(found, allow_nan=False)
