"""chat: turns share a cache; input from a terminal or a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmconv.cli import main
from llmconv.cli.chat import visible
from llmconv.errors import InputRefused
from llmconv.generation import GenerationSettings, TextModel, generate
from llmconv.generation.chat_session import Chat, answer_settings, continued
from llmconv.runtime.runner import Step
from tests.builders.chatting import CONTEXT

ROOT = Path(__file__).parents[2]


class Counting:
    """A runner that records the number of tokens of every prefill."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.prefills = runner, list[int]()

    def prefill(self, input_ids: Any, *others: Any, last_only: bool = False) -> Step:
        """See `Runner`."""
        self.prefills.append(input_ids.shape[1])
        step: Step = self._runner.prefill(input_ids, *others)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.fixture
def model(chatting: Path) -> TextModel:
    """The tiny model with a counting runner."""
    opened = TextModel.open(chatting)
    return replace(opened, runner=Counting(opened.runner))


def settings(model: TextModel, **given: Any) -> GenerationSettings:
    """Twelve sampled tokens."""
    return model.defaults.but(**{"max_new_tokens": 12, "temperature": 1.0, "do_sample": True, "seed": 3, **given})


def answer(chat: Chat, text: str) -> str:
    """One answer."""
    return "".join(piece.text for piece in chat.ask(text))


def afresh(model: TextModel, messages: Sequence[Mapping[str, str]], wanted: GenerationSettings) -> str:
    """The answer without any cache."""
    return "".join(piece.text for piece in model.stream([model.encode_chat(messages)], wanted))


@pytest.mark.slow
def test_a_turn_runs_only_new_tokens_and_gives_the_text_of_a_fresh_run(model: TextModel) -> None:
    chat = Chat(model, settings(model), system="Be brief")
    answer(chat, "Hello")
    second = answer(chat, "And?")
    assert isinstance(model.runner, Counting)
    new = len("[end][user]And?[end][assistant]")
    assert model.runner.prefills[1] == new + 1  # and the last token of the first answer
    messages = [{"role": "system", "content": "Be brief"}, *chat.messages[:-1]]
    assert second == afresh(model, messages, settings(model)) == chat.messages[-1]["content"]


def test_a_stopped_answer_keeps_its_text_so_far(model: TextModel) -> None:
    chat = Chat(model, settings(model))
    pieces = chat.ask("Hello")
    begun = "".join(next(pieces).text for _ in range(4))
    pieces.close()  # type: ignore[attr-defined]
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    second = answer(chat, "And?")
    assert isinstance(model.runner, Counting)
    assert model.runner.prefills[1] < len("[user]Hello[end]") + len("[end][user]And?[end][assistant]")
    assert second == afresh(model, chat.messages[:-1], settings(model))


@pytest.mark.slow
def test_reset_clears_the_chat_and_the_system_message_can_change(model: TextModel) -> None:
    chat = Chat(model, settings(model))
    first = answer(chat, "Hello")
    answer(chat, "And?")
    chat.reset()
    assert chat.messages == []
    assert answer(chat, "Hello") == first
    chat.reset()
    chat.system = "Be brief"
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    assert answer(chat, "Hello") == afresh(model, messages, settings(model)) != first


@pytest.mark.slow
def test_a_message_that_is_too_long_changes_nothing(model: TextModel) -> None:
    chat = Chat(model, settings(model))
    answer(chat, "Hello")
    before = list(chat.messages)
    with pytest.raises(InputRefused, match=f"context is {CONTEXT}"):
        answer(chat, "a" * CONTEXT)
    assert chat.messages == before
    assert answer(chat, "And?") == afresh(model, chat.messages[:-1], settings(model))


def test_an_answer_is_long_unless_something_sets_a_length() -> None:
    assert answer_settings(GenerationSettings(), "tokenizer").max_new_tokens == 2048
    assert answer_settings(GenerationSettings(max_length=9), "tokenizer").max_new_tokens is None
    given = answer_settings(GenerationSettings(), "v1_2", max_new_tokens=5, stop_strings=["x"])
    assert (given.max_new_tokens, given.stop_strings) == (5, ("x", "\n###"))


