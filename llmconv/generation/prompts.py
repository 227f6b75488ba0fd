"""Prompts from a file, from standard input or from the command line: texts and chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from llmconv.errors import InputRefused, MalformedInput

Content = str | list[dict[str, Any]]
"""A text, or a chat as a list of messages."""

OWN = ("prompt", "messages", "input")
"""Fields of a line that say what the prompt is."""


@dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts.

    Attributes:
        content: the prompt.
        fields: what else the line has, such as an `id`; it goes into the line of the completion.
    """

    content: Content
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(source: Path | TextIO) -> list[Prompt]:
    """Prompts of a file: one per line of text, or one JSON object per line, with `prompt` or `messages`.

    A file whose name ends in `.jsonl`, and any text whose first line is an object, is JSON. Empty lines are no prompts.

    Raises:
        InputRefused: the file cannot be read, or holds no prompt.
        MalformedInput: a line of JSON has neither, or both, or is no JSON.
    """
    text, is_json = _text(source)
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    found = [Prompt(line) for _, line in lines]
    if is_json or (lines and _is_object(lines[0][1])):
        found = [_of_json(number, line) for number, line in lines]
    if not found:
        raise InputRefused("there is no prompt", hint="write one prompt per line")
    return found


def _text(source: Path | TextIO) -> tuple[str, bool]:
    """The content, and whether its name says that it is JSON."""
    try:
        if isinstance(source, Path):
            return source.read_text(encoding="utf-8-sig"), source.suffix in (".jsonl", ".ndjson")
        return source.read(), False
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputRefused(f"the prompts in `{source}` cannot be read: {reason}", hint="give a text file") from error


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _of_json(number: int, line: str) -> Prompt:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise MalformedInput(
            f"line {number} of the prompts is no JSON: {reason}", hint="one object per line"
        ) from error
    given = said if isinstance(said, dict) else {}
    return Prompt(_content(number, given), {name: value for name, value in given.items() if name not in OWN})


def _content(number: int, given: Mapping[str, Any]) -> Content:
    prompt, messages = given.get("prompt"), given.get("messages")
    if isinstance(messages, list) and prompt is None and all(_is_message(message) for message in messages) and messages:
        return messages
    if not isinstance(prompt, str) or messages is not None:
        raise MalformedInput(
            f"line {number} of the prompts has no `prompt` that is a text, and no `messages` that are a chat",
            hint='write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}',
        )
    if isinstance(given.get("input"), str):  # of Alpaca
        return [{"role": "user", "content": prompt, "input": given["input"]}]
    return prompt


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def with_prefix(content: Content, prefix: str) -> Content:
    """The prompt with a text before it; in a chat, before its first message that is not of the system."""
    if not prefix or isinstance(content, str):
        return prefix + content if isinstance(content, str) else content
    first = next((at for at, message in enumerate(content) if message["role"] != "system"), 0)
    changed = {**content[first], "content": prefix + str(content[first]["content"])}
    return [*content[:first], changed, *content[first + 1 :]]


def as_chat(content: Content, system: str = "") -> list[dict[str, Any]]:
    """A text as the only message of a user; a chat stays as it is."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def shared_start(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that all prompts begin with, one left for the shortest of them."""
    first, last = min(map(list, prompts)), max(map(list, prompts))
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return list(first[: min(same, min(map(len, prompts)) - 1)])
