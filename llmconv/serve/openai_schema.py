"""OpenAI's requests: values are checked, and `field_table.py` says which fields are refused by name or ignored.

Images in messages are parts of type `image_url` whose URL contains the image; the server fetches nothing.

Sources: OpenAI's API reference, "Create chat completion" and "Create completion"; RFC 2397 for `data:` URLs.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.checkpoint import StrictJsonError, parse_strictly
from llmconv.errors import short
from llmconv.generation.structured import Structure
from llmconv.generation.token_rules import MOST, TokenRules
from llmconv.serve.answer_forms import ToolUse, calls_of, structure_of, template_fields, tool_answer, tools_of
from llmconv.serve.field_table import CHAT, COMPLETIONS, finish
from llmconv.serve.fields import ApiError, Fields, checked_text

MAX_CHOICES = 16
MAX_IMAGES = 8
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOKENS = 1_000_000
COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for completions; chat answers have none
# role of a message to the role in chat templates
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling fields, None for the model's default; some are not OpenAI's, but common in servers of open models."""

    max_tokens: int | None  # maximum number of new tokens per choice
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]  # texts that end an answer
    choices: int  # answers per prompt, of which the client gets `wanted`
    wanted: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    rules: TokenRules = TokenRules()


@dataclass(frozen=True)
class CompletionRequest:
    """A request to either endpoint."""

    model: str | None  # model name; None if the request has none
    # role and content of a chat; empty for a completion. Content is a text, or a list of parts: `{"type": "image"}`
    # stands for the next of `images`
    messages: tuple[Mapping[str, Any], ...]
    prompts: tuple[str | tuple[int, ...], ...]  # texts or token ids of a completion; empty for a chat
    sampling: SamplingOptions
    stream: bool  # send the answer in pieces
    include_usage: bool  # end the stream with token counts
    usage_in_chunks: bool = False  # token counts so far in every event
    logprobs: int | None = None  # number of likeliest tokens beside each one; None for no log-probabilities
    token_ids: bool = False  # whether tokens of log-probabilities are named by their ids
    continues: bool | None = None  # whether a last message of the assistant is continued; None where there is one
    add_generation_prompt: bool = True
    echo: bool = False  # begin a completion with its prompt
    add_special_tokens: bool = True  # of a completion's text, such as a start token
    images: tuple[bytes, ...] = ()  # image files of the chat, in order
    structure: Structure | None = None  # the form of the text
    tools: ToolUse = ToolUse()
    template_fields: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    unknown: tuple[str, ...] = ()  # names of fields that have no effect

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def variables(self) -> Mapping[str, Any]:
        """What the chat template is given, apart from tools."""
        if self.continues is None and self.add_generation_prompt:
            return self.template_fields
        goes_on = bool(self.continues)
        return {
            **self.template_fields,
            "continue_final_message": goes_on,
            "add_generation_prompt": self.add_generation_prompt and not goes_on,
        }


def parse_json(body: bytes) -> Any:
    """A request's JSON; ApiError if invalid, too deep, with a duplicate key or a number not finite or too long."""
    try:
        return parse_strictly(body)
    except StrictJsonError as slip:
        raise ApiError(f"in the body: {slip}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {short(error, 200)}", code="invalid_json") from None


