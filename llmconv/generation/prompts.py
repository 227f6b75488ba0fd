"""Prompts, which are texts or chats, as Python values; `prompt_file` reads them from files."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.files.paths import kind_of
from llmconv.generation.chat.templates import is_message, require_contents

PromptContent = str | list[dict[str, Any]]
"""A text, or a chat as a list of messages."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file.

    Attributes:
        content: a text or a chat.
        fields: other fields of its line, such as an `id`; they are copied to the line of the completion.
        embeddings: embeddings in the prompt, floats [tokens, hidden]: an array, a torch tensor, or the path of a `.npy`
            or safetensors file; None for none. The graphs must take embeddings (`llmconv export --embeds`).
        placeholder: text of the token whose places they take; empty to place them before the prompt.
        images: images in the prompt, in the order of their placeholders: paths, bytes of files, or images of Pillow;
            or a single one.
        inputs: values of the model's extra inputs by name, without the axis of the batch; others have their defaults.

    Raises:
        UsageProblem: `fields` is not a mapping, or `placeholder` is not a string.
    """

    content: PromptContent
    fields: Mapping[str, Any] = field(default_factory=dict)
    embeddings: Any = None
    placeholder: str = ""
    images: tuple[Any, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", _several(self.images))
        for name, kind, wanted in (("fields", Mapping, "a mapping"), ("placeholder", str, "a string")):
            if not isinstance(value := getattr(self, name), kind):
                raise UsageProblem(f"`{name}` of a prompt is {kind_of(value)}", hint=f"give {wanted}")


def _several(images: Any) -> tuple[Any, ...]:
    """Images as a tuple; a single one becomes a tuple of one."""
    if images is None:
        return ()
    is_one = isinstance(images, str | bytes | os.PathLike) or not isinstance(images, Iterable)
    return (images,) if is_one else tuple(images)


NOT_TOKENS = "give lists of token ids: `model.encode(text)`; texts go to `llmconv.generation.generate`"
NOT_PROMPTS = "give a text, a list of texts, or chats as lists of messages"


def prompts_of(prompts: Any) -> list[Prompt]:
    """Texts, chats and `Prompt` objects, or a single one, as a list of `Prompt`; UsageProblem for others or none."""
    if isinstance(prompts, Prompt):
        prompts = [prompts]
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping):
        prompts = list(prompts)
        if any(isinstance(one, Prompt) for one in prompts):
            return [
                replace(one, content=contents_of([one.content])[0])
                if isinstance(one, Prompt)
                else Prompt(contents_of([one])[0])
                for one in prompts
            ]
    return [Prompt(content) for content in contents_of(prompts)]


def contents_of(prompts: Any) -> list[PromptContent]:
    """Texts and chats, or a single one, as a list; raises UsageProblem for anything else, or none."""
    if isinstance(prompts, str):
        return [prompts]
    odd = (bytes, bytearray, Mapping, set, frozenset, os.PathLike)
    if isinstance(prompts, odd) or not isinstance(prompts, Iterable):
        raise UsageProblem(f"`prompts` is {kind_of(prompts)}", hint=NOT_PROMPTS)
    found = list(prompts)
    if not found:
        raise UsageProblem("no prompts", hint="give at least one")
    if all(map(is_message, found)):
        return [found]
    for number, one in enumerate(found, start=1):
        if isinstance(one, str):
            continue
        if not isinstance(one, list | tuple) or not one or not all(map(is_message, one)):
            tokens = isinstance(one, int) or isinstance(one, Sequence) and one and isinstance(one[0], int)
            hint = "tokens go to `TextModel.stream`" if tokens else NOT_PROMPTS
            raise UsageProblem(f"prompt {number} is {kind_of(one)}, neither a text nor a chat", hint=hint)
    return [one if isinstance(one, str) else list(one) for one in found]


def token_lists(prompts: Any) -> list[list[int]]:
    """Prompts as lists of token ids; raises UsageProblem for texts, a flat list, or values other than integers >= 0."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise UsageProblem(f"`prompts` is {kind_of(prompts)}, not a list of lists of tokens", hint=NOT_TOKENS)
    lists = []
    for number, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str | bytes | Mapping):
            raise UsageProblem(f"prompt {number} is {kind_of(prompt)}, not a list of tokens", hint=NOT_TOKENS)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            hint = "put a single prompt into a list: `[tokens]`" if _is_number(prompt) else NOT_TOKENS
            raise UsageProblem(f"prompt {number} is {kind_of(prompt)}, not a list of tokens", hint=hint) from error
        if min(tokens, default=0) < 0:
            raise UsageProblem(f"prompt {number} has the token {min(tokens)}", hint="tokens count from 0")
        lists.append(tokens)
    return lists


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not hasattr(value, "__len__")


def with_prefix(content: PromptContent, prefix: str) -> PromptContent:
    """The prompt with `prefix` before it; in a chat, before the first message that is not a system message."""
    if not prefix or isinstance(content, str):
        return prefix + content if isinstance(content, str) else content
    require_contents(content)
    first = next((at for at, message in enumerate(content) if message["role"] != "system"), 0)
    given = content[first]["content"]
    in_parts = isinstance(given, list | tuple)
    changed = {
        **content[first],
        "content": [{"type": "text", "text": prefix}, *given] if in_parts else prefix + (given or ""),
    }
    return [*content[:first], changed, *content[first + 1 :]]


def as_chat(content: PromptContent, system: str = "") -> list[dict[str, Any]]:
    """A text as a chat of one user message; `system` is added if the chat has no system message."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def shared_start(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that all prompts begin with; the shortest prompt keeps at least one more token."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return list(first[: min(same, min(map(len, prompts)) - 1)])
