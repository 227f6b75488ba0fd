"""Validates the messages of a chat: objects with a `role` and a `content`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmconv.errors import InputRefused
from llmconv.files.paths import kind_of


def is_message(message: Any) -> bool:
    """Whether a value has the form of a message; `require_contents` checks the content."""
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def require_contents(messages: Sequence[Mapping[str, Any]], where: str = "the chat") -> None:
    """Refuses contents that a template would render as `None` or `7`, or fail on.

    Args:
        messages: of a chat. A content is a text, a list of parts (which some templates take), or None in a message of
            the assistant that has `tool_calls`, as in OpenAI's API.
        where: name of the chat in the error message.

    Raises:
        InputRefused: a content is something else.
    """
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        if isinstance(content, str | list | tuple):
            continue
        if content is None and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        kind = "null" if content is None else kind_of(content)
        raise InputRefused(
            f"the `content` of message {number} in {where} is {kind}, but must be a text",
            hint='give a text, or ""; null is allowed only in a message of the assistant with `tool_calls`',
        )
