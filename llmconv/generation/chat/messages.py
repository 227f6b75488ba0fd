"""Messages of a chat: an object each, with a `role` and a `content`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmconv.errors import InputRefused
from llmconv.files.paths import kind_of


def is_message(message: Any) -> bool:
    """Whether a value has the form of a message; its content is compared by `require_contents`."""
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def require_contents(messages: Sequence[Mapping[str, Any]], where: str = "the chat") -> None:
    """Refuses contents that a template would write down as `None` or `7`, or fail on with an error of its own.

    Args:
        messages: of a chat. A content is a text, a list of parts (which some templates take), or None in a message of
            the assistant that has `tool_calls`, as in OpenAI's API.
        where: what the message calls the chat.

    Raises:
        InputRefused: a content is something else; names the message.
    """
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        if isinstance(content, str | list | tuple):
            continue
        if content is None and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        kind = "null" if content is None else kind_of(content)
        raise InputRefused(
            f"the `content` of message {number} in {where} is {kind}, and must be a text",
            hint='give a text, "" for an empty one; null is for a message of the assistant with `tool_calls`',
        )
