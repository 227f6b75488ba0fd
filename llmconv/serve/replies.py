"""What clients get of one request while its answers are generated: OpenAI's objects and events.

Sources: OpenAI's API reference, "The chat completion object", "The chat completion chunk object", "The completion
object"; of the log-probabilities of completions, the answers of its server.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmconv.generation.token_rules import TokenLogprob
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import CompletionRequest
from llmconv.serve.served_model import ChoiceDelta, CompletionChoice
from llmconv.serve.tool_dialects import CALL, CONTENT, REASONING

ARGUMENTS = 512  # characters of the arguments of a call in one event
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # a comment, so that no proxy closes a connection without traffic


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Reply(Protocol):
    """What one request gets, built while its answers are generated."""

    completion_tokens: int

    @property
    def prompt_tokens(self) -> int: ...

    def add(self, delta: ChoiceDelta) -> None:
        """Takes a step, for `whole`."""

    def whole(self) -> dict[str, Any]:
        """The complete response, for a request without `stream`."""

    def chunks(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of a step."""

    def last(self) -> Iterator[bytes]:
        """The events at the end of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """The event for an error after the stream has begun."""


@dataclass
class ResponseBuilder:
    """Builds the response to one request while its `choices` are generated; `model` is the public name of the model."""

    request: CompletionRequest
    model: str
    choices: Sequence[CompletionChoice]
    id_of_call: Callable[[str], str] = str
    bytes_of: Callable[[int], bytes] = lambda token: b""  # text of a token, in UTF-8
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: dict[int, list[str]] = field(default_factory=dict)
    reasoning: dict[int, list[str]] = field(default_factory=dict)
    calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

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
        self._kinds: dict[int, str] = {}  # kind of the latest part of each answer
        self.reasoning_tokens = 0  # those after which the latest part was one of reasoning
        self._waiting: list[TokenLogprob] = []  # those of a step that the next event has

    def add(self, delta: ChoiceDelta) -> None:
        self.completion_tokens += delta.tokens
        self.cached_tokens += delta.cached
        self.texts.setdefault(delta.choice, []).append(delta.text)
        self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        if delta.finish:
            self.finishes[delta.choice] = delta.finish
        for part in delta.parts:
            if part.kind == CALL:
                calls = self.calls.setdefault(delta.choice, [])
                identity = self.id_of_call(secrets.token_hex(12))
                function = {"name": part.name, "arguments": part.text}
                calls.append({"id": identity, "type": "function", "function": function})
            else:
                (self.texts if part.kind == CONTENT else self.reasoning).setdefault(delta.choice, []).append(part.text)
            self._kinds[delta.choice] = part.kind
        self.reasoning_tokens += delta.tokens * (self._kinds.get(delta.choice) == REASONING)

    def whole(self) -> dict[str, Any]:
        """The complete response, for a request without `stream`."""
        choices: list[dict[str, Any]] = []
        for number, index in enumerate(self._returned()):
            text = "".join(self.texts.get(index, []))
            content = {"message": self._message(index, text)} if self.request.is_chat else {"text": text}
            finish = self.finishes.get(index, "stop")
            found = self._logprobs(self.logprobs.get(index, []))
            choices.append({"index": number, **content, "logprobs": found, "finish_reason": finish})
        return {**self._head, "choices": choices, "usage": self.usage()}

    def _returned(self) -> list[int]:
        """The answers that the client gets: of each prompt all, or with `best_of` those likeliest per token."""
        made, wanted = self.request.sampling.choices, self.request.sampling.wanted
        groups = [range(start, start + made) for start in range(0, len(self.choices), made)]
        if made == wanted:
            return [index for group in groups for index in group]
        return [index for group in groups for index in sorted(group, key=self._unlikeliness)[:wanted]]

    def _unlikeliness(self, index: int) -> float:
        prompt = len(self.choices[index].ids) if self.choices[index].scores_prompt else 0
        found = [one.logprob for one in self.logprobs.get(index, [])[prompt:] if one.logprob is not None]
        return -sum(found) / len(found) if found else 0.0

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Those of tokens in the form of the endpoint; None if the request has not asked for any."""
        if self.request.logprobs is None:
            return None
        if self.request.is_chat:
            return {"content": [self._in_chat(one) for one in found], "refusal": None}
        tops: list[dict[str, float] | None] | None = None if not self.request.logprobs else []
        for one in found:
            if tops is not None:
                # the token itself may be none of the likeliest
                top = {} if one.logprob is None else {self._name(at): value for at, value in reversed(one.top)}
                tops.append(top | {self._name(one.token): one.logprob} if one.logprob is not None else None)
        return {
            "tokens": [self._name(one.token) for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": tops,
            "text_offset": [one.start for one in found],
        }

    def _in_chat(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._object(token, logprob) for token, logprob in one.top]
        return {**self._object(one.token, one.logprob), "top_logprobs": top}

    def _object(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = self.bytes_of(token)
        text = f"token_id:{token}" if self.request.token_ids else content.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    def _name(self, token: int) -> str:
        """A token of a completion; one that is a part of a character as `bytes:` and its bytes."""
        if self.request.token_ids:
            return f"token_id:{token}"
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _message(self, index: int, text: str) -> dict[str, Any]:
        calls = self.calls.get(index)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning := "".join(self.reasoning.get(index, [])):
            message["reasoning_content"] = reasoning
        return {**message, "tool_calls": calls} if calls else message

    def chunks(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of one step: the role before the first text, the text, and the finish reason."""
        self.add(delta)
        if self.request.is_chat and delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield self._chunk(delta.choice, {"role": "assistant", "content": ""}, None)
        self._waiting += delta.logprobs
        if delta.text or (self._waiting and not delta.parts):
            yield self._chunk(delta.choice, {"content": delta.text}, None)
        for part in delta.parts:
            if part.kind != CALL:
                name = "content" if part.kind == CONTENT else "reasoning_content"
                yield self._chunk(delta.choice, {name: part.text}, None)
        yield from self._call_chunks(delta.choice, sum(part.kind == CALL for part in delta.parts))
        if delta.finish:
            yield self._chunk(delta.choice, {}, delta.finish)

    def _call_chunks(self, choice: int, count: int) -> Iterator[bytes]:
        """The events of the last `count` calls of an answer: its id and name first, then its arguments in pieces."""
        calls = self.calls.get(choice, [])
        for index, call in list(enumerate(calls))[len(calls) - count :]:
            arguments = call["function"]["arguments"]
            head = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield self._chunk(choice, {"tool_calls": [head]}, None)
            for start in range(0, len(arguments), ARGUMENTS):
                piece = {"index": index, "function": {"arguments": arguments[start : start + ARGUMENTS]}}
                yield self._chunk(choice, {"tool_calls": [piece]}, None)

    def last(self) -> Iterator[bytes]:
        """The events at the end of a stream: token counts if the request asks for them."""
        if self.request.include_usage:
            yield event({**self._head, "choices": [], "usage": self.usage()})
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """The event for an error after the stream has begun."""
        return event(error.body())

    @property
    def prompt_tokens(self) -> int:
        """Those of all prompts; one with several answers counts once."""
        return sum(len(choice.ids) for choice in self.choices[:: self.request.sampling.choices])

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        count = self.prompt_tokens
        return {
            "prompt_tokens": count,
            "completion_tokens": self.completion_tokens,
            "total_tokens": count + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None) -> bytes:
        content = {"delta": delta} if self.request.is_chat else {"text": delta.get("content", "")}
        waiting, self._waiting = self._waiting, []
        found = self._logprobs(waiting) if waiting else None
        choice = {"index": index, **content, "logprobs": found, "finish_reason": finish}
        usage = {"usage": self.usage() if self.request.usage_in_chunks else None} if self.request.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})
