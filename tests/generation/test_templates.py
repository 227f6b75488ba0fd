"""Chats: the tokenizer's own template as transformers renders it, and the named ones letter by letter."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.prompts import with_prefix
from llmconv.runtime.chat_templates import encode_chat, render_chat
from llmconv.runtime.tokenizer import TooManyTokens
from tests.builders.talking import save_letters

HI = [{"role": "user", "content": "Hi"}]
TURNS = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
TASK = "Below is an instruction that describes a task"
POLITE = "The assistant gives helpful, detailed, and polite answers to the"
HUMAN = f"A chat between a curious human and an artificial intelligence assistant. {POLITE} human's questions."
USER = f"A chat between a curious user and an artificial intelligence assistant. {POLITE} user's questions."

EXPECTED = {
    "alpaca": f"{TASK}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nHi\n\n### Response:Hello\n\n### Instruction:\nBye\n\n### Response:",
    "v1_2": f"{HUMAN}\n\n### Human: Hi\n### Assistant: Hello\n### Human: Bye\n### Assistant:",
    "vicuna": f"{USER}  USER: Hi  ASSISTANT: Hello</s> USER: Bye  ASSISTANT:",
}
OWN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    """One token per character; `~` starts a text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_letters(tmp_path))
    tokenizer.bos_token = "~"
    return tokenizer


