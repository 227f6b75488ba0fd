"""`pipeline` takes keywords of other pipelines, or names what to give in their place; tasks and models have names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmconv
from llmconv.embedding import embed
from llmconv.errors import UsageProblem
from llmconv.export import export
from llmconv.generation.pipeline import INSTEAD, own_keywords
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.quantizers import save_tokenizer

GREEDY: dict[str, Any] = {"do_sample": False}


def test_the_call_of_a_pipeline_of_mindspore_lite_gives_the_same_text(talking: Path) -> None:
    theirs: dict[str, Any] = {
        "backend": "mslite",
        "rank_id": 0,
        "is_sample_acceleration": False,
        "image_processor": None,
    }
    pipe = llmconv.pipeline("text_generation", model=talking, infer_seq_length=16, **theirs)
    own = llmconv.pipeline("text-generation", model=talking)
    assert pipe("Once", **GREEDY) == own("Once", max_length=16, **GREEDY)
    assert pipe("Once", max_length=9, **GREEDY) == own("Once", max_length=9, **GREEDY)


def test_their_backend_of_models_is_torch(talking: Path) -> None:
    assert llmconv.pipeline(model=talking, backend="ms").model.backend == "torch"


@pytest.mark.parametrize("name", INSTEAD)
def test_a_keyword_without_a_counterpart_is_answered(name: str, talking: Path) -> None:
    with pytest.raises(UsageProblem, match=f"`{name}` is not an argument of `pipeline`") as refused:
        llmconv.pipeline(model=talking, **{name: "x"})
    assert refused.value.hint == INSTEAD[name]


@pytest.mark.parametrize(
    ("device", "options", "placed"),
    [
        (None, {"device_id": 1}, ("cuda:1", {})),
        ("cuda", {"device_id": 2}, ("cuda:2", {})),
        (None, {"device_id": 0, "provider": "cuda"}, ("cuda:0", {})),
        ("cpu", {"device_id": 0}, ("cpu", {})),
        (None, {"device_id": 0, "provider": "cpu"}, (None, {"provider": "cpu"})),
    ],
)
def test_the_number_of_a_device_is_that_of_the_device(device: Any, options: dict[str, Any], placed: Any) -> None:
    assert own_keywords(None, device, options) == (None, *placed)


@pytest.mark.parametrize(
    "options",
    [
        {"rank_id": 1},
        {"device_id": 1, "device": "cuda:0"},
        {"device_id": -1},
        {"device_id": 1, "provider": "rocm"},
        {"infer_seq_length": 0},
        {"infer_seq_length": 8, "max_length": 9},
        {"infer_seq_length": 8, "max_new_tokens": 3},
    ],
    ids=str,
)
def test_contradictions_are_refused(options: dict[str, Any], talking: Path) -> None:
    with pytest.raises(UsageProblem):
        llmconv.pipeline(model=talking, **options)


def test_tasks_are_listed_and_checked() -> None:
    assert llmconv.supported_tasks() == ("classify", "embed", "rerank", "text-generation")
    assert llmconv.check_task("text_generation") == "text-generation"
    with pytest.raises(UsageProblem, match="unsupported pipeline task `text-generaton`") as refused:
        llmconv.check_task("text-generaton")
    assert refused.value.hint == "is `text-generation` meant?"


def test_a_task_and_a_model_are_registered(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.generation.pipeline._TASKS", {**llmconv.generation.pipeline._TASKS})
    monkeypatch.setattr("llmconv.generation.pipeline._MODELS", {})
    llmconv.register_task("shout", lambda model, **given: lambda text: (str(model), text.upper(), given))
    llmconv.register_model("mine", talking)
    assert llmconv.pipeline("shout", model="mine", threads=1)("a") == (str(talking), "A", {"threads": 1})
    assert llmconv.pipeline(model="mine")("Once", max_new_tokens=2, **GREEDY)
    assert llmconv.get_task("shout") is not llmconv.get_task("text-generation")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the graph of an embedding model."""
    folder = save_modules(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))
    save_tokenizer(folder)
    export(folder, task="embed")
    return folder


def test_embeddings_are_a_task(embedder: Path) -> None:
    texts = ["t1 t2", "t3"]
    pipe, expected = llmconv.pipeline("embed", model=embedder), embed(embedder, texts).values
    assert [row["embedding"] for row in pipe(texts)] == expected.tolist()
    assert pipe("t1").keys() == {"embedding"}
    with pytest.raises(UsageProblem, match="was exported with `--task embed`"):
        llmconv.pipeline("rerank", model=embedder)
    with pytest.raises(UsageProblem, match="`temperature` is not an option of `embed`"):
        llmconv.pipeline("embed", model=embedder, temperature=1)