def test_an_answer_with_other_tokens_than_the_tokenizers_is_continued_as_it_ran() -> None:
    words = {1: "a", 2: "b", 3: "ab", 4: "<end>", 5: "c"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens)

    assert continued([5, 1, 2], [5, 3, 4, 5], decode) == [5, 1, 2, 4, 5]
    assert continued([5, 3], [5, 1, 2, 4], decode) == [5, 3, 4]
    assert continued([5, 1], [5, 2, 4, 5], decode) == [5, 2, 4, 5]  # another text
    assert continued([], [5], decode) == [5]


@pytest.mark.parametrize("dangerous", ["\x1b[2J", "\x07", "\x9b31m", "\r"])
def test_control_characters_of_a_model_do_not_reach_the_terminal(dangerous: str) -> None:
    assert visible(f"a{dangerous}b\n\tc") == f"a\N{REPLACEMENT CHARACTER}{dangerous[1:]}b\n\tc"


def run(folder: Path, lines: str, *options: str) -> Result:
    """`llmconv chat` with lines in a pipe."""
    return CliRunner().invoke(main, ["chat", str(folder), "--max-new-tokens", "8", *options], input=lines)


def test_every_line_of_a_pipe_is_a_message(chatting: Path) -> None:
    found = run(chatting, "Hello\n\nAnd?\n/reset\nHello\n/quit\nnever\n")
    assert found.exit_code == 0, found.output
    answers = found.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "the chat is cleared" in found.stderr


@pytest.mark.slow
def test_answers_can_be_json_lines(chatting: Path) -> None:
    found = run(chatting, "Hello\nAnd?\n", "--json")
    assert [set(json.loads(line)) for line in found.stdout.splitlines()] == [{"text", "tokens", "finish"}] * 2
    assert json.loads(found.stdout.splitlines()[0]) == {"text": "oooooooo", "tokens": 8, "finish": "length"}


@pytest.mark.slow
def test_the_system_message_of_the_option_is_that_of_the_command(chatting: Path) -> None:
    by_option = run(chatting, "Hello\n", "--system", "Be brief", "--temperature", "1", "--seed", "5").stdout
    by_command = run(chatting, "/system Be brief\nHello\n", "--temperature", "1", "--seed", "5").stdout
    without = run(chatting, "Hello\n", "--temperature", "1", "--seed", "5").stdout
    assert by_option == by_command != without


def test_a_message_that_fails_ends_a_pipe(chatting: Path) -> None:
    found = run(chatting, "a" * (CONTEXT + 88) + "\nHello\n")
    assert (found.exit_code, found.stdout) == (3, "")
    assert "error: the prompt has" in found.stderr


def test_an_unknown_template_is_reported_before_the_first_message(chatting: Path) -> None:
    assert run(chatting, "Hello\n", "--template", "nobody's").exit_code == 2


def test_a_model_without_a_template_is_reported_before_the_first_message(talking: Path) -> None:
    with pytest.raises(InputRefused, match="the tokenizer has no chat template"):
        Chat(TextModel.open(talking))


def test_a_misspelled_command_is_not_sent_as_a_message(chatting: Path) -> None:
    found = run(chatting, "/rest\n/2 is half of 4\n", "--max-new-tokens", "3")
    assert "unknown command /rest" in found.stderr
    assert len(found.stdout.splitlines()) == 1


Typing = Callable[[str], None]
Reading = Callable[..., None]


