"""OpenAI's responses: complete ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmconv.serve.openai_schema import CompletionRequest
from llmconv.serve.served_model import ChoiceDelta, CompletionChoice

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, so that no proxy closes a connection without traffic."""


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class ResponseBuilder:
    """Builds the response to one request while its answers grow.

    Args:
        request: the request.
        model: public name of the model.
        choices: the answers that are being generated.
    """

    request: CompletionRequest
    model: str
    choices: Sequence[CompletionChoice]
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: dict[int, list[str]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chat = self.request.is_chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        if chat and self.request.stream:
            self._head["object"] = "chat.completion.chunk"
        self._begun: set[int] = set()

    def add(self, delta: ChoiceDelta) -> None:
        """Adds the result of a step."""
        self.completion_tokens += delta.tokens
        self.cached_tokens += delta.cached
        self.texts.setdefault(delta.choice, []).append(delta.text)
        if delta.finish:
            self.finishes[delta.choice] = delta.finish

    def whole(self) -> dict[str, Any]:
        """The complete response, for a request without `stream`."""
        return {
            **self._head,
            "choices": [self._choice(index) for index in range(len(self.choices))],
            "usage": self.usage(),
        }

    def chunks(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of one step: the role before the first text, the text, and the finish reason."""
        self.add(delta)
        if self.request.is_chat and delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield self._chunk(delta.choice, {"role": "assistant", "content": ""}, None)
        if delta.text:
            yield self._chunk(delta.choice, {"content": delta.text}, None)
        if delta.finish:
            yield self._chunk(delta.choice, {}, delta.finish)

    def last(self) -> Iterator[bytes]:
        """The events at the end of a stream: token counts if the request asks for them."""
        if self.request.include_usage:
            yield event({**self._head, "choices": [], "usage": self.usage()})
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Token counts so far; a prompt with several answers counts once."""
        prompts = self.choices[:: self.request.sampling.choices]
        count = sum(len(choice.ids) for choice in prompts)
        return {
            "prompt_tokens": count,
            "completion_tokens": self.completion_tokens,
            "total_tokens": count + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self.texts.get(index, []))
        content = {"message": {"role": "assistant", "content": text}} if self.request.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": self.finishes.get(index, "stop")}

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None) -> bytes:
        content = {"delta": delta} if self.request.is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})
