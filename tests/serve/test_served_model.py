"""Answers in turns equal answers alone, for every kind of cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import InputRefused
from llmconv.export.exporter import export
from llmconv.generation import TextModel
from llmconv.serve.openai_schema import chat_request, completion_request
from llmconv.serve.served_model import ServedModel
from tests.builders.chatting import CONTEXT

PROMPTS = ("Once there was a clever", "The old dragon", "A")


def texts(served: ServedModel, in_turns: bool) -> list[str]:
    """The answers to three prompts, a step each in turn or one after another."""
    requests = [{"prompt": text, "max_tokens": 16, "temperature": 1, "seed": at} for at, text in enumerate(PROMPTS)]
    answers = [served.steps(served.choices(completion_request(request))) for request in requests]
    found = [""] * len(answers)
    waiting = list(range(len(answers)))
    while waiting:
        at = waiting.pop(0)
        if (deltas := next(answers[at], None)) is not None:
            found[at] += "".join(delta.text for delta in deltas)
            waiting.insert(len(waiting) if in_turns else 0, at)
    return found


def graphs(chatting: Path, tmp_path: Path, kind: str) -> TextModel:
    """The tiny model with caches of a kind."""
    if kind in ("onnx", "torch"):
        return TextModel.open(chatting, backend=kind)
    if kind == "static":
        export(chatting, tmp_path / "out", shapes="static", batch_size=1, max_seq_len=64)
    else:
        export(chatting, tmp_path / "out", cache="shared-buffer")
    return TextModel.open(tmp_path / "out")


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch", "static", "shared-buffer"])
def test_answers_in_turns_equal_answers_alone(chatting: Path, tmp_path: Path, kind: str) -> None:
    model = graphs(chatting, tmp_path, kind)
    alone = texts(ServedModel(model, "tiny"), in_turns=False)
    assert texts(ServedModel(model, "tiny"), in_turns=True) == alone
    again = ServedModel(model, "tiny")
    assert texts(again, in_turns=True) == texts(again, in_turns=True) == alone  # with the caches of the first round
    assert len(set(alone)) == 3


@pytest.mark.slow
def test_a_long_prompt_does_not_block_other_answers(chatting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = ServedModel(TextModel.open(chatting), "tiny")
    choices = served.choices(completion_request({"prompt": "Once there was a clever dragon", "max_tokens": 2}))
    whole = list(served.steps(choices))
    monkeypatch.setattr("llmconv.serve.served_model.PROMPT_STEP", 2)
    monkeypatch.setattr("llmconv.serve.served_model.PROMPT_STEPS", (2,))
    found = list(ServedModel(served.model, "tiny").steps(choices))
    turns = (len(choices[0].ids) - 1) // 2
    assert turns > 1 and [(delta.tokens, delta.text) for (delta,) in found[:turns]] == [(0, "")] * turns
    assert found[turns:] == whole


class CountedPlaces:
    """`most` places for further answers, and the largest number that was taken at a time."""

    def __init__(self, most: int) -> None:
        self.free, self.most, self.largest = most, most, 0

    def take(self) -> bool:
        self.free -= (is_free := self.free > 0)
        self.largest = max(self.largest, self.most - self.free)
        return is_free

    def give(self) -> None:
        self.free += 1


@pytest.mark.parametrize("places", [0, 2, 9])
def test_answers_of_a_request_share_steps_and_are_those_of_one_by_one(model: TextModel, places: int) -> None:
    fields: dict[str, Any] = {"prompt": ["Once there was", "The"], "max_tokens": 12, "temperature": 1}
    served, counted = ServedModel(model, "tiny"), CountedPlaces(places)
    found = dict.fromkeys(range(6), "")
    cached = [0] * 6
    at_once = 0
    for deltas in served.steps(served.choices(completion_request({**fields, "n": 3, "seed": 5})), counted):
        at_once = max(at_once, len({delta.choice for delta in deltas}))
        for delta in deltas:
            found[delta.choice] += delta.text
            cached[delta.choice] += delta.cached
    alone = []
    for prompt in fields["prompt"]:
        for seed in (5, 6, 7):
            one = served.choices(completion_request({**fields, "prompt": prompt, "seed": seed}))
            alone.append("".join(delta.text for deltas in served.steps(one) for delta in deltas))
    assert list(found.values()) == alone and not any(cached)
    assert (counted.free, counted.largest, at_once) == (places, min(places, 5), min(places, 5) + 1)


def test_a_request_that_ends_early_gives_its_places_back(model: TextModel) -> None:
    served, counted = ServedModel(model, "tiny"), CountedPlaces(4)
    steps = served.steps(served.choices(completion_request({"prompt": "Once", "max_tokens": 9, "n": 4})), counted)
    while counted.free > 1:  # an answer begins after the prompt of the one before it
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert counted.free == 4


SAMPLING = {"do_sample": True, "temperature": 0.3, "top_p": 0.8, "top_k": 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "limit", "expected"),
    [
        ({}, None, {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "max_tokens": CONTEXT}),
        ({**SAMPLING, "max_new_tokens": 9}, None, {**SAMPLING, "max_tokens": 9}),
        (SAMPLING, 11, {**SAMPLING, "max_tokens": 11}),
        ({**SAMPLING, "do_sample": False}, 5, {**SAMPLING, "do_sample": False, "max_tokens": 5}),
    ],
)
def test_the_defaults_are_those_that_a_chat_without_options_is_answered_with(
    config: dict[str, Any], limit: int | None, expected: dict[str, Any], chatting: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(chatting, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps(config))
    served = ServedModel(TextModel.open(folder), "tiny", max_new_tokens=limit)
    assert served.defaults == expected
    (choice,) = served.choices(chat_request({"messages": [{"role": "user", "content": "a"}]}))
    used = {name: getattr(choice.settings, name) for name in SAMPLING}
    assert used == {name: expected[name] for name in SAMPLING}
    assert choice.settings.max_new_tokens == min(expected["max_tokens"], CONTEXT - len(choice.ids))


def test_a_given_template_that_is_no_jinja_is_refused_at_the_start(model: TextModel, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("a\n{% if %}")
    with pytest.raises(InputRefused, match="is not valid Jinja: line 2"):
        ServedModel(model, "tiny", template=str(tmp_path / "broken.jinja"))


def test_a_template_that_wants_other_messages_serves(model: TextModel, tmp_path: Path) -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    (tmp_path / "strict.jinja").write_text(strict)
    served = ServedModel(model, "tiny", template=str(tmp_path / "strict.jinja"))
    assert served.choices(chat_request({"messages": [{"role": "system", "content": "a"}]}))


def test_a_tokenizer_whose_template_is_no_jinja_still_continues_texts(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(chatting, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("a\n{% if %}")
    served = ServedModel(TextModel.open(folder), "tiny")
    assert "the chat template is not valid Jinja: line 2" in capsys.readouterr().err
    assert served.choices(completion_request({"prompt": "a"}))
