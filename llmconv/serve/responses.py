"""`/v1/responses` as far as nothing has to be stored: its requests as those of a chat, and its objects and events.

Sources: OpenAI's API reference, "Create a model response", "The response object" and "Streaming events".
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.generation.token_rules import TokenLogprob
from llmconv.serve.answer_forms import ALLOWED
from llmconv.serve.field_table import RESPONSES, finish
from llmconv.serve.fields import ApiError, Fields
from llmconv.serve.openai_schema import MAX_TOKENS, MAX_TOP_LOGPROBS, CompletionRequest, chat_request
from llmconv.serve.served_model import ChoiceDelta, CompletionChoice
from llmconv.serve.tool_dialects import CALL, CONTENT, REASONING

ARGUMENTS = 512  # characters of the arguments of a call in one event
LOGPROBS = "message.output_text.logprobs"
# types of parts that are texts, and the field that has the text
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
MESSAGE = re.compile(r"messages\[(\d+)\]")


def response_request(content: Any) -> tuple[CompletionRequest, Mapping[str, Any]]:
    """Parses the body of `/v1/responses`: the chat that it asks for, and the fields that the response repeats.

    Raises ApiError for missing, invalid and unsupported fields.
    """
    fields = Fields(content)
    messages, places = _messages(fields.take("input", str | list))
    if instructions := fields.take("instructions", str):
        messages, places = [{"role": "system", "content": instructions}, *messages], [-1, *places]
    text, reasoning = Fields(fields.take("text", dict) or {}), Fields(fields.take("reasoning", dict) or {})
    form, tools = text.take("format", dict) or {"type": "text"}, fields.take("tools", list) or []
    choice, several = fields.take("tool_choice", str | dict), fields.take("parallel_tool_calls", bool)
    include, effort = fields.take("include", list) or [], reasoning.take("effort", str)
    most, top = (
        fields.number("max_output_tokens", int, 1, MAX_TOKENS),
        fields.number("top_logprobs", int, 0, MAX_TOP_LOGPROBS),
    )
    picking = {
        "temperature": fields.number("temperature", float, 0, 2),
        "top_p": fields.number("top_p", float, 0, 1),
    }
    model, stream = fields.take("model", str), fields.flag("stream")
    unknown = finish(fields, RESPONSES)
    wanted = LOGPROBS in include
    chat: dict[str, Any] = {
        **picking,
        "model": model,
        "messages": messages,
        "stream": stream,
        "max_completion_tokens": most,
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)],
        "tool_choice": _choice(choice),
        "parallel_tool_calls": several,
        "reasoning_effort": effort,
        "response_format": _format(form),
        "logprobs": wanted,
        "top_logprobs": top if wanted else None,
        "add_generation_prompt": True if messages and messages[-1]["role"] == "assistant" else None,
    }
    shown = {
        **picking,
        "instructions": instructions,
        "max_output_tokens": most,
        "parallel_tool_calls": several is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": form},
        "tools": tools,
        "tool_choice": choice or "auto",
        "top_logprobs": top or 0,
    }
    try:
        return replace(chat_request(chat), unknown=unknown), shown
    except ApiError as error:
        raise _renamed(error, places) from None


def _renamed(error: ApiError, places: Sequence[int]) -> ApiError:
    """An error of the chat with the names of the fields of this endpoint."""

    def named(found: re.Match[str]) -> str:
        at = int(found[1])
        return f"input[{places[at]}]" if at < len(places) and places[at] >= 0 else "instructions"

    def changed(text: str) -> str:
        return MESSAGE.sub(named, text).replace("`messages`", "`input`")

    parameter = {"messages": "input", "response_format": "text.format"}.get(error.parameter or "", error.parameter)
    shown = None if parameter is None else changed(parameter)
    return ApiError(changed(error.message), status=error.status, parameter=shown, code=error.code)


def _messages(given: str | list[Any] | None) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages of a chat for an input, and the place of the input's item that began each."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [0]
    if not given:
        raise ApiError("`input` must be a text or a list of items", parameter="input")
    messages: list[dict[str, Any]] = []
    places: list[int] = []
    reasoning = ""
    for at, item in enumerate(given):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise ApiError(f"`{where}` must be an object", parameter=where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = "".join(_texts(item.get("content") or []))
            continue
        made = _message(kind, item, where)
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(made["tool_calls"])
        else:
            messages.append(made)
            places.append(at)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages, places


def _message(kind: Any, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message of a chat for an item that is no reasoning."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
    problem = f"`{where}.type` must be 'message', 'function_call', 'function_call_output' or 'reasoning'"
    raise ApiError(problem, parameter=f"{where}.type")


def _texts(parts: Any) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _content(given: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message, its parts as those of a chat."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ApiError(f"`{where}` must be a text or a list of parts", parameter=where)
    made: list[dict[str, Any]] = []
    for at, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in TEXTS:
            made.append({"type": "text", "text": part.get(TEXTS[kind])})
        elif kind == "input_image":
            detail = part.get("detail", "auto")
            made.append({"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": detail}})
        else:
            place = f"{where}[{at}]"
            problem = f"`{place}` must be a part of type 'input_text', 'output_text' or 'input_image'"
            raise ApiError(problem, parameter=place)
    return made


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as that of a chat, which has its fields one level deeper."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(f"`{where}` must be of type 'function'", parameter=where)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == ALLOWED:
        given = choice.get("tools")
        tools = [_choice(one) for one in given] if isinstance(given, list) else given
        return {"type": ALLOWED, ALLOWED: {"mode": choice.get("mode"), "tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


@dataclass
class ResponsesReply:
    """Builds the response to one request while its answer is generated; as `ResponseBuilder`, see there.

    `shown` are the fields of the request that the response repeats.
    """

    request: CompletionRequest
    shown: Mapping[str, Any]
    model: str
    choices: Sequence[CompletionChoice]
    id_of_call: Callable[[str], str] = str
    bytes_of: Callable[[int], bytes] = lambda token: b""
    completion_tokens: int = 0
    cached_tokens: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._head = {"id": f"resp_{secrets.token_hex(16)}", "object": "response", "created_at": int(time.time())}
        self._number, self._open, self._finish = 0, "", ""
        self._text: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._reasoning_tokens = 0

    def add(self, delta: ChoiceDelta) -> None:
        for _ in self.chunks(delta):
            pass

    def whole(self) -> dict[str, Any]:
        """The complete response, for a request without `stream`."""
        for _ in self._end():
            pass
        return self._response(self._status)

    def chunks(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of one step."""
        yield from self._begin()
        self.completion_tokens += delta.tokens
        self.cached_tokens += delta.cached
        self._finish = delta.finish or self._finish
        found = [self._object(one) for one in delta.logprobs] if self.request.logprobs is not None else []
        if delta.text:
            yield from self._grow(CONTENT, delta.text, found)
        for part in delta.parts:
            if part.kind == CALL:
                yield from self._call(part.name, part.text)
            else:
                yield from self._grow(part.kind, part.text, found if part.kind == CONTENT else [])
        self._reasoning_tokens += delta.tokens * (self._open == REASONING)

    def last(self) -> Iterator[bytes]:
        """The events at the end of a stream."""
        yield from self._begin()
        yield from self._end()
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, error: ApiError) -> bytes:
        """The event for an error after the stream has begun."""
        return self._event("error", code=error.code, message=error.message, param=error.parameter)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _begin(self) -> Iterator[bytes]:
        if not self._number:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def _end(self) -> Iterator[bytes]:
        """The end of the last item; an answer without any is an empty message."""
        if not self.output:
            yield from self._start(CONTENT)
        yield from self._close()

    def _grow(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        """New text of the open item, or of a new one of another kind."""
        if self._open != kind:
            yield from self._close()
            yield from self._start(kind)
        self._text.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if kind == CONTENT else {}
        yield self._event(f"response.{_name(kind)}.delta", **self._place, content_index=0, delta=text, **more)

    def _start(self, kind: str) -> Iterator[bytes]:
        self._open, self._text, self._logprobs = kind, [], []
        if kind == CONTENT:
            item: dict[str, Any] = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant"}
            item |= {"status": "in_progress", "content": []}
        else:
            item = {"id": f"rs_{secrets.token_hex(16)}", "type": "reasoning", "summary": [], "content": []}
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=dict(item))
        yield self._event("response.content_part.added", **self._place, content_index=0, part=self._part())

    def _close(self) -> Iterator[bytes]:
        """The events of an item's end, with all of its text."""
        if not self._open:
            return
        item, kind, part = self.output[-1], self._open, self._part()
        more = {"logprobs": self._logprobs} if kind == CONTENT else {}
        done = {**self._place, "content_index": 0, "text": part["text"], **more}
        yield self._event(f"response.{_name(kind)}.done", **done)
        yield self._event("response.content_part.done", **self._place, content_index=0, part=part)
        item["content"] = [part]
        if kind == CONTENT:
            item["status"] = self._status
        yield self._event("response.output_item.done", output_index=self._index, item=dict(item))
        self._open = ""

    def _call(self, name: str, arguments: str) -> Iterator[bytes]:
        yield from self._close()
        identity = self.id_of_call(secrets.token_hex(12))
        item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "call_id": identity, "name": name}
        self.output.append({**item, "arguments": arguments, "status": "completed"})
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        of_arguments = "response.function_call_arguments"
        for start in range(0, len(arguments), ARGUMENTS):
            yield self._event(f"{of_arguments}.delta", **self._place, delta=arguments[start : start + ARGUMENTS])
        yield self._event(f"{of_arguments}.done", **self._place, name=name, arguments=arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=self.output[-1])

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._index}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._text)
        if self._open == CONTENT:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _object(self, one: TokenLogprob) -> dict[str, Any]:
        def named(token: int, logprob: float | None) -> dict[str, Any]:
            content = self.bytes_of(token)
            return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}

        return {**named(one.token, one.logprob), "top_logprobs": [named(*top) for top in one.top]}

    def _response(self, status: str) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.model,
            "output": list(self.output),
            **self.shown,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if status == "in_progress" else self.usage(),
        }

    @property
    def prompt_tokens(self) -> int:
        return len(self.choices[0].ids)

    def usage(self) -> dict[str, Any]:
        """Token counts; of reasoning those that came while its item was open."""
        count = self.prompt_tokens
        return {
            "input_tokens": count,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": count + self.completion_tokens,
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


def _name(kind: str) -> str:
    return "output_text" if kind == CONTENT else "reasoning_text"
