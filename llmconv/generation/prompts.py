"""Prompts, which are texts or chats: read from files and standard input, and validated."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.paths import kind_of, path_of
from llmconv.files.strict_json import StrictJsonError, first_strict_error, parse_strictly
from llmconv.generation.chat.messages import is_message, require_contents

PromptContent = str | list[dict[str, Any]]
"""A text, or a chat as a list of messages."""

PROMPT_FIELDS = ("prompt", "messages", "input")
"""Fields of a JSON line that make up the prompt; all others are copied to the completion."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file.

    Attributes:
        content: a text or a chat.
        fields: other fields of its line, such as an `id`; they are copied to the line of the completion.
        embeddings: embeddings in the prompt, floats [tokens, hidden]: an array, a torch tensor, or the path of a `.npy`
            or safetensors file; None for none. The graphs must take embeddings (`llmconv export --embeds`).
        placeholder: text of the token whose places they take; empty to place them before the prompt.
        images: images in the prompt, in the order of their placeholders: paths, bytes of files, or images of Pillow.
    """

    content: PromptContent
    fields: Mapping[str, Any] = field(default_factory=dict)
    embeddings: Any = None
    placeholder: str = ""
    images: tuple[Any, ...] = ()


def read_prompts(source: str | Path | TextIO) -> list[Prompt]:
    """Prompts of a file: one text per line, one JSON value per line, or one JSON array.

    An object has `prompt` or `messages`, an array of messages is a chat, a string is a text. A file is JSON if its name
    ends in `.jsonl` or `.json`, if its first line is an object or an array, or if it is one JSON value as a whole.
    Empty lines are skipped. Relative paths in it begin in its folder, those on standard input in the current one.

    Raises:
        InputRefused: the file cannot be read, or has no prompt.
        MalformedInput: an object has neither `prompt` nor `messages`, or both; or a file is not valid JSON.
    """
    base = Path(source).parent if isinstance(source, str | Path) else Path()
    return [_found_from(base, prompt) for prompt in _read(source)]


def _found_from(base: Path, prompt: Prompt) -> Prompt:
    """The prompt with the paths in it found from a folder."""
    rows = base / prompt.embeddings if prompt.embeddings else None
    return replace(prompt, embeddings=rows, images=tuple(base / image for image in prompt.images))


def _read(source: str | Path | TextIO) -> list[Prompt]:
    text, is_json = _text(path_of(source, "source") if isinstance(source, str | Path) else source)
    document = _document(text)
    is_named = isinstance(source, str | Path) and Path(source).suffix == ".json"
    if document is not None or (is_named and not _is_json(text.strip().partition("\n")[0])):
        return _of_document(document, text)
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    found = [Prompt(line) for _, line in lines]
    if is_json or (lines and _is_json(lines[0][1])):
        found = [_of_json(number, line) for number, line in lines]
    if not found:
        raise InputRefused(
            "no prompts",
            hint="write one prompt per line; on the command line give it as an argument, or `--prompt-file FILE`",
        )
    return found


def _text(source: Path | TextIO) -> tuple[str, bool]:
    """The content, and whether the file is JSON by its name."""
    try:
        if isinstance(source, Path):
            return source.read_text(encoding="utf-8-sig"), source.suffix in (".jsonl", ".ndjson")
        return source.read(), False
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise InputRefused(f"the prompts in `{source}` cannot be read: {reason}", hint="give a text file") from error


def _is_json(line: str) -> bool:
    """Whether a line is an object or an array."""
    try:
        return line.lstrip().startswith(("{", "[")) and isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _document(text: str) -> list[Any] | dict[str, Any] | None:
    """A text that is one JSON array, or an object over several lines; None for a prompt per line.

    Raises:
        MalformedInput: the first line opens an array or object that is not valid JSON.
    """
    content = text.strip()
    first = content.partition("\n")[0].strip()
    if not content.startswith(("[", "{")) or (content != first and _is_json(first)):
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        if first in ("[", "{", "[{"):
            raise MalformedInput(f"the prompts are not valid JSON: {_reason(error)}", hint=FORMS) from error
        return None
    return value if isinstance(value, list) or (isinstance(value, dict) and content != first) else None


FORMS = "give one text per line, an object with `prompt` or `messages` per line, or an array of these"


def _of_document(document: Any, text: str) -> list[Prompt]:
    """The prompts of a JSON document: an array, or one object with the fields of a prompt."""
    try:
        document = json.loads(text) if document is None else document
        found_slip = first_strict_error(text)
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"the prompts are not valid JSON: {_reason(error)}", hint=FORMS) from error
    if found_slip:
        line, slip = found_slip
        raise _slipped(f"the value that begins in line {line} of the prompts", slip)
    if isinstance(document, list) and document and all(map(is_message, document)):
        require_contents(document, "the prompts")
        return [Prompt(document)]
    if isinstance(document, dict) and not {"prompt", "messages"} & document.keys():
        raise MalformedInput("the prompts are one JSON object without `prompt` or `messages`", hint=FORMS)
    items = document if isinstance(document, list) else [document]
    found = [_of_item(f"item {number}", item) for number, item in enumerate(items, start=1)]
    if not found:
        raise InputRefused("no prompts", hint="the array is empty")
    return found


def _of_item(name: str, item: Any) -> Prompt:
    if isinstance(item, str):
        return Prompt(item)
    if isinstance(item, list) and item and all(map(is_message, item)):
        require_contents(item, f"{name} of the prompts")
        return Prompt(item)
    return _of_object(name, item)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _of_json(number: int, line: str) -> Prompt:
    try:
        value = parse_strictly(line)
    except StrictJsonError as slip:
        raise _slipped(f"line {number} of the prompts", slip) from slip
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise MalformedInput(
            f"line {number} of the prompts is not valid JSON: {reason}", hint="one object per line"
        ) from error
    return _of_item(f"line {number}", value)


def _slipped(where: str, slip: StrictJsonError) -> MalformedInput:
    return MalformedInput(f"in {where}: {slip}", hint=slip.hint)


def _of_object(name: str, value: Any) -> Prompt:
    """The prompt of a JSON object; `name` is its line or item, for messages."""
    given = value if isinstance(value, dict) else {}
    fields = {key: value for key, value in given.items() if key not in PROMPT_FIELDS}
    return Prompt(_content(name, given), fields, **_embeddings(name, given), images=_images(name, given))


def _images(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The field `image` of a JSON object: a path or several."""
    found = given.get("image")
    several = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(several, list) or not all(isinstance(one, str) and one and "\0" not in one for one in several):
        raise MalformedInput(
            f"`image` in {name} of the prompts is not a path", hint="give the path of an image, or a list of paths"
        )
    return tuple(several)


