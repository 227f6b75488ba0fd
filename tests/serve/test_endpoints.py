"""`/v1/responses`, `/tokenize`, `/metrics` and the log, and adapters that requests choose."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmconv.convert import merge_lora
from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.generation import TextModel
from llmconv.serve.app import make_app
from llmconv.serve.metrics import Metrics
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ConversationPool, ServedModel
from llmconv.serve.server import ServerSettings, serve, with_adapters
from tests.builders.lora_inputs import save_lora
from tests.serve.test_app import HELLO, ask

RESPONSES = "/v1/responses"
SECRET = "Hello"


def stream_of(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    response = client.post(RESPONSES, json={"temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    pairs = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in pairs]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response_is_the_answer_of_the_chat(client: TestClient) -> None:
    wanted = ask(client)
    fields = {"temperature": 0, "max_output_tokens": 8, "include": ["message.output_text.logprobs"]}
    answer = client.post(RESPONSES, json={"input": "Hello", **fields}).json()
    (item,) = answer["output"]
    (part,) = item["content"]
    assert part["text"] == wanted["choices"][0]["message"]["content"] == "".join(p["token"] for p in part["logprobs"])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["output_tokens"] == 8
    assert answer["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = client.post(RESPONSES, json={"input": items, **fields}).json()
    assert again["output"][0]["content"][0]["text"] == part["text"]


def test_the_events_of_a_response_come_in_their_order(client: TestClient) -> None:
    events = stream_of(client, input="Hello", max_output_tokens=3, instructions="Be")
    names = [event["type"].removeprefix("response.") for event in events]
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names == [*begun, *["output_text.delta"] * 3, *ended]
    text = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text and final["instructions"] == "Be"


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "king", "content": "a"}]}, "input[1].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(client: TestClient, body: Any, parameter: str) -> None:
    response = client.post(RESPONSES, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)


def test_tokenize_and_detokenize_are_inverse(client: TestClient, model: TextModel) -> None:
    found = client.post("/tokenize", json={"prompt": "Hi you", "return_token_strs": True}).json()
    assert found == {"count": 6, "max_model_len": 2048, "tokens": model.encode("Hi you"), "token_strs": list("Hi you")}
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Hi you"}
    chat = client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert chat["count"] == len("[user]Hello[end]") and chat["token_strs"] is None
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [96]}), ("/detokenize", {"tokens": [True]})):
        assert client.post(path, json=body).status_code == 400


def test_the_tokenizer_tells_its_special_tokens(client: TestClient) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["unk_token"] == "<unk>" and info["eos_token"] is None and "[end]" in info["chat_template"]


def test_embeddings_are_not_found_and_the_error_says_how(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 404 and "--task embed" in response.json()["error"]["message"]


def logged(model: TextModel, shows: bool) -> tuple[list[str], str]:
    """The log and the metrics of three requests."""
    lines: list[str] = []
    app = make_app(ServedModel(model, "tiny"), Scheduler(2, 2), metrics=Metrics(lines.append, shows))
    with TestClient(app, base_url="http://localhost") as client:
        for body in ({"max_tokens": 3}, {"max_tokens": 3, "stream": True}, {"n": 99}):
            client.post("/v1/completions", json={"prompt": SECRET, "temperature": 0, **body})
        return lines, client.get("/metrics").text


def test_metrics_count_and_the_log_has_a_line_without_the_prompt(model: TextModel) -> None:
    lines, page = logged(model, False)
    assert len(lines) == 3 and not any(SECRET in line for line in lines) and SECRET not in page
    assert lines[0].startswith("/v1/completions 200 model=tiny prompt=5 new=3 first=")
    assert lines[2].startswith("/v1/completions 400 model=- prompt=0 new=0 first=- total=")
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    assert values['llmconv_requests_total{path="/v1/completions",model="tiny",status="200"}'] == "2"
    assert values['llmconv_generation_tokens_total{model="tiny"}'] == "6"
    assert values['llmconv_prompt_tokens_total{model="tiny"}'] == "10"
    assert values['llmconv_time_to_first_token_seconds_bucket{le="+Inf"}'] == "2"
    assert values["llmconv_requests_active"] == "0"


def test_the_log_has_prompts_only_if_it_is_told_to(model: TextModel) -> None:
    assert all(SECRET in line for line in logged(model, True)[0])


def test_the_log_names_fields_without_effect(model: TextModel) -> None:
    lines: list[str] = []
    app = make_app(ServedModel(model, "tiny"), Scheduler(2, 2), metrics=Metrics(lines.append))
    with TestClient(app, base_url="http://localhost") as client:
        client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 1, "temprature": 1, "a\nb": SECRET})
    (line,) = lines
    assert line.endswith(' ignored=["a\\nb","temprature"]') and SECRET not in line


@pytest.fixture(scope="module")
def adapted(chatting: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, list[Path]]]:
    """A server of graphs with inputs for adapters, and the folders of the model merged with each of two."""
    root = tmp_path_factory.mktemp("adapted")
    base = root / "base"
    shutil.copytree(chatting, base, ignore=shutil.ignore_patterns("*.onnx", "llmconv.json"))
    export(base, lora_inputs="all-linear")
    paths = {name: save_lora(base, root / name, seed=seed) for name, seed in (("one", 3), ("two", 8))}
    merged = [root / f"{name}-merged" for name in paths]
    for path, out in zip(paths.values(), merged, strict=True):
        merge_lora(base, path, out)
    served = ServedModel(TextModel.open(base), "base")
    pools = [ConversationPool(2) for _ in paths]
    app = make_app(served, Scheduler(4, 8), adapters=with_adapters(served, paths, pools, {}))
    with TestClient(app, base_url="http://localhost") as client:
        yield client, merged


@pytest.mark.slow
def test_requests_choose_an_adapter_by_its_name(adapted: tuple[TestClient, list[Path]]) -> None:
    client, merged = adapted
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["base", "one", "two"]
    body: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 12}
    texts = {name: ask(client, "/v1/completions", model=name, **body) for name in ("base", "one", "two", "base:two")}
    found = {name: answer["choices"][0]["text"] for name, answer in texts.items()}
    for name, folder in zip(("one", "two"), merged, strict=True):
        model = TextModel.open(folder, backend="torch")
        pieces = model.stream([model.encode("Once upon")], model.defaults.but(max_new_tokens=12, do_sample=False))
        assert "".join(piece.text for piece in pieces) == found[name]
    assert found["base:two"] == found["two"] and len({found[name] for name in ("base", "one", "two")}) == 3
    assert ask(client, "/v1/completions", **body)["choices"][0]["text"] == found["base"]
    assert texts["one"]["model"] == "one"
    refused = client.post("/v1/completions", json={"model": "three", **body})
    assert refused.status_code == 404 and "`base`, `one`, `two`" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_adapters_keep_no_cache_of_each_other(adapted: tuple[TestClient, list[Path]]) -> None:
    client, _ = adapted
    body: dict[str, Any] = {"prompt": "The quick brown", "max_tokens": 6}
    for name in ("one", "two", "base"):
        usage = ask(client, "/v1/completions", model=name, **body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(client, "/v1/completions", model="one", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_adapter_has_another_name_than_the_model(model: TextModel) -> None:
    with pytest.raises(UsageProblem, match="has the name of the model"):
        with_adapters(ServedModel(model, "tiny"), {"tiny": "path"}, [ConversationPool(1)], {})


def test_an_event_loop_that_runs_is_refused_before_the_port_is_opened(model: TextModel) -> None:
    async def in_a_notebook() -> None:
        serve(model, ServerSettings(port=1))

    with pytest.raises(UsageProblem, match="an event loop runs in this thread"):
        asyncio.run(in_a_notebook())
