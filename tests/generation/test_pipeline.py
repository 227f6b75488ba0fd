"""llmconv.pipeline returns what transformers.pipeline returns, for every way to give the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import llmconv
from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation import ModelFiles
from llmconv.generation.chat_session import Chat
from llmconv.runtime.chat_templates import TEMPLATES, Template

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
Pipe = Callable[..., Any]


@pytest.fixture(scope="module")
def both(talking: Path) -> tuple[Any, Any]:
    """Ours and transformers'."""
    theirs = transformers.pipeline("text-generation", model=str(talking))
    ours = llmconv.pipeline("text-generation", model=talking)
    theirs.tokenizer.chat_template = ours.tokenizer.chat_template = TEMPLATE
    return ours, theirs


@pytest.mark.quick_rows(
    "{}-Once",
    "{}-inputs1",
    "{'return_full_text': False}-Once",
    "{'return_full_text': False}-inputs1",
    "{'return_full_text': False}-inputs2",
    "{'repetition_penalty': 1.3}-Once",
    "{'repetition_penalty': 1.3}-inputs1",
    "{'repetition_penalty': 1.3}-inputs3",
    "{'repetition_penalty': 1.3}-inputs5",
)
@pytest.mark.parametrize(
    "inputs",
    ["Once", ["Once"], ["Once", "upon a time"], CHAT, [CHAT, CHAT], [*CHAT, {"role": "assistant", "content": "H"}]],
)
@pytest.mark.parametrize("options", [{}, {"return_full_text": False}, {"repetition_penalty": 1.3}], ids=str)
def test_the_result_is_that_of_transformers(both: tuple[Any, Any], inputs: Any, options: dict[str, Any]) -> None:
    fields = {"max_new_tokens": 6, "do_sample": False, **options}
    assert both[0](inputs, **fields) == both[1](inputs, **fields)


def test_a_stop_sequence_is_part_of_the_text_as_in_transformers(both: tuple[Any, Any]) -> None:
    text = both[0]("Once", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
    fields = {"max_new_tokens": 8, "do_sample": False, "stop_sequence": text[3:5]}
    assert both[0]("Once", **fields) == both[1]("Once", **fields)


def test_sampling_is_the_default_as_in_transformers_and_sequences_differ(both: tuple[Any, Any]) -> None:
    found = both[0]("Once", max_new_tokens=12, num_return_sequences=3)
    assert len({record["generated_text"] for record in found}) > 1


def test_beams_give_their_best_sequences_as_in_transformers(both: tuple[Any, Any]) -> None:
    fields = {"max_new_tokens": 8, "do_sample": False, "num_beams": 4, "num_return_sequences": 3}
    found = both[0]("Once", **fields)
    assert found == both[1]("Once", **fields)
    assert len({record["generated_text"] for record in found}) == 3


def test_an_unknown_setting_is_refused_with_the_closest_name(both: tuple[Any, Any]) -> None:
    with pytest.raises(UsageProblem, match="`max_new_token` is not a generation setting") as caught:
        both[0]("Once", max_new_token=5)
    assert "`max_new_tokens`" in caught.value.hint
    assert both[0]("Once", max_new_tokens=3, do_sample=False, use_cache=True)


@pytest.mark.quick_rows("pair", "config")
@pytest.mark.parametrize("way", ["folder", "pair", "config", "hub name"])
def test_a_model_is_given_in_four_ways(
    talking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: tuple[Any, Any], way: str
) -> None:
    models: dict[str, Any] = {
        "folder": str(talking),
        "pair": (talking / "prefill.onnx", talking / "decode.onnx"),
        "config": ModelFiles(talking, talking / "prefill.onnx", tokenizer=talking),
        "hub name": "someone/tiny",
    }
    put_into_cache(talking, tmp_path / "hub", monkeypatch)
    found = llmconv.pipeline(model=models[way])("Once", max_new_tokens=5, do_sample=False)
    assert found == both[0]("Once", max_new_tokens=5, do_sample=False)


def put_into_cache(folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays a folder out as the hub's cache does: blobs, and a snapshot of links."""
    home = hub / "models--someone--tiny"
    snapshot = home / "snapshots" / ("a" * 40)
    for path in (home / "blobs", home / "refs", snapshot):
        path.mkdir(parents=True)
    (home / "refs" / "main").write_text("a" * 40)
    for file in filter(Path.is_file, folder.iterdir()):
        (home / "blobs" / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))


@pytest.mark.parametrize("model", ["nowhere/at-all", "nowhere", ("a.onnx", "b.onnx")])
def test_a_missing_model_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputRefused):
        llmconv.pipeline(model=model)


@pytest.mark.parametrize("inputs", [3, [3], ["a", None]], ids=str)
def test_an_input_that_is_not_a_text_is_a_usage_problem(both: tuple[Any, Any], inputs: Any) -> None:
    with pytest.raises(UsageProblem, match="neither a text nor a chat"):
        both[0](inputs)


def test_another_task_is_a_usage_problem() -> None:
    with pytest.raises(UsageProblem, match="summarization"):
        llmconv.pipeline("summarization", model="x")


@pytest.mark.parametrize("mixed", [False, True])
def test_a_templates_stop_strings_end_a_chat_and_no_text(
    both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False, "template": "own"}
    monkeypatch.setitem(TEMPLATES, "own", Template(TEMPLATE))
    (whole,), (text,) = both[0]([CHAT, "hi"], **fields)
    monkeypatch.setitem(TEMPLATES, "own", Template(TEMPLATE, (whole["generated_text"][3:5],)))
    found = both[0]([CHAT, "hi"] if mixed else [CHAT], **fields)
    assert found[0] == [{"generated_text": whole["generated_text"][:3]}] and found[1:] == [[text]] * mixed
    chat = Chat(both[0].model, both[0].model.defaults.but(max_new_tokens=8), template="own")
    assert "".join(piece.text for piece in chat.ask("hi")) == whole["generated_text"][:3]
