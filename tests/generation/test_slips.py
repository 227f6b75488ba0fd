"""Slips of the pen in Python and on the command line: named, and never completed as something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import llmconv
from llmconv.cli import main
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.generation import GenerationSettings, ModelFiles, Prompt, TextModel, generate
from llmconv.generation.chat_session import Chat
from llmconv.generation.prompts import contents_of, read_prompts, token_lists
from llmconv.runtime import SessionSettings

CHECKPOINT = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(chatting: Path) -> TextModel:
    """An open model."""
    return TextModel.open(str(chatting))


def run(*line: Any, **more: Any) -> Any:
    return CliRunner().invoke(main, ["generate", *(str(word) for word in line)], **more)


def test_a_single_text_is_one_prompt(model: TextModel) -> None:
    found = generate(model, "Once there", max_new_tokens=3)
    assert [one.prompt for one in found.completions] == ["Once there"]
    assert found.completions == generate(model, ["Once there"], max_new_tokens=3).completions


def test_a_single_chat_is_one_prompt(model: TextModel) -> None:
    assert len(generate(model, CHAT, max_new_tokens=1).completions) == 1  # type: ignore[arg-type]


def test_an_iterator_of_prompts_is_accepted() -> None:
    assert contents_of(text for text in ("a", "b")) == ["a", "b"]


@pytest.mark.parametrize(
    "prompts", [b"ab", {"a": 1}, frozenset("a"), Path("a"), None, 3, [1, 2], [[1, 2]], ["a", None], [b"a"], []], ids=str
)
def test_prompts_that_are_neither_texts_nor_chats_are_refused(prompts: Any) -> None:
    with pytest.raises(UsageProblem):
        contents_of(prompts)


@pytest.mark.parametrize(
    "prompts", ["Once", ["Once"], [3, 4], [[0.5]], [[-1]], {"input_ids": [[1]]}, None, b"a"], ids=str
)
def test_prompts_that_are_not_lists_of_tokens_are_refused(model: TextModel, prompts: Any) -> None:
    with pytest.raises(UsageProblem):
        model.stream(prompts)


def test_arrays_of_tokens_are_accepted() -> None:
    assert token_lists(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]


NAMED: dict[str, Callable[[TextModel, dict[str, Any]], Any]] = {
    "generate": lambda model, options: generate(model, "a", **options),
    "but": lambda model, options: model.defaults.but(**options),
    "of": lambda model, options: GenerationSettings.of(str(model.folder), **options),
    "pipeline": lambda model, options: llmconv.pipeline(model=model, **options),
    "a call": lambda model, options: llmconv.pipeline(model=model)("a", **options),
}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"max_new_token": 2}, "`max_new_tokens`"),
        ({"temprature": 2}, "`temperature`"),
        ({"max_tokens": 2}, "`max_new_tokens`"),
        ({"stop": "a"}, "`stop_strings`"),
        ({"device": "cuda"}, "TextModel.open"),
        ({"tokenizer": len}, "TextModel.open"),
        ({"output_scores": True}, "leave it out"),
        ({"image": "a.png"}, "`Prompt(text, images=[PATH])`"),
        ({"adapters": ["a"]}, "`merge_lora`"),
        ({"texts": ["a"]}, "`prompts`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_an_unknown_setting_is_named(
    model: TextModel, call: Callable[[TextModel, dict[str, Any]], Any], options: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        call(model, options)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": "false"},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"max_new_tokens": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_k": [1]},
        {"stop_strings": [b"a"]},
        {"eos_token_id": [0.5]},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_a_value_of_the_wrong_type_is_named(
    model: TextModel, call: Callable[[TextModel, dict[str, Any]], Any], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageProblem):
        call(model, options)


@pytest.mark.parametrize(("name", "hint"), [("prompt", "`prompts`"), ("messages", "`prompts`"), ("stop", "stop_s")])
def test_a_slip_is_named_before_the_prompts_that_are_missing(model: TextModel, name: str, hint: str) -> None:
    with pytest.raises(UsageProblem, match=f"`{name}` is not a generation setting") as caught:
        generate(model, **{name: "a"})  # type: ignore[arg-type]
    assert hint in caught.value.hint


@pytest.mark.parametrize("images", ["a.png", Path("a.png"), b"bytes", 5])
def test_a_single_image_of_a_prompt_is_one_image(images: Any) -> None:
    assert Prompt("a", images=images).images == (images,)
    assert Prompt("a", images=[images, "b.png"]).images == (images, "b.png")  # type: ignore[arg-type]


def test_a_prompt_without_images_may_say_none() -> None:
    assert Prompt("a", images=None).images == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("fields", "x"), ("placeholder", 3)])
def test_values_of_a_prompt_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageProblem, match=f"`{name}` of a prompt is a"):
        Prompt("a", **{name: value})


def test_a_stop_string_is_not_a_list_of_letters() -> None:
    assert GenerationSettings(stop_strings="END").stop_strings == ("END",)  # type: ignore[arg-type]
    assert GenerationSettings(eos_token_id=2).eos_token_id == {2}  # type: ignore[arg-type]


def test_several_sequences_are_no_setting_of_one_text(model: TextModel) -> None:
    with pytest.raises(UsageProblem, match="`num_return_sequences` is not a field") as caught:
        model.defaults.but(num_return_sequences=2)
    assert "pipeline" in caught.value.hint


def test_fields_of_a_file_without_effect_are_ignored(tmp_path: Path) -> None:
    content = {"output_scores": True, "_from_model_config": True, "max_new_tokens": 5.0, "anything": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert GenerationSettings.of(tmp_path).max_new_tokens == 5


@pytest.mark.parametrize("settings", [{"max_new_tokens": 2}, "greedy", 3])
def test_settings_must_be_generation_settings(model: TextModel, settings: Any) -> None:
    with pytest.raises(UsageProblem, match="not a `GenerationSettings`"):
        model.stream([[1]], settings)


@pytest.mark.slow
def test_a_system_message_turns_a_text_into_a_chat(model: TextModel) -> None:
    plain, briefed = (generate(model, "a", max_new_tokens=1, system=text) for text in ("", "Be brief"))
    assert briefed.completions[0].prompt_tokens > plain.completions[0].prompt_tokens + len("Be brief")


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.encode(["a"]),
        lambda model: Chat("folder"),  # type: ignore[arg-type]
        lambda model: Chat(model, {"seed": 1}),  # type: ignore[arg-type]
        lambda model: next(iter(Chat(model).ask(["a"]))),  # type: ignore[arg-type]
        lambda model: generate(model, "a", system=["b"]),
        lambda model: generate(model, "a", session={"threads": 1}),
        lambda model: generate(model, "a", batch_size=0),
        lambda model: generate(model, "a", trust_remote_code="no"),
        lambda model: ModelFiles(3),  # type: ignore[arg-type]
        lambda model: llmconv.pipeline(model=model)({"role": "user", "content": "a"}),
        lambda model: llmconv.pipeline(model=model)({"a", "b"}),
        lambda model: llmconv.pipeline(model=model)(b"a"),
        lambda model: llmconv.pipeline(model=model)("a", num_return_sequences=0),
        lambda model: llmconv.pipeline(model=model)("a", batch_size=0),
        lambda model: llmconv.pipeline(model=model)("a", return_full_text="no"),
        lambda model: llmconv.pipeline(),
    ],
)
def test_other_mistakes_are_named_too(model: TextModel, call: Callable[[TextModel], Any]) -> None:
    with pytest.raises(UsageProblem):
        call(model)


def test_settings_of_onnxruntime_are_not_ignored_by_the_eager_model(chatting: Path) -> None:
    with pytest.raises(UsageProblem, match="`prepack` is a setting of onnxruntime"):
        TextModel.open(chatting, backend="torch", settings=SessionSettings(prepack=True))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--prefix", "x"], "tuned prefix"),
        (["--stream", "--json"], "both write to stdout"),
        (["--overwrite"], "`--overwrite` needs `--output-file`"),
        (["--max-length", "9", "--max-new-tokens", "3"], "both set the length"),
        (["--backend", "torch", "--provider", "cuda"], "`--provider` is for onnxruntime"),
        (["--backend", "torch", "--prepack"], "`--prepack` is for onnxruntime"),
        (["--backend", "torch", "--session-config", "x.ini"], "`--session-config` is for onnxruntime"),
        ([str(CHECKPOINT)], "is the name of a file"),
        (["prompts.txt"], "is the name of a file, which does not exist"),
        (["--prompt-prefix", str(CHECKPOINT)], "is a file"),
    ],
    ids=str,
)
def test_options_without_effect_or_with_a_double_meaning_are_refused(options: list[str], problem: str) -> None:
    result = run("missing", "a", *options)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_a_text_before_every_prompt_has_its_own_option(chatting: Path) -> None:
    result = run(chatting, "--prompt", "b", "--prompt-prefix", "a", "--max-new-tokens", "1", "--json")
    assert json.loads(result.stdout)["completions"][0]["prompt_tokens"] == 2


@pytest.mark.parametrize("call", [lambda path: generate(path, "a"), lambda path: TextModel.open(path)])
def test_a_training_checkpoint_must_be_converted_first(call: Callable[[Path], Any]) -> None:
    with pytest.raises(InputRefused, match="is a torch file, not a Hugging Face model folder") as caught:
        call(CHECKPOINT)
    assert "llmconv to-hf" in caught.value.hint


def test_the_hint_for_a_weights_file_is_its_folder(chatting: Path) -> None:
    with pytest.raises(InputRefused) as caught:
        generate(chatting / "model.safetensors", "a")
    assert f"`{chatting}`" in caught.value.hint


DOCUMENTS: dict[str, tuple[str, list[Any]]] = {
    "texts": ('["ab", "cd"]', ["ab", "cd"]),
    "over several lines": ('[\n  "ab",\n  {"prompt": "cd", "id": 7}\n]\n', ["ab", "cd"]),
    "chats": (json.dumps([{"messages": CHAT}, CHAT, "a"]), [CHAT, CHAT, "a"]),
    "one chat": (json.dumps(CHAT), [CHAT]),
    "chats in lines": (f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}\n", [CHAT, CHAT]),
    "an object over several lines": ('{\n"prompt": "ab"\n}', ["ab"]),
    "an object before other space": ('{\n"prompt": "ab"\n}\u00a0\n\f', ["ab"]),
    "lines of objects": ('{"prompt": "a"}\n{"prompt": "b"}\n', ["a", "b"]),
    "text that begins with a bracket": ("[INST] hello\nsecond\n", ["[INST] hello", "second"]),
    "text that begins with a brace": ("{x} is a set\n", ["{x} is a set"]),
}


@pytest.mark.parametrize("name", ["p.txt", "p.json"])
@pytest.mark.parametrize(("text", "found"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_file_of_prompts_is_lines_or_json(tmp_path: Path, name: str, text: str, found: list[Any]) -> None:
    (tmp_path / name).write_text(text)
    if name == "p.json" and not text.startswith(("[{", '["', "[[", "[\n", "{\n", '{"')):
        with pytest.raises(MalformedInput):
            read_prompts(tmp_path / name)
        return
    assert [prompt.content for prompt in read_prompts(str(tmp_path / name))] == found


def test_other_fields_of_a_prompt_in_an_array_are_kept(tmp_path: Path) -> None:
    (tmp_path / "p").write_text('[{"prompt": "a", "id": 7}]')
    assert read_prompts(tmp_path / "p")[0].fields == {"id": 7}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{\n"a": 1\n}',
        "[1, 2]",
        "[]",
        "[[1]]",
        '[\n"a",',
        "[{\n",
        '["a"]\n[1]',
        '{"prompt": "a"}\n3',
        "[null]",
    ],
)
def test_other_json_is_not_continued_as_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(InputRefused):
        read_prompts(tmp_path / "p")


DUPLICATE = "duplicate key `{}`"
NOT_FINITE = "the number `{}` is not finite"
HAND_WRITTEN: dict[str, tuple[str, str]] = {
    "a key twice": ('{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}', f"line 2 .*{DUPLICATE.format('prompt')}"),
    "a key twice, escaped": ('{"prompt": "a", "pr\\u006fmpt": "a"}', f"line 1 .*{DUPLICATE.format('prompt')}"),
    "a key twice inside": ('\n{"prompt": "a", "tag": [{"x": 1, "x": 1}]}', f"line 2 .*{DUPLICATE.format('x')}"),
    "a key twice in an array": ('[\n"a",\n{"prompt": "b",\n"id": 1, "id": 2}]', f"line 3 .*{DUPLICATE.format('id')}"),
    "a key twice in an object": ('\n{\n"prompt": "a",\n"id": 1, "id": 2}', f"line 2 .*{DUPLICATE.format('id')}"),
    "a large number": ('{"prompt": "a"}\n\n{"prompt": "b", "id": 1e400}', f"line 3 .*{NOT_FINITE.format('1e400')}"),
    "minus infinity": ('{"prompt": "a", "id": -Infinity}', f"line 1 .*{NOT_FINITE.format('-Infinity')}"),
    "NaN inside": ('{"prompt": "a", "tag": {"x": [NaN]}}', f"line 1 .*{NOT_FINITE.format('NaN')}"),
    "a large number in an array": ('["a",\n{"prompt": "b", "id": -1e999}]', f"line 2 .*{NOT_FINITE.format('-1e999')}"),
}


@pytest.mark.parametrize("name", ["p.txt", "p.json", "p.jsonl"])
@pytest.mark.parametrize(("text", "problem"), HAND_WRITTEN.values(), ids=HAND_WRITTEN)
def test_mistakes_in_json_are_refused_with_their_line(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(MalformedInput, match=problem) as caught:
        read_prompts(tmp_path / name)
    assert caught.value.hint.startswith(("remove one", "write a float64 number"))


NULL = '{"role": "user", "content": null}'
NULLS = {
    "messages in a line": ('{"prompt": "a"}\n{"messages": [' + NULL + "]}", "line 2 of the prompts"),
    "a chat in a line": (f'{{"prompt": "a"}}\n[{NULL}]', "line 2 of the prompts"),
    "one chat": (f"[{NULL}]", "the prompts"),
    "a chat in an array": (f'["a", [{NULL}]]', "item 2 of the prompts"),
}


@pytest.mark.parametrize(("text", "where"), NULLS.values(), ids=NULLS)
def test_a_null_content_is_refused_with_its_position(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputRefused, match=f"`content` of message 1 in {where} is null, but must be a text"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("prefix", ["", "Say: "])
def test_a_content_of_none_never_becomes_text(model: TextModel, prefix: str) -> None:
    chat: Any = [{"role": "user", "content": None}]
    with pytest.raises(InputRefused, match="`content` of message 1 in the chat is null"):
        generate(model, [chat], prompt_prefix=prefix)


def test_the_largest_numbers_and_equal_keys_of_different_objects_are_kept(tmp_path: Path) -> None:
    fields = {"id": 1.7976931348623157e308, "big": 10**400, "tags": [{"id": 1}, {"id": 2}]}
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", **fields}))
    assert read_prompts(tmp_path / "p.jsonl")[0].fields == fields


def test_results_are_one_short_line(model: TextModel) -> None:
    made = generate(model, ["Once " * 200, "b"], max_new_tokens=40)
    for result in (model, made, made.completions[0], llmconv.pipeline(model=model)):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 300
