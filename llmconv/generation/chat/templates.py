"""Chat templates: the tokenizer's own, and by name those of Alpaca and of LLaMA2-Accessory's conversations.

All are Jinja, which transformers renders in a sandbox: a template comes with a model and is untrusted data.

    alpaca   instruction and response; a message may have an `input` in addition to its `content`
    v1_2     LLaMA2-Accessory's default: `###` before every turn; an answer ends at a line that begins with `###`
    vicuna   its `vicuna_v1_1`, with two spaces before every role, as its models were trained
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.generation.chat.bounded_render import RenderLimitExceeded, bounded_text
from llmconv.generation.chat.content_forms import ContentForms
from llmconv.generation.chat.messages import require_contents
from llmconv.runtime.tokenizer import require_text, token_ids

TOKENIZER = "tokenizer"
"""The name of the tokenizer's own template."""

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
    """A chat template.

    Attributes:
        text: Jinja source; None for the tokenizer's own.
        stops: stop strings, for templates whose answers do not end with a token.
    """

    text: str | None = None
    stops: tuple[str, ...] = ()


TEMPLATES = {
    TOKENIZER: Template(),
    "alpaca": Template(ALPACA),
    "v1_2": Template(HASHES, ("\n###",)),
    "vicuna": Template(VICUNA, ("</s>",)),
}


def find_template(name: str) -> Template:
    """A template by its name, or by the path of a Jinja file.

    Raises:
        UsageProblem: there is no such template or file.
        InputRefused: the file cannot be read.
    """
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
    """The template, which may be the tokenizer's own.

    Args:
        tokenizer: a tokenizer of transformers.
        template: a name in `TEMPLATES`, or the path of a Jinja file.

    Raises:
        InputRefused: the tokenizer has no template.
        UsageProblem: an unknown template.
    """
    found = find_template(template)
    if found.text is None and not tokenizer.chat_template:
        named = ", ".join(name for name in TEMPLATES if name != TOKENIZER)
        raise InputRefused("the tokenizer has no chat template", hint=f"give `--template` {named}, or a Jinja file")
    return found


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str = TOKENIZER) -> str:
    """The text of a chat up to where the answer begins; if the last message is the assistant's, it is continued.

    Args:
        tokenizer: a tokenizer of transformers.
        messages: `role` and `content` each, in order; a text reaches a template that reads parts as a part, and the
            reverse.
        template: a name in `TEMPLATES`, or the path of a Jinja file.

    Raises:
        InputRefused: the tokenizer has no template, a content is not a text, or the template fails on the messages.
        UsageProblem: an unknown template.
    """
    found = require_template(tokenizer, template)
    if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise InputRefused("a chat is a list of messages", hint='each has a "role" and a "content"')
    require_contents(messages)
    _require_input(messages, found.text or tokenizer.chat_template)
    try:
        fitted = ContentForms(str(found.text or tokenizer.chat_template), partial(_text, tokenizer, template))
        text = _text(tokenizer, template, fitted.fitted(messages), for_answer=True)
    except RenderLimitExceeded as error:
        raise InputRefused(
            "the chat template takes too much time or memory", hint="give another `--template`"
        ) from error
    except ValueError as error:
        raise InputRefused(
            f"the chat template {error}", hint="check the roles of the messages and their order, or the template"
        ) from error
    if not text.strip() and any(str(message["content"]).strip() for message in messages):
        raise InputRefused("the chat template writes nothing of the messages", hint="give another `--template`")
    return text


def _text(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]], for_answer: bool = False) -> str:
    """The text of messages, in a child process if the template comes with a model.

    Raises:
        RenderLimitExceeded: it takes too much time or memory.
        ValueError: the template fails.
    """
    goes_on = for_answer and messages[-1]["role"] == "assistant"
    render = partial(
        tokenizer.apply_chat_template,
        [dict(message) for message in messages],
        chat_template=find_template(template).text,
        tokenize=False,
        add_generation_prompt=for_answer and not goes_on,
        continue_final_message=goes_on,
    )
    trusted = template in TEMPLATES and template != TOKENIZER
    return _rendered(render) if trusted else bounded_text(lambda: _rendered(render))


def _require_input(messages: Sequence[Mapping[str, Any]], template: Any) -> None:
    """Refuses an `input`, as in Alpaca's data, that the template would leave out."""
    if "input" not in str(template) and any(str(message.get("input") or "").strip() for message in messages):
        raise InputRefused(
            "a prompt has an `input`, which the chat template does not use",
            hint="give `--template alpaca`, or a Jinja file that uses `message.input`",
        )


def _rendered(render: Callable[[], str]) -> str:
    """Calls `render`.

    Raises:
        ValueError: it failed; the message is worded to follow "the chat template".
    """
    try:
        return render()
    except TemplateSyntaxError as error:
        raise ValueError(f"is not valid Jinja: line {error.lineno}: {first_line(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise ValueError(f"fails on the messages: {first_line(error)}") from error


def has_start(tokenizer: Any, text: str, template: str) -> bool:
    """Whether the text of a chat contains the start token already.

    Args:
        tokenizer: of transformers.
        text: of `render_chat`.
        template: name of the chat template.
    """
    return template == TOKENIZER or bool(tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str = TOKENIZER,
    *,
    add_special_tokens: bool = True,
    most: int | None = None,
) -> list[int]:
    """Tokens of `render_chat`, with a start token: the tokenizer's own template contains it, the others do not.

    Args:
        tokenizer: of transformers.
        messages: objects with `role` and `content`.
        template: name of a chat template.
        add_special_tokens: add a start token if the template does not write it.
        most: see `token_ids`.

    Raises:
        InputRefused: see `render_chat`; or the chat has no tokens.
        TooManyTokens: it has more than twice as many tokens as it may have.
        UsageProblem: an unknown template.
    """
    text = render_chat(tokenizer, messages, template)
    require_text(text)
    starts = add_special_tokens and not has_start(tokenizer, text, template)
    ids = token_ids(tokenizer, text, most, add_special_tokens=starts)
    if not ids:
        raise InputRefused("the chat has no tokens", hint="give a message that is not empty")
    return ids
