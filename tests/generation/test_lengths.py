"""Prompts that are cut, and prompts that are too long among others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import processors
from transformers import AutoTokenizer

import llmconv
from llmconv.cli import main
from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation import Prompt, TextModel, generate
from llmconv.generation.generate import Wording, encode_all
from llmconv.progress import warnings_to
from llmconv.runtime.tokenizer import UNKNOWN
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import chat_request, completion_request
from llmconv.serve.served_model import ServedModel


def run(*arguments: object) -> Result:
    """`llmconv generate`."""
    return CliRunner().invoke(main, ["generate", *map(str, arguments)])


@pytest.fixture(scope="module")
def starting(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The talking Llama, with a tokenizer that adds the start token `~` and the end token `}`."""
    folder = Path(shutil.copytree(talking, tmp_path_factory.mktemp("starting") / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [(letter, tokenizer.convert_tokens_to_ids(letter)) for letter in "~}"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="~ $A }", special_tokens=ids)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.quick_rows("4", "9")
@pytest.mark.parametrize("length", [3, 4, 9, 50])
def test_a_prompt_is_cut_as_transformers_truncates_on_the_left(starting: Path, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(starting, truncation_side="left")
    expected = tokenizer("hello there", truncation=True, max_length=length)["input_ids"]
    model = TextModel.open(starting)
    made = generate(model, ["hello there"], src_length=length, max_new_tokens=3).completions[0]
    pieces = list(model.stream([expected], model.defaults.but(max_new_tokens=3)))
    assert made.tokens == [piece.token for piece in pieces]
    assert (made.prompt_tokens, made.cut_tokens) == (len(expected), 13 - len(expected))


def test_a_length_without_room_for_text_is_refused(starting: Path) -> None:
    with pytest.raises(UsageProblem, match="begins with 1 special"):
        generate(starting, ["hello"], src_length=1)


@pytest.mark.slow
def test_special_tokens_are_left_out_on_request(starting: Path, talking: Path) -> None:
    plain, bare = generate(talking, ["hello"]), generate(starting, ["hello"], add_special_tokens=False)
    assert bare.completions == plain.completions != generate(starting, ["hello"]).completions
    shown = run(starting, "hello", "--no-add-special-tokens")
    assert shown.stdout == plain.completions[0].text + "\n"


@pytest.fixture(scope="module")
def begun(starting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with `~` as its `bos_token`, and a chat template that writes it."""
    folder = Path(shutil.copytree(starting, tmp_path_factory.mktemp("begun") / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "~"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        (["hello"], {}, ""),
        (["~hello", "a"], {}, "1 of 2 prompts begin with `~` twice"),
        (["~hello"], {"add_special_tokens": False}, ""),
        (["hello"], {"chat": True}, ""),
        (["~hello"], {"chat": True}, "its template writes one too many"),
        (["~hello"], {"src_length": 4}, "begin with `~` twice"),
    ],
)
def test_two_start_tokens_stay_and_are_a_warning(
    begun: Path, prompts: list[str], options: dict[str, object], said: str
) -> None:
    warnings = list[str]()
    model = TextModel.open(begun)
    with warnings_to(warnings.append):
        found = encode_all(model, [Prompt(one) for one in prompts], Wording(**options), model.defaults)  # type: ignore[arg-type]
    assert [said in one for one in warnings] == [True] * bool(said)
    tokenizer = AutoTokenizer.from_pretrained(begun)
    if not options:  # as transformers
        assert found[0].tokens == tokenizer(prompts[0])["input_ids"]
    if options.get("chat"):
        chat = [{"role": "user", "content": prompts[0]}]
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert found[0].tokens == expected


def test_a_server_and_a_pipeline_say_it_too(begun: Path) -> None:
    model, warnings = TextModel.open(begun), list[str]()
    served = ServedModel(model, "tiny")
    with warnings_to(warnings.append):
        found = [served._encode(text, True).ids for text in ("a", "~a", "~b")]
        assert len(warnings) == 1 and "begins with `~` twice" in warnings[0]
        llmconv.pipeline("text-generation", model=model)("~a", max_new_tokens=1)
    assert len(warnings) == 2 and [len(ids) for ids in found] == [3, 4, 4]


@pytest.mark.parametrize("adds", [True, False])
def test_a_completion_takes_no_special_tokens_where_the_client_wants_none(begun: Path, adds: bool) -> None:
    served = ServedModel(TextModel.open(begun), "tiny")
    (choice,) = served.choices(completion_request({"prompt": "ab", "add_special_tokens": adds}))
    assert [*choice.ids] == AutoTokenizer.from_pretrained(begun)("ab", add_special_tokens=adds)["input_ids"]
    with pytest.raises(ApiError, match="add_special_tokens"):
        chat_request({"messages": [{"role": "user", "content": "ab"}], "add_special_tokens": True})


def test_cut_prompts_are_counted(talking: Path) -> None:
    result = run(talking, "hello", "a", "--src-length", 3, "--max-new-tokens", 2)
    assert result.exit_code == 0 and "1 of 2 prompts cut to their last 3 tokens" in result.stderr


@pytest.mark.slow
def test_a_prompt_that_is_too_long_does_not_stop_the_others(talking: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    call = (talking, "a", "much too long", "b", "--max-length", 6, "--output-file", out)
    result = run(*call)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.exit_code == 3 and "1 prompt was too long" in result.stderr
    assert "prompt 2 has 13 tokens, but max_length is 6" in result.stderr
    assert [line["finish"] for line in lines] == ["length", "too_long", "length"]
    assert lines[1]["text"] == "" and lines[0]["text"] == generate(talking, "a", max_length=6).completions[0].text
    assert run(*call).exit_code == 3 and [json.loads(line) for line in out.read_text().splitlines()] == lines


def test_if_all_prompts_are_too_long_nothing_runs(talking: Path) -> None:
    with pytest.raises(InputRefused, match="prompt 1 has 8 tokens, but max_length is 4"):
        generate(talking, ["too long", "this, too"], max_length=4)


@pytest.mark.quick_rows("way1")
@pytest.mark.parametrize("way", [(), ("--stream",)])
def test_a_text_left_out_is_empty_on_stdout(talking: Path, way: tuple[str, ...]) -> None:
    result = run(talking, "much too long", "b", "--max-length", 5, "--null", *way)
    assert result.stdout.split("\0") == ["", generate(talking, "b", max_length=5).completions[0].text, ""]


@pytest.mark.parametrize("cut", [None, 4])
def test_a_prompt_that_is_far_too_long_is_left_out_like_any_other(talking: Path, cut: int | None) -> None:
    model = TextModel.open(talking, backend="torch")
    found = generate(model, ["a", "b" * 200_000, "c"], max_new_tokens=3, src_length=cut).completions
    assert [one.finish == "too_long" for one in found] == [False, True, False]
    with pytest.raises(InputRefused, match="more than 256 tokens"):
        generate(model, ["b" * 200_000], max_new_tokens=3)


def test_a_model_without_a_context_has_a_limit_of_its_own(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert UNKNOWN >= 1_000_000
    monkeypatch.setattr("llmconv.generation.model.UNKNOWN", 1000)
    model = replace(TextModel.open(talking, backend="torch"), context_length=None)
    with pytest.raises(InputRefused, match="more than 2000 tokens"):
        generate(model, ["b" * 200_000], max_new_tokens=3)