def chat_request(content: Any) -> CompletionRequest:
    """Parses the body of `/v1/chat/completions`; raises ApiError for missing, invalid and unsupported fields."""
    fields = Fields(content)
    if not (messages := fields.take("messages", list)):
        raise ApiError("`messages` must be a list of at least one message", parameter="messages")
    tools, variables = tools_of(fields), template_fields(fields)
    most = fields.number("max_completion_tokens", int, 1, MAX_TOKENS)
    deprecated = fields.number("max_tokens", int, 1, MAX_TOKENS)
    images: list[bytes] = []
    found: list[Mapping[str, Any]] = []
    for at, message in enumerate(messages):
        found.append(_message(message, f"messages[{at}]", images, found))
    wants, top = fields.flag("logprobs"), fields.number("top_logprobs", int, 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        raise ApiError("`top_logprobs` needs `logprobs`: true", parameter="top_logprobs")
    ending = _ending(fields, found[-1]["role"])
    request = _request(fields, CHAT, most if most is not None else deprecated, (top or 0) if wants else None)
    if request.structure and tools.forced:
        raise ApiError("a call that `tool_choice` forces has no other form", parameter="tool_choice")
    given: dict[str, Any] = {"images": tuple(images), "tools": tools, "template_fields": variables, **ending}
    return replace(request, messages=tuple(found), **given)


def _ending(fields: Fields, last: str) -> dict[str, bool | None]:
    """How the prompt of a chat ends, whose last message is of the role `last`."""
    continues, add = fields.take("continue_final_message", bool), fields.take("add_generation_prompt", bool)
    if continues and last != "assistant":
        problem = "`continue_final_message` needs a last message of the assistant"
        raise ApiError(problem, parameter="continue_final_message")
    if continues and add:
        problem = "`continue_final_message` and `add_generation_prompt` exclude each other"
        raise ApiError(problem, parameter="add_generation_prompt")
    if continues is None and add is not None:
        continues = False
    return {"continues": continues, "add_generation_prompt": add is not False}


def completion_request(content: Any) -> CompletionRequest:
    """Parses the body of `/v1/completions`; raises ApiError for missing, invalid and unsupported fields."""
    fields = Fields(content)
    prompts = _prompts(fields.take("prompt", str | list))
    most, echo = fields.number("max_tokens", int, 0, MAX_TOKENS), fields.flag("echo")
    special = fields.take("add_special_tokens", bool) is not False
    logprobs, best = fields.number("logprobs", int, 0, MAX_TOP_LOGPROBS), fields.number("best_of", int, 1, MAX_CHOICES)
    request = _request(fields, COMPLETIONS, COMPLETION_TOKENS if most is None else most, logprobs)
    sampling, rules = request.sampling, request.sampling.rules
    if best is not None and best < sampling.wanted:
        raise ApiError(f"`best_of` must be at least `n`, {sampling.wanted}", parameter="best_of")
    if best is not None and best > sampling.wanted:
        if request.stream:
            problem = "`best_of` does not stream: which answers are the best is known at the end"
            raise ApiError(problem, parameter="best_of")
        rules = replace(rules, top_logprobs=rules.top_logprobs or 0)
        request = replace(request, sampling=replace(sampling, choices=best, rules=rules))
    return replace(request, prompts=prompts, echo=echo, add_special_tokens=special)


def _request(fields: Fields, endpoint: str, max_tokens: int | None, logprobs: int | None) -> CompletionRequest:
    """The fields that both endpoints have; ApiError for what is left."""
    options = Fields(fields.take("stream_options", dict) or {}, "stream_options.")
    usage, in_chunks = options.flag("include_usage"), options.flag("continuous_usage_stats")
    sampling, stream, model = _sampling(fields, max_tokens, logprobs), fields.flag("stream"), fields.take("model", str)
    structure, token_ids = structure_of(fields), fields.flag("return_tokens_as_token_ids")
    unknown = finish(fields, endpoint)
    many: dict[str, Any] = {"usage_in_chunks": usage and in_chunks, "logprobs": logprobs, "token_ids": token_ids}
    many["unknown"] = unknown
    return CompletionRequest(model, (), (), sampling, stream, usage, structure=structure, **many)


def _sampling(fields: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
    choices = fields.number("n", int, 1, MAX_CHOICES) or 1
    skips = fields.take("skip_special_tokens", bool)
    rules = TokenRules(
        logit_bias=_biases(fields.take("logit_bias", dict) or {}),
        presence_penalty=fields.number("presence_penalty", float, -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", float, -2, 2) or 0.0,
        min_tokens=fields.number("min_tokens", int, 0, MAX_TOKENS) or 0,
        top_logprobs=logprobs,
        include_stop=fields.flag("include_stop_str_in_output"),
    )
    if max_tokens is not None and rules.min_tokens > max_tokens:
        raise ApiError(f"`min_tokens` is more than the {max_tokens} tokens of the answer", parameter="min_tokens")
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", float, 0, 2),
        top_p=fields.number("top_p", float, 0, 1),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", float, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", float, 0.01, 100),
        seed=fields.number("seed", int, -(2**63), 2**63 - 1),
        stop=_stops(fields.take("stop", str | list)),
        choices=choices,
        wanted=choices,
        stop_token_ids=_stop_tokens(fields.take("stop_token_ids", list) or []),
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=skips is not False,
        rules=rules,
    )


def _top_k(fields: Fields) -> int | None:
    """The field of that name; -1 is vLLM's word for all tokens."""
    value = fields.number("top_k", int, -1)
    return 0 if value == -1 else value


TOKEN = re.compile(r"[0-9]{1,9}")


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not TOKEN.fullmatch(name) or not is_number:
            problem = "`logit_bias` must be an object of token ids, as texts, and numbers"
            raise ApiError(problem, parameter="logit_bias")
        found[int(name)] = float(min(max(value, -MOST), MOST))
    if len(given) > MAX_BIASES:
        raise ApiError(f"`logit_bias` has at most {MAX_BIASES} tokens", parameter="logit_bias")
    return found


def _stop_tokens(given: Sequence[Any]) -> frozenset[int]:
    if len(given) > MAX_STOP_TOKENS or not all(_is_token(one) and 0 <= one < 2**31 for one in given):
        problem = f"`stop_token_ids` must be a list of up to {MAX_STOP_TOKENS} token ids"
        raise ApiError(problem, parameter="stop_token_ids")
    return frozenset(given)


def _stops(value: str | list[Any] | None) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(f"`stop` must be one to {MAX_STOPS} texts that are not empty", parameter="stop")
    return tuple(checked_text(stop, "stop") for stop in stops)


def _message(message: Any, where: str, images: list[bytes], before: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A checked message after those `before` it; its images are added to `images`."""
    if not isinstance(message, dict):
        raise ApiError(f"`{where}` must be an object with role and content", parameter=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(f"'{name}'" for name in ROLES)
        raise ApiError(f"`{where}.role` must be one of {known}", parameter=f"{where}.role")
    calls, content = calls_of(message, where), message.get("content")
    if role == "assistant" and content is None and not calls and "content" in message:
        content = message.get("refusal") or ""  # clients repeat an answer without a text as it came
    if content is None and not calls:
        found = "is null" if "content" in message else "is missing"
        problem = f"`{where}.content` {found} but must be a text: only messages of the assistant need none"
        raise ApiError(problem, parameter=f"{where}.content")
    made = {
        "role": ROLES[role],
        "content": content if content is None else _content(content, f"{where}.content", images),
    }
    if calls:
        made["tool_calls"] = calls
    if role == "tool":
        made |= tool_answer(message, where, before)
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        made["reasoning_content"] = checked_text(reasoning, f"{where}.reasoning_content")
    return made


def _content(content: Any, where: str, images: list[bytes]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return checked_text(content, where)
    if not isinstance(content, list) or not content:
        raise ApiError(f"`{where}` must be a text or a list of parts of text", parameter=where)
    return [_part(part, f"{where}[{at}]", images) for at, part in enumerate(content)]


def _part(part: Any, where: str, images: list[bytes]) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "image_url":
        if len(images) == MAX_IMAGES:
            raise ApiError(f"a chat has at most {MAX_IMAGES} images", parameter=where)
        images.append(image_of(part, where))
        return {"type": "image"}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") or not isinstance(text := part.get(kind), str):
        raise ApiError(f"`{where}` must be a part of type 'text' or 'image_url'", parameter=where)
    return {"type": "text", "text": checked_text(text, where)}


def _prompts(prompt: str | list[Any] | None) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str) or (prompt and all(map(_is_token, prompt))):
        return (_prompt(prompt, "prompt"),)
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise ApiError(
            f"`prompt` must be a text, token ids, or a list of one to {MAX_PROMPTS} of either", parameter="prompt"
        )
    return tuple(_prompt(one, f"prompt[{at}]") for at, one in enumerate(prompt))


def _prompt(prompt: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return checked_text(prompt, where)
    if isinstance(prompt, Sequence) and prompt and all(map(_is_token, prompt)):
        return tuple(prompt)
    raise ApiError(f"`{where}` must be a text or a list of token ids", parameter=where)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
DETAILS = ("auto", "low", "high")  # values of `detail`, which has no effect: the model's processor decides


def image_of(part: dict[str, Any], where: str) -> bytes:
    """The bytes of the image file in a part of type `image_url`; raises ApiError without a `data:` URL of an image."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not isinstance(given, dict) or given.get("detail", "auto") not in DETAILS:
        raise ApiError(f"`{where}.image_url` must be an object with a `url`", parameter=where)
    if not (start := DATA.match(url)):
        raise ApiError(
            f"`{where}.image_url.url` must be a URL that begins with `data:image/png;base64,` or the like: this server "
            "fetches no images",
            parameter=where,
        )
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"`{where}.image_url.url` is not valid base64", parameter=where) from None