@contextmanager
def terminal(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Typing, Reading]]:
    """`llmconv chat` on a terminal: the process, a function that types, and one that reads up to a text."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llmconv", "chat", str(folder), *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(  # in the background a shell ignores SIGINT
        command,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)

    def type_in(text: str) -> None:
        os.write(ours, text.encode())

    waiting = [""]
    shown = select.poll()
    shown.register(ours, select.POLLIN)

    def read_until(text: str, again: Callable[[], object] = lambda: None) -> None:
        end = time.monotonic() + 120
        asked = time.monotonic()
        while text not in waiting[0]:
            assert time.monotonic() < end, waiting[0]
            if time.monotonic() > asked + 5:
                again()
                asked = time.monotonic()
            if shown.poll(200):
                waiting[0] += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(ours, 65536).decode(errors="replace"))
        waiting[0] = waiting[0].partition(text)[2]

    try:
        yield process, type_in, read_until
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(chatting: Path) -> None:
    with terminal(chatting) as (process, type_in, read_until):
        read_until("> ")
        type_in("Hello\r")
        read_until("oooo")
        process.send_signal(signal.SIGINT)
        read_until("stopped")
        read_until("> ")
        type_in("/system Be brief\r")
        read_until("the system message is set")
        read_until("> ")
        # a signal between Python's last look and its wait for a key shows with the key: press again, as a person does
        process.send_signal(signal.SIGINT)
        read_until("Ctrl-D or /quit exits", lambda: process.send_signal(signal.SIGINT))
        read_until("> ")
        for _ in range(24):  # the terminal loses a Ctrl-D that comes before it waits for a key
            type_in("\x04")  # a second one alone would be ignored: readline wants another key between them
            type_in("x\x7f\x04")
            with suppress(subprocess.TimeoutExpired):
                assert process.wait(5) == 0
                break
        assert process.poll() == 0


@pytest.mark.slow
def test_on_a_terminal_an_error_does_not_end_the_chat(chatting: Path) -> None:
    with terminal(chatting, "--max-new-tokens", "5") as (process, type_in, read_until):
        read_until("> ")
        type_in("a" * (CONTEXT + 88) + "\r")
        read_until("hint: ")
        read_until("> ")
        type_in("Hello\r")
        read_until("5 tokens")
        type_in("/quit\r")
        assert process.wait(60) == 0


def test_a_chat_also_ends_at_the_tokenizers_own_end_token(chatting: Path) -> None:
    """mlx-vlm 2112: a chat model may keep the `generation_config.json` of its base, which names another end."""
    opened = TextModel.open(chatting)
    opened.tokenizer.eos_token = "~"
    own = opened.tokenizer.eos_token_id
    base = replace(opened, defaults=opened.defaults.but(eos_token_id=frozenset({0})))
    assert own not in {None, 0, opened.tokenizer.unk_token_id}
    assert base.chat_ends == {0, own} and base.defaults.eos_token_id == {0}  # a text ends as in transformers
    assert Chat(base)._settings.eos_token_id == {0, own}


def test_a_chat_ends_at_the_added_token_that_its_template_writes_after_an_answer(chatting: Path) -> None:
    """A base that was trained on ChatML, and kept its end token in the configuration and the tokenizer."""
    opened = TextModel.open(chatting)
    tokenizer = opened.tokenizer
    tokenizer.eos_token = "~"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    usual, own = {*opened.defaults.eos_token_id, tokenizer.eos_token_id}, tokenizer.convert_tokens_to_ids("<|im_end|>")
    for after, ends in {"<|im_end|>#": usual | {own}, "<|im_end|>~": usual, "#<|im_end|>": usual}.items():
        tokenizer.chat_template = (
            "{% for one in messages %}" + f"{{{{ one.role + one.content + '{after}' }}}}{{% endfor %}}"
        )
        assert replace(opened).chat_ends == ends
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert replace(opened).chat_ends == usual


def test_a_token_that_the_model_does_not_know_is_refused(chatting: Path) -> None:
    """A tokenizer that was extended without the model's embeddings: "index out of range in self"."""
    opened = TextModel.open(chatting)
    opened.tokenizer.add_tokens([f"<new{at}>" for at in range(600)])
    for encode in (opened.encode, lambda text: opened.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(InputRefused, match="`<new599>` of id .* and the model knows .* tokens"):
            encode("a <new599> b")


def test_ends_that_a_call_gives_replace_those_of_a_chat(chatting: Path) -> None:
    model, chat = TextModel.open(chatting), [{"role": "user", "content": "hello"}]
    [usual] = generate(model, [chat], max_new_tokens=4, do_sample=False).completions
    [found] = generate(model, [chat], max_new_tokens=4, do_sample=False, eos_token_id=usual.tokens[0]).completions
    assert (found.tokens, found.finish) == ([], "eos")


def test_a_chat_among_texts_ends_as_it_does_alone(chatting: Path) -> None:
    model, chat = TextModel.open(chatting), [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    [text] = generate(model, "abc", **options).completions
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(text.tokens[0])  # ends chats alone
    found = generate(model, ["abc", chat, "abc"], **options).completions
    [alone] = generate(model, [chat], **options).completions
    assert [one.tokens for one in found] == [text.tokens, alone.tokens, text.tokens]
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(alone.tokens[0])
    found = generate(model, ["abc", chat], **options).completions
    assert [(one.tokens, one.finish) for one in found] == [(text.tokens, "length"), ([], "eos")]