def test_a_template_is_rendered_where_a_thousand_files_are_open(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = OWN
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4096)), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert render_chat(tokenizer, HI) == "~[user]Hi"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_named_template_gives_the_exact_text(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    assert render_chat(tokenizer, TURNS, name) == EXPECTED[name]


def test_alpaca_has_an_input(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render_chat(tokenizer, [{**HI[0], "input": "there"}], "alpaca")
    assert text.startswith(f"{TASK}, paired with an input that provides further context. Write")
    assert text.endswith("### Instruction:\nHi\n\n### Input:\nthere\n\n### Response:")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_system_message_replaces_the_default(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    text = render_chat(tokenizer, [{"role": "system", "content": "Be brief. "}, *HI], name)
    assert text.startswith("Be brief. ") and "polite" not in text


@pytest.mark.slow_rows("tokenizer")
@pytest.mark.parametrize("name", [*EXPECTED, "tokenizer"])
def test_an_unfinished_answer_is_continued(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    tokenizer.chat_template = OWN
    assert render_chat(tokenizer, [*HI, {"role": "assistant", "content": "Well,"}], name).endswith("Well,")


@pytest.mark.slow
def test_the_own_template_is_encoded_as_by_transformers(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = OWN
    ids = encode_chat(tokenizer, TURNS)
    assert ids == tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(("content", "kind"), [(None, "null"), (7, "an int"), ({"text": "a"}, "a dict")])
@pytest.mark.parametrize("name", ["tokenizer", "alpaca"])
def test_a_content_that_is_not_a_text_is_refused(
    tokenizer: PreTrainedTokenizerFast, name: str, content: object, kind: str
) -> None:
    tokenizer.chat_template = OWN
    with pytest.raises(InputRefused, match=f"the `content` of message 2 in the chat is {kind}, but must be a text"):
        render_chat(tokenizer, [*HI, {"role": "assistant", "content": content}, *HI], name)


def test_null_with_tool_calls_reaches_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}.{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    assert render_chat(tokenizer, [*HI, call, *HI]) == "Hi.clock.Hi."


@pytest.mark.slow
def test_a_file_is_a_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    assert render_chat(tokenizer, HI, str(tmp_path / "own.jinja")) == "Hi!"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ messages.append(1) }}"]
)
def test_a_template_that_fails_or_breaks_out_is_refused(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer.chat_template = text
    with pytest.raises(InputRefused, match="fails on the messages"):
        render_chat(tokenizer, HI)


@pytest.mark.slow
def test_invalid_jinja_is_reported_with_its_line(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("a\n{% if %}")
    with pytest.raises(InputRefused, match="is not valid Jinja: line 2"):
        render_chat(tokenizer, HI, str(tmp_path / "own.jinja"))


@pytest.mark.quick_rows("{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", marks=pytest.mark.slow
        ),
        "{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a' * 10**8 }}",
    ],
)
def test_an_endless_template_is_stopped(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer.chat_template = text
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(InputRefused, match="takes too much time or memory"):
        render_chat(tokenizer, HI)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputRefused, match="no chat template"):
        render_chat(tokenizer, HI)


def test_an_unknown_template_is_a_usage_problem(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageProblem, match="`zephyr`"):
        render_chat(tokenizer, HI, "zephyr")


SMOLVLM = """\
<|im_start|>
{%- for message in messages -%}
  {{- message['role'] | capitalize }}{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}
  {%- for line in message['content'] -%}
    {%- if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}
  {%- endfor -%}
  <end_of_utterance>
{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
"""Reads parts only, as those of Idefics, LLaVA and others."""
LLAMA_VISION = """\
{%- for m in messages -%}
  [{{ m.role }}]
  {%- if m.role == 'system' %}{{ m.content | trim }}
  {%- elif m.content is string %}{{ m.content }}
  {%- else %}{% for c in m.content %}{{ c.text | default('<image>') }}+{% endfor %}
  {%- endif %}
{%- endfor %}"""
"""Reads both forms, but of a system message a text only."""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a part for each content."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("messages", [CHAT[1:2], CHAT, CHAT[:3]])
def test_a_template_that_reads_parts_gets_parts(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> None:
    tokenizer.chat_template = SMOLVLM
    goes_on = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    wanted = tokenizer.apply_chat_template(in_parts(messages), tokenize=False, **options)
    assert all(message["content"] in wanted for message in messages)
    assert render_chat(tokenizer, messages) == render_chat(tokenizer, in_parts(messages)) == wanted


@pytest.mark.slow_rows("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
@pytest.mark.parametrize("name", [*EXPECTED, OWN])
def test_a_template_that_reads_texts_gets_texts(tokenizer: PreTrainedTokenizerFast, name: str, tmp_path: Path) -> None:
    if name == OWN:
        tokenizer.chat_template, name = OWN, "tokenizer"
    assert render_chat(tokenizer, in_parts(CHAT), name) == render_chat(tokenizer, CHAT, name)


@pytest.mark.slow
def test_each_message_gets_a_form_that_the_template_reads_in_its_role(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = LLAMA_VISION
    parts = in_parts(CHAT)
    parts[1]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(tokenizer, parts) == "[system]Be brief.[user]a+b+[assistant]Hello+[user]Bye+"
    parts[1]["content"][0] = {"type": "image"}
    assert render_chat(tokenizer, parts).startswith("[system]Be brief.[user]<image>+b+")


def test_a_prefix_goes_before_the_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = SMOLVLM
    messages = with_prefix(in_parts(CHAT[1:2]), "Please: ")
    assert isinstance(messages, list) and "User: Please: Hi there<" in render_chat(tokenizer, messages)


@pytest.mark.slow
def test_a_template_that_writes_a_long_text_is_refused_before_all_of_it_becomes_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = "{{ 'ab ' * 400000 }}"
    with pytest.raises(TooManyTokens) as caught:
        encode_chat(tokenizer, HI, most=50)
    assert len(caught.value.beginning) < 40_000


@pytest.mark.quick_rows("{% for m in turns %}{{ m.content }}{% endfor %}")
@pytest.mark.parametrize("text", ["", " \n", "{% for m in turns %}{{ m.content }}{% endfor %}"])
def test_a_template_that_writes_nothing_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, text: str
) -> None:
    (tmp_path / "own.jinja").write_text(text)
    with pytest.raises(InputRefused, match="writes nothing of the messages"):
        render_chat(tokenizer, HI, str(tmp_path / "own.jinja"))


R1 = (
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<U>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- for tool in message['tool_calls'] %}"
    "{{ '<C>' + tool['function']['name'] + '|' + tool['function']['arguments'] }}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<A>' + message['content'] }}"
    "{%- endif %}{%- if message['role'] == 'tool' %}{{ '<T>' + message['content'] }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"
)
"""As of DeepSeek-R1: calls are those of a message whose content is none (vllm 13125 has it)."""


@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_asks_for_none_gets_it(tokenizer: PreTrainedTokenizerFast, content: str | None) -> None:
    tokenizer.chat_template = R1
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": {"at": "noon"}}}
    called = {"role": "assistant", "content": content, "tool_calls": [call]}
    answered = {"role": "tool", "content": "12", "tool_call_id": "a"}
    assert render_chat(tokenizer, [*HI, called, answered]) == '<U>Hi<C>clock|{"at": "noon"}<T>12<A>'


@pytest.mark.parametrize("content", ["", "  ", "\n"])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_an_answer_that_is_begun_with_nothing_begins_after_its_whole_heading(
    tokenizer: PreTrainedTokenizerFast, shown: str, content: str
) -> None:
    """vllm 9547: the line breaks of the heading were cut with the content."""
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]\n\n{{ " + shown + " }}<end>\n{% endfor %}"
    begun = [*HI, {"role": "assistant", "content": content}]
    assert render_chat(tokenizer, begun) == "[user]\n\nHi<end>\n[assistant]\n\n"