def _embeddings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `embeddings` and `placeholder` of a JSON object."""
    found = {key: given[key] for key in ("embeddings", "placeholder") if given.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, str) or not value or "\0" in value:
            raise MalformedInput(
                f"`{key}` in {name} of the prompts is not a text",
                hint="`embeddings` is the path of a .npy or .safetensors, `placeholder` a token",
            )
    if found.keys() == {"placeholder"}:
        raise MalformedInput(f"{name} of the prompts has a `placeholder` without `embeddings`", hint="leave it out")
    return found


def _content(name: str, given: Mapping[str, Any]) -> PromptContent:
    prompt, messages = given.get("prompt"), given.get("messages")
    if isinstance(messages, list) and prompt is None and all(is_message(message) for message in messages) and messages:
        require_contents(messages, f"{name} of the prompts")
        return messages
    if not isinstance(prompt, str) or messages is not None:
        raise MalformedInput(
            f"{name} of the prompts has neither a text `prompt` nor a chat in `messages`",
            hint='write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}',
        )
    if isinstance(given.get("input"), str):  # Alpaca's field
        return [{"role": "user", "content": prompt, "input": given["input"]}]
    return prompt


NOT_TOKENS = "give lists of token ids: `model.encode(text)`; texts go to `llmconv.generation.generate`"
NOT_PROMPTS = "give a text, a list of texts, or chats as lists of messages"


def prompts_of(prompts: Any) -> list[Prompt]:
    """Texts, chats and `Prompt` objects as a list of `Prompt`; a single one becomes a list of one.

    Raises:
        UsageProblem: `prompts` is neither, or empty.
    """
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
    """Texts and chats as a list; a single text or chat becomes a list of one.

    Raises:
        UsageProblem: `prompts` is neither, or empty.
    """
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
    """Prompts as lists of token ids.

    Raises:
        UsageProblem: they are texts, one flat list, or not integers from 0 on.
    """
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
    """The prompt with `prefix` before it; in a chat, before the first message that is not a system message.

    Raises:
        InputRefused: see `require_contents`.
    """
    if not prefix or isinstance(content, str):
        return prefix + content if isinstance(content, str) else content
    require_contents(content)
    first = next((at for at, message in enumerate(content) if message["role"] != "system"), 0)
    changed = {**content[first], "content": prefix + str(content[first]["content"])}
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
