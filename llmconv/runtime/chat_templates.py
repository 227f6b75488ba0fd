"""Chat templates: the tokenizer's own, and built-in ones of Alpaca and of LLaMA2-Accessory's conversations.

    alpaca   instruction and response; a message may have an `input` in addition to its `content`
    v1_2     LLaMA2-Accessory's default: `###` before every turn; an answer ends at a line that begins with `###`
    vicuna   its `vicuna_v1_1`, with two spaces before every role, as its models were trained

All are Jinja, which transformers renders in a sandbox: a template comes with a model and is untrusted data. The sandbox
blocks the disk and the network, but neither endless loops nor texts of gigabytes, so a template of a model folder is
rendered in a child process with limited time and memory.

A template reads the content of a message as a text or as a list of parts. Given the other form, it shows nothing or
Python's notation of it, without an error. So a message in each form is rendered once per role and template and looked
for in the result, as llama.cpp does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.runtime.limited_child import TooCostly, bounded_text
from llmconv.runtime.tokenizer import TOKENIZER, require_contents, require_text, token_ids

SYSTEM = """\
{%- if messages and messages[0].role == 'system' -%}
  {%- set system, turns = messages[0].content, messages[1:] -%}
{%- else -%}
  {%- set turns = messages -%}
{%- endif -%}
"""

ALPACA = (
    SYSTEM
    + """\
{%- set given = turns and turns[0].input and turns[0].input.strip() -%}
{{- system or 'Below is an instruction that describes a task' + (
    ', paired with an input that provides further context. ' if given else '. '
  ) + 'Write a response that appropriately completes the request.' -}}
{{- '\\n\\n' -}}
{%- for message in turns -%}
  {%- if message.role == 'assistant' -%}
    {{- '### Response:' + message.content + '\\n\\n' -}}
  {%- else -%}
    {{- '### Instruction:\\n' + message.content + '\\n\\n' -}}
    {{- '### Input:\\n' + message.input + '\\n\\n' if message.input and message.input.strip() else '' -}}
  {%- endif -%}
{%- endfor -%}
{{- '### Response:' if add_generation_prompt else '' -}}
"""
)

HASHES = (
    SYSTEM
    + """\
{{- system or 'A chat between a curious human and an artificial intelligence assistant. '
  + "The assistant gives helpful, detailed, and polite answers to the human's questions." -}}
{{- '\\n\\n###' -}}
{%- for message in turns -%}
  {{- ' Assistant: ' if message.role == 'assistant' else ' Human: ' -}}{{- message.content + '\\n###' -}}
{%- endfor -%}
{{- ' Assistant:' if add_generation_prompt else '' -}}
"""
)

VICUNA = (
    SYSTEM
    + """\
{{- system or 'A chat between a curious user and an artificial intelligence assistant. '
  + "The assistant gives helpful, detailed, and polite answers to the user's questions." -}}
{{- ' ' -}}
{%- for message in turns -%}
  {%- if message.role == 'assistant' -%}
    {{- ' ASSISTANT: ' + message.content + '</s>' -}}
  {%- else -%}
    {{- ' USER: ' + message.content + ' ' -}}
  {%- endif -%}
{%- endfor -%}
{{- ' ASSISTANT:' if add_generation_prompt else '' -}}
"""
)


@dataclass(frozen=True)
class Template:
    """A chat template: Jinja source (None for the tokenizer's own), and stop strings if no token ends its answers."""

    text: str | None = None
    stops: tuple[str, ...] = ()


TEMPLATES = {
    TOKENIZER: Template(),
    "alpaca": Template(ALPACA),
    "v1_2": Template(HASHES, ("\n###",)),
    "vicuna": Template(VICUNA, ("</s>",)),
}


def find_template(name: str) -> Template:
    """A template by name, or by the path of a Jinja file; UsageProblem if there is none, InputRefused if unreadable."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        raise UsageProblem(f"unknown chat template `{name}`", hint=f"give {', '.join(TEMPLATES)}, or a Jinja file")
    try:
        return Template(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"`{path}` cannot be read: {error}", hint="give a Jinja text file") from error


def require_template(tokenizer: Any, template: str) -> Template:
    """As `find_template`; InputRefused if the tokenizer has no template of its own."""
    found = find_template(template)
    if found.text is None and not tokenizer.chat_template:
        named = ", ".join(name for name in TEMPLATES if name != TOKENIZER)
        raise InputRefused("the tokenizer has no chat template", hint=f"give `--template` {named}, or a Jinja file")
    return found


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str = TOKENIZER,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat up to where the answer begins; if the last message is the assistant's, it is continued.

    `variables` are given to the template, such as `tools`.
    Contents are converted to the form that the template (a name in `TEMPLATES`, or the path of a Jinja file) reads.
    Raises InputRefused if a content is not a text or the template fails, or as `require_template`.
    """
    found = require_template(tokenizer, template)
    if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise InputRefused("a chat is a list of messages", hint='each has a "role" and a "content"')
    require_contents(messages)
    source = str(found.text or tokenizer.chat_template)
    if "input" not in source and any(str(message.get("input") or "").strip() for message in messages):
        problem = "a prompt has an `input`, which the chat template does not use"  # as in Alpaca's data
        raise InputRefused(problem, hint="give `--template alpaca`, or a Jinja file that uses `message.input`")
    try:
        fitted = ContentForms(source, partial(_text, tokenizer, template)).fitted(messages)
        text = _text(tokenizer, template, fitted, for_answer=True, variables=variables)
    except ValueError as error:
        problem = f"the chat template {error}"
        raise InputRefused(problem, hint="check the roles of the messages and their order, or the template") from error
    if not text.strip() and any(str(message["content"]).strip() for message in messages):
        raise InputRefused("the chat template writes nothing of the messages", hint="give another `--template`")
    return text


def require_valid(tokenizer: Any, template: str) -> None:
    """Requires that a template parses and ends; InputRefused for invalid Jinja or too much time or memory."""
    try:
        _text(tokenizer, template, [{"role": "user", "content": "Hello"}], for_answer=True)
    except ValueError as error:
        if str(error).startswith(NOT_JINJA):
            raise InputRefused(f"the chat template {error}", hint="mend the template, or give another") from error


def takes_tools(tokenizer: Any, template: str) -> bool:
    """Whether a chat template shows the tools that it is given."""
    source = str(find_template(template).text or tokenizer.chat_template)
    known = _known(source)
    if ("", True) not in known:
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
        function = {"name": NEEDLE, "description": "a", "parameters": schema}
        tools = {"tools": [{"type": "function", "function": function}]}
        try:
            messages = [{"role": "user", "content": "a"}]
            known["", True] = NEEDLE in _text(tokenizer, template, messages, True, tools)
        except ValueError:
            known["", True] = False
    return known["", True]


def answer_end(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer's own template writes after an answer; empty if an added token is not the first.

    Some trainers leave the end token of the base in the configuration and the tokenizer, and train on `<|im_end|>`.
    """
    if not tokenizer.chat_template:
        return []
    render = partial(_text, tokenizer, TOKENIZER)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": NEEDLE}]
    try:
        if NEEDLE not in (text := render(asked)):  # it reads lists of parts
            text = render(ContentForms(str(tokenizer.chat_template), render).fitted(asked))
        _, found, rest = text.rpartition(NEEDLE)
        ids = token_ids(tokenizer, rest, add_special_tokens=False) if found and rest else []
    except (ValueError, InputRefused):
        return []
    return ids if ids and ids[0] in tokenizer.added_tokens_decoder else []


def _text(
    tokenizer: Any,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    for_answer: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of messages, made by `bounded_text` if the template comes with a model; raises as it does."""
    last = messages[-1]
    goes_on = for_answer and last["role"] == "assistant"
    ending = {"add_generation_prompt": for_answer and not goes_on, "continue_final_message": goes_on}
    ending |= variables or {}  # a server's client may want another end
    if ending["continue_final_message"] and isinstance(last.get("content"), str) and not last["content"].strip():
        # transformers would cut the text where it finds the content: an empty one takes the line break before it along
        begun = [*messages[:-1], {**last, "content": NEEDLE}]
        return _text(tokenizer, template, begun, for_answer, ending).removesuffix(NEEDLE)
    keeps_none = any(message.get("content", "") is None for message in messages)
    render = partial(
        partial(_with_none, tokenizer) if keeps_none else tokenizer.apply_chat_template,
        [dict(message) for message in messages],
        chat_template=find_template(template).text,
        tokenize=False,
        **ending,
    )
    trusted = template in TEMPLATES and template != TOKENIZER
    if trusted:
        return _rendered(render)
    try:
        return bounded_text(lambda: _rendered(render))
    except TooCostly:
        raise RenderLimitExceeded from None


def _with_none(
    tokenizer: Any, messages: list[dict[str, Any]], *, chat_template: str | None, tokenize: bool, **variables: Any
) -> str:
    """As `apply_chat_template`, which leaves out a content of None: templates of DeepSeek's ask for it."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - a text needs none

    source = tokenizer.get_chat_template(chat_template, variables.get("tools"))
    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=source, **{**tokenizer.special_tokens_map, **variables}
    )
    return str(texts[0])


def _rendered(render: Callable[[], str]) -> str:
    """Calls `render`; raises ValueError with a message worded to follow "the chat template"."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - a text needs none

    try:
        return render()
    except TemplateSyntaxError as error:
        raise ValueError(f"{NOT_JINJA}: line {error.lineno}: {first_line(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise ValueError(f"fails on the messages: {first_line(error)}") from error


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str,
    add_special_tokens: bool,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """The text of `render_chat`, and whether the tokenizer is to add special tokens: not where it has a start token."""
    text = render_chat(tokenizer, messages, template, variables)
    require_text(text)
    has_start = template == TOKENIZER or bool(tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    return text, add_special_tokens and not has_start


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str = TOKENIZER,
    *,
    add_special_tokens: bool = True,
    most: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokens of `render_chat` with one start token; InputRefused without any, TooManyTokens over twice `most`."""
    text, starts = chat_text(tokenizer, messages, template, add_special_tokens, variables)
    ids = token_ids(tokenizer, text, most, add_special_tokens=starts)
    if not ids:
        raise InputRefused("the chat has no tokens", hint="give a message that is not empty")
    return ids


NOT_JINJA = "is not valid Jinja"


class RenderLimitExceeded(InputRefused):
    """The template took too much time or memory."""

    def __init__(self) -> None:
        super().__init__("the chat template takes too much time or memory", hint="give another `--template`")


NEEDLE = "zq7w3k"  # text of the messages that are tried
Render = Callable[[Sequence[Mapping[str, Any]]], str]  # messages to text; raises an exception where the template fails


class ContentForms:
    """The forms that a template reads, tried by `render`, without a part for an answer, and kept by `source`."""

    def __init__(self, source: str, render: Render) -> None:
        self._known, self._render = _known(source), render

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with each content in a form that the template reads, if any; raises RenderLimitExceeded."""
        made = [{**message, "content": self._content(str(message["role"]), message["content"])} for message in messages]
        in_text, form = self._call_form() if any(message.get("tool_calls") for message in made) else (False, ABSENT)
        return [self._with_calls(message, in_text, form) for message in made]

    def _with_calls(self, message: Mapping[str, Any], in_text: bool, form: str) -> dict[str, Any]:
        """A message with calls in a form that is read; an empty content stays if the template shows calls with it."""
        if message["content"] or (message["content"] == "" and not message.get("tool_calls")):
            return _with_calls(message, in_text, "")
        stays = message["content"] == "" and self._reads_calls(in_text, EMPTY)
        return _with_calls(message, in_text, EMPTY if stays else form)

    def _call_form(self) -> tuple[bool, str]:
        """Whether the template reads arguments of calls as JSON text, and what it reads as the content of none."""
        for form in (ABSENT, EMPTY), (NONE,):
            for in_text, content in product((False, True), form):
                if self._reads_calls(in_text, content):
                    return in_text, content
        return False, ABSENT

    def _reads_calls(self, in_text: bool, form: str) -> bool:
        key = f"calls {form}", in_text
        if key not in self._known:
            self._known[key] = self._tried_calls(in_text, form)
        return self._known[key]

    def _tried_calls(self, in_text: bool, form: str) -> bool:
        function = {"name": "a", "arguments": {NEEDLE: NEEDLE}}
        call = {"id": CALL_ID, "type": "function", "function": function}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        user = {"role": "user", "content": "a"}
        answer = {"role": "tool", "content": "a", "name": "a", "tool_call_id": CALL_ID}
        try:
            text = self._render([user, _with_calls(calls, in_text, form), answer])
        except RenderLimitExceeded:
            raise
        except Exception:  # a template can raise anything
            return False
        return NEEDLE in text and all(wrong not in text for wrong in (f"'{NEEDLE}'", f'\\"{NEEDLE}', "None"))

    def _reads(self, role: str, in_parts: bool) -> bool:
        key = role, in_parts
        if key not in self._known:
            self._known[key] = self._tried(role, in_parts)
        return self._known[key]

    def _content(self, role: str, content: Any) -> Any:
        if isinstance(content, str):
            wants_parts = not self._reads(role, False) and self._reads(role, True)
            return [{"type": "text", "text": content}] if wants_parts else content
        if not isinstance(content, list | tuple) or not content or not all(map(is_text_part, content)):
            return content
        wants_text = not self._reads(role, True) and self._reads(role, False)
        return text_of(content) if wants_text else content

    def _tried(self, role: str, in_parts: bool) -> bool:
        content = [{"type": "text", "text": NEEDLE}] if in_parts else NEEDLE
        user = {"role": "user", "content": [{"type": "text", "text": "a"}] if in_parts else "a"}
        tried = {"role": role, "content": content}
        before, after = [user] * (role == "assistant"), [user] * (role != "user")
        try:
            text = self._render([*before, tried, *after])
        except RenderLimitExceeded:
            raise
        except Exception:  # a template can raise anything
            return False
        return NEEDLE in text and f"'{NEEDLE}'" not in text and f'"{NEEDLE}"' not in text


CALL_ID = "zq7w3k9ab"  # nine letters and digits, as Mistral's templates demand


ABSENT, EMPTY, NONE = "absent", "empty", "none"  # contents of a message that has calls and no text


def _with_calls(message: Mapping[str, Any], in_text: bool, form: str) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text, or as an object; `form` is its content, or empty."""
    made = dict(message)
    if form == ABSENT:
        del made["content"]
    elif form:
        made["content"] = "" if form == EMPTY else None
    if not made.get("tool_calls"):
        return made
    calls = []
    for call in made["tool_calls"]:
        given = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(given.get("arguments"), Mapping):
            calls.append(call)  # as the caller wrote it
            continue
        arguments = json.dumps(given["arguments"], ensure_ascii=False) if in_text else given["arguments"]
        calls.append({**call, "function": {**given, "arguments": arguments}})
    made["tool_calls"] = calls
    return made


@lru_cache(maxsize=64)
def _known(source: str) -> dict[tuple[str, bool], bool]:
    """What is known of a template: whether it reads texts, and parts, in messages of a role."""
    return {}


def is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def text_of(content: Any) -> str:
    """A content as one text: that of its text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if is_text_part(part))
