"""`/v1/embeddings` of a folder of `export --task embed`: the rows of `Embedder`, in OpenAI's form."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from llmconv.embedding import Embedder, embeds
from llmconv.errors import UsageProblem
from llmconv.export.exporter import export
from llmconv.serve.app import make_app
from llmconv.serve.embeddings import ServedEmbedder, embedding_request
from llmconv.serve.fields import ApiError
from llmconv.serve.scheduler import Scheduler
from tests.builders.embedding_models import save_model, save_modules, save_reranker
from tests.builders.server_process import serving
from tests.builders.talking import save_letters
from tests.builders.tracing import trace_once

trace_once()
PATH = "/v1/embeddings"
TEXTS = ["hello world", "the sea is blue, and wide today", "x", *(f"text {number}" for number in range(9))]
PROMPTS = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_letters(save_modules(save_model(tmp_path_factory.mktemp("models") / "small", "qwen3")))
    (path / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    export(path, task="embed")
    return path


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return Embedder(folder)


@pytest.fixture(scope="module")
def embedding(embedder: Embedder) -> Iterator[TestClient]:
    app = make_app(ServedEmbedder(embedder, "small"), Scheduler(2, 4))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def rows(client: TestClient, **body: Any) -> list[Any]:
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def test_a_batch_has_the_rows_of_the_embedder_in_order(embedding: TestClient, embedder: Embedder) -> None:
    answer = embedding.post(PATH, json={"input": TEXTS, "model": "small", "user": "me", "other": 1}).json()
    found = np.array([one["embedding"] for one in answer["data"]], dtype=np.float32)
    np.testing.assert_allclose(found, embedder.encode(TEXTS), atol=1e-6)
    count = sum(map(len, TEXTS))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", "small", "embedding")


def test_base64_is_little_endian_float32(embedding: TestClient) -> None:
    (plain,), (coded,) = rows(embedding, input="sea"), rows(embedding, input="sea", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == plain


def test_tokens_are_an_input(embedding: TestClient, embedder: Embedder) -> None:
    one, two = embedder.tokens(["sea", "hello"])
    (wanted, other) = rows(embedding, input=["sea", "hello"])
    assert rows(embedding, input=one) == rows(embedding, input=[one]) == rows(embedding, input="sea")
    np.testing.assert_allclose(rows(embedding, input=[one, two]), [wanted, other], atol=1e-6)


def test_dimensions_cut_and_scale(embedding: TestClient, embedder: Embedder) -> None:
    (found,) = rows(embedding, input="sea", dimensions=5)
    wanted = embedder.encode(["sea"])[0][:5]
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-6)


def test_a_prompt_of_the_model_comes_first(embedding: TestClient, embedder: Embedder) -> None:
    found = rows(embedding, input=["sea"], prompt_name="query")
    np.testing.assert_allclose(found, embedder.encode(["sea"], prompt_name="query"), atol=1e-6)


def test_what_is_too_long_is_cut_only_if_asked(embedding: TestClient, embedder: Embedder) -> None:
    text = "a" * 41
    refused = embedding.post(PATH, json={"input": ["x", text]})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input[1]"
    wanted = embedder.encode([text[:40]])
    for given in (text, embedder.tokens([text], cuts=False)[0]):
        np.testing.assert_allclose(rows(embedding, input=given, truncate=True), wanted, atol=1e-6)


def test_token_ids_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    """LangChain sends those of OpenAI's models; they lack what this tokenizer adds to every text."""
    shutil.copytree(folder, own := tmp_path / "own", symlinks=True)
    file = json.loads((own / "tokenizer.json").read_text())
    end = file["added_tokens"][0]
    piece = {"SpecialToken": {"id": end["content"], "type_id": 0}}
    known = {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, piece]
    file["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    (own / "tokenizer.json").write_text(json.dumps(file))
    served = ServedEmbedder(Embedder(own), "own")
    long = AutoTokenizer.from_pretrained(own)("the sea " * 9)["input_ids"]
    wanted = [*long[:39], end["id"]]  # whose state is the embedding
    assert served.rows(embedding_request({"input": ["the sea " * 9, long], "truncate": True})) == [wanted, wanted]
    [ids] = served.embedder.tokens(["sea"])
    assert served.rows(embedding_request({"input": ids})) == [ids]
    with pytest.raises(ApiError, match="check_embedding_ctx_length=False"):
        served.rows(embedding_request({"input": ids[:-1]}))


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": [3, 96]}, "input"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "prompt_name": "answer"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": []}, "messages"),
    ],
)
def test_what_is_wrong_is_refused_by_name(embedding: TestClient, body: dict[str, Any], parameter: str) -> None:
    answer = embedding.post(PATH, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


def test_other_endpoints_say_what_the_model_is_for(embedding: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    for answer in (embedding.post("/v1/chat/completions", json=body), embedding.get("/")):
        assert answer.status_code == 404 and "/v1/embeddings" in answer.json()["error"]["message"]
    assert embedding.post(PATH, json={"input": "a", "model": "other"}).json()["error"]["code"] == "model_not_found"
    (model,) = embedding.get("/v1/models").json()["data"]
    assert (model["id"], model["context_length"]) == ("small", 40)
    assert embedding.get("/health").json()["chat"] is False
    assert "llmconv_prompt_tokens_total" in embedding.get("/metrics").text


@pytest.mark.slow
def test_a_reranker_is_refused(tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - of one test

    path = save_letters(save_reranker(save_model(tmp_path / "m", "qwen3", transformers.AutoModelForCausalLM)))
    export(path, task="rerank")
    assert embeds(path)
    with pytest.raises(UsageProblem, match="--task rerank"):
        ServedEmbedder(Embedder(path), "m")


@pytest.mark.slow
def test_the_command_serves_it_to_openais_client(folder: Path, embedder: Embedder) -> None:
    with serving(folder) as served:
        with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
            found = client.embeddings.create(model="small", input=TEXTS)
        np.testing.assert_allclose([one.embedding for one in found.data], embedder.encode(TEXTS), atol=1e-6)
    with pytest.raises(AssertionError, match="`--template` has no effect"), serving(folder, "--template", "alpaca"):
        pass
