"""The form in which a chat template reads the content of a message: a text, or a list of parts.

A template of one form shows nothing of the other, or Python's notation of it, and fails on neither. So a message in
each form is rendered once per role and template, and looked for in the result, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llmconv.generation.chat.bounded_render import RenderLimitExceeded

NEEDLE = "zq7w3k"
"""Text of the messages that are tried."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Messages to text; raises an exception where the template fails."""


class ContentForms:
    """The forms that one template reads, tried when they are needed.

    Args:
        source: of the template; what is known of it is kept.
        render: renders messages in it, without a part for an answer.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._known, self._render = _known(source), render

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with every content in a form that the template reads; unchanged where it reads neither form.

        Args:
            messages: `role` and `content` each. Parts other than texts are left as they are.

        Raises:
            RenderLimitExceeded: the template takes too much time or memory.
        """
        return [{**message, "content": self._content(str(message["role"]), message["content"])} for message in messages]

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


@lru_cache(maxsize=64)
def _known(source: str) -> dict[tuple[str, bool], bool]:
    """What is known of a template: whether it reads texts, and parts, in messages of a role."""
    return {}


def is_text_part(part: Any) -> bool:
    """Whether a part of a content is a text."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def text_of(content: Any) -> str:
    """A content as one text: that of its text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if is_text_part(part))
