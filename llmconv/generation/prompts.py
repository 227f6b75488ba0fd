"""Prompts: texts or chats, as Python values and in files, and as a model takes them.

That is tokens, embeddings in place of some of them, and values of the model's extra inputs.
"""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np

from llmconv.checkpoint import StrictJsonError, first_strict_error, parse_strictly
from llmconv.errors import InputRefused, MalformedInput, UsageProblem, first_line
from llmconv.files.paths import kind_of, path_of
from llmconv.files.safetensors_file import read_header
from llmconv.runtime.extra_inputs import BATCH, PAST, ExtraInput, GivenInputs, ModelCall
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.runtime.tokenizer import require_contents
from llmconv.tensors import BY_NAME, Array

PromptContent = str | list[dict[str, Any]]  # a text, or a chat as a list of messages


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
            several = [one if isinstance(one, Prompt) else Prompt(one) for one in prompts]
            return [replace(one, content=contents_of([one.content])[0]) for one in several]
    return [Prompt(content) for content in contents_of(prompts)]


def contents_of(prompts: Any) -> list[PromptContent]:
    """Texts and chats, or a single one, as a list; raises UsageProblem for anything else, or none."""
    if isinstance(prompts, str):
        return [prompts]
    odd = isinstance(prompts, bytes | bytearray | Mapping | set | frozenset | os.PathLike)
    if odd or not isinstance(prompts, Iterable):
        raise UsageProblem(f"`prompts` is {kind_of(prompts)}", hint=NOT_PROMPTS)
    if not (found := list(prompts)):
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
            is_number = hasattr(prompt, "__index__") and not hasattr(prompt, "__len__")
            hint = "put a single prompt into a list: `[tokens]`" if is_number else NOT_TOKENS
            raise UsageProblem(f"prompt {number} is {kind_of(prompt)}, not a list of tokens", hint=hint) from error
        if min(tokens, default=0) < 0:
            raise UsageProblem(f"prompt {number} has the token {min(tokens)}", hint="tokens count from 0")
        lists.append(tokens)
    return lists


def with_prefix(content: PromptContent, prefix: str) -> PromptContent:
    """The prompt with `prefix` before it; in a chat, before the first message that is not a system message."""
    if not prefix or isinstance(content, str):
        return prefix + content if isinstance(content, str) else content
    require_contents(content)
    first = next((at for at, message in enumerate(content) if message["role"] != "system"), 0)
    given = content[first]["content"]
    in_parts = isinstance(given, list | tuple)
    longer = [{"type": "text", "text": prefix}, *given] if in_parts else prefix + (given or "")
    return [*content[:first], {**content[first], "content": longer}, *content[first + 1 :]]


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


# fields of a JSON object that are a prompt: llmconv's own, Alpaca's and PaddleNLP's. `messages` is a chat
TEXT_FIELDS = ("prompt", "instruction", "src")
FORMS = "give one text per line, an object with `prompt` or `messages` per line, or an array of these"
EXAMPLE = 'write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, or name the field: --prompt-field'


def read_prompts(source: str | Path | TextIO, prompt_field: str | None = None) -> list[Prompt]:
    """Prompts of a file: one text per line, one JSON value per line, or one JSON array.

    An object has `prompt`, `messages`, `instruction` or `src`; an array of messages is a chat, a string is a text. A
    file is JSON if its name ends in `.jsonl` or `.json`, if its first line is an object or an array, or if it is one
    JSON value as a whole. Empty lines are skipped. Relative paths in it begin in its folder, those on standard input in
    the current one.

    Args:
        source: path of the file, or the file itself.
        prompt_field: field of the objects that has the prompt, a text or a chat; None for the fields above.

    Raises:
        InputRefused: the file cannot be read, or has no prompt.
        MalformedInput: an object has none of these fields, or several; or a file is not valid JSON.
    """
    base, found = Path(source).parent if isinstance(source, str | Path) else Path(), []
    for prompt in _read(source, prompt_field):
        rows, images = base / prompt.embeddings if prompt.embeddings else None, [base / one for one in prompt.images]
        found.append(replace(prompt, embeddings=rows, images=tuple(images)))
    return found


def _read(source: str | Path | TextIO, prompt_field: str | None) -> list[Prompt]:
    text, is_json = _text(path_of(source, "source") if isinstance(source, str | Path) else source)
    document = _document(text)
    is_named = isinstance(source, str | Path) and Path(source).suffix == ".json"
    if document is not None or (is_named and not _is_json(text.strip().partition("\n")[0])):
        return _of_document(document, text, prompt_field)
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    found = [Prompt(line) for _, line in lines]
    if is_json or (lines and _is_json(lines[0][1])):
        found = [_of_json(number, line, prompt_field) for number, line in lines]
    elif prompt_field and lines:
        problem = "`--prompt-field` needs JSON objects, but the prompts are lines of text"
        raise MalformedInput(problem, hint="leave it out")
    if not found:
        raise InputRefused("no prompts", hint="give `--prompt TEXT`, or `--prompt-file FILE` with one prompt per line")
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
    """The JSON array, or object over several lines, that a text is as a whole; None for a prompt per line.

    Raises MalformedInput if the first line opens an array or object that is not valid JSON.
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


def _of_document(document: Any, text: str, field: str | None) -> list[Prompt]:
    """The prompts of a JSON document: an array, or one object with the fields of a prompt."""
    try:
        document = json.loads(text) if document is None else document
        found_slip = first_strict_error(text)
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"the prompts are not valid JSON: {_reason(error)}", hint=FORMS) from error
    if found_slip:
        line, slip = found_slip
        raise _slipped(f"the value that begins in line {line} of the prompts", slip)
    if _is_chat(document):
        require_contents(document, "the prompts")
        return [Prompt(document)]
    if isinstance(document, dict) and not {field or "messages", *TEXT_FIELDS} & document.keys():
        raise MalformedInput("the prompts are one JSON object without `prompt` or `messages`", hint=FORMS)
    items = document if isinstance(document, list) else [document]
    found = [_of_item(f"item {number}", item, field) for number, item in enumerate(items, start=1)]
    if not found:
        raise InputRefused("no prompts", hint="the array is empty")
    return found


def _of_item(name: str, item: Any, field: str | None) -> Prompt:
    if isinstance(item, str):
        return Prompt(item)
    if _is_chat(item):
        require_contents(item, f"{name} of the prompts")
        return Prompt(item)
    # the prompt of a JSON object; `name` is its line or item, for messages
    given = item if isinstance(item, dict) else {}
    content, used = _content(name, given) if field is None else (_chosen(name, given, field), {field})
    fields = {key: value for key, value in given.items() if key not in used}
    others = {**_embeddings(name, given), "inputs": _inputs(name, given)}
    return Prompt(content, fields, **others, images=_images(name, given))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _of_json(number: int, line: str, field: str | None) -> Prompt:
    try:
        value = parse_strictly(line)
    except StrictJsonError as slip:
        raise _slipped(f"line {number} of the prompts", slip) from slip
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        problem = f"line {number} of the prompts is not valid JSON: {reason}"
        raise MalformedInput(problem, hint="one object per line") from error
    return _of_item(f"line {number}", value, field)


def _slipped(where: str, slip: StrictJsonError) -> MalformedInput:
    return MalformedInput(f"in {where}: {slip}", hint=slip.hint)


def _inputs(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The field `inputs` of a JSON object: values of extra inputs; a text is a field of the caller's own."""
    found = given.get("inputs", "")
    if not isinstance(found, dict | str):
        problem = f"`inputs` in {name} of the prompts is {kind_of(found)}"
        raise MalformedInput(problem, hint='write {"prompt": "…", "inputs": {"token_type_ids": [0, 0, 1]}}')
    return found if isinstance(found, dict) else {}


def _images(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The field `image`, or `images`, of a JSON object: a path or several."""
    named = [name for name in ("image", "images") if given.get(name) is not None]
    if len(named) > 1:
        raise MalformedInput(f"{name} of the prompts has both `image` and `images`", hint="write one of them")
    found = given[named[0]] if named else None
    several = [] if found is None else [found] if isinstance(found, str) else found
    if not isinstance(several, list) or not all(isinstance(one, str) and one and "\0" not in one for one in several):
        problem = f"`{named[0]}` in {name} of the prompts is not a path"
        raise MalformedInput(problem, hint="give the path of an image, or a list of paths")
    return tuple(several)


def _embeddings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: given[key] for key in ("embeddings", "placeholder") if given.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, str) or not value or "\0" in value:
            hint = "`embeddings` is the path of a .npy or .safetensors, `placeholder` a token"
            raise MalformedInput(f"`{key}` in {name} of the prompts is not a text", hint=hint)
    if found.keys() == {"placeholder"}:
        raise MalformedInput(f"{name} of the prompts has a `placeholder` without `embeddings`", hint="leave it out")
    return found


def _content(name: str, given: Mapping[str, Any]) -> tuple[PromptContent, set[str]]:
    messages: Any = given.get("messages")
    if _is_chat(messages) and given.get("prompt") is None:
        require_contents(messages, f"{name} of the prompts")
        return list(messages), {"prompt", "messages"}
    # the field of `TEXT_FIELDS` that has the text; others may be metadata if there is a `prompt`
    found = [field for field in TEXT_FIELDS if isinstance(given.get(field), str)]
    if found and "prompt" in given:
        found = found[: found[0] == "prompt"]
    if not found or given.get("messages") is not None:
        problem = f"{name} of the prompts has neither a text `prompt` nor a chat in `messages`"
        raise MalformedInput(problem, hint=EXAMPLE)
    if len(found) > 1:
        problem = f"{name} of the prompts has `{found[0]}` and `{found[1]}`"
        raise MalformedInput(problem, hint="select one of them with `--prompt-field`")
    field = found[0]
    prompt, context = given[field], given.get("input")
    if not isinstance(context, str):
        return prompt, {field}
    is_empty = not context.strip()  # as in most lines of Alpaca's data
    return prompt if is_empty else [{"role": "user", "content": prompt, "input": context}], {field, "input"}


def _chosen(name: str, given: Mapping[str, Any], field: str) -> PromptContent:
    """The text or chat in a field that the caller names."""
    content: Any = given.get(field)
    if _is_chat(content):
        require_contents(content, f"{name} of the prompts")
    elif not isinstance(content, str):
        problem = f"has no `{field}`" if content is None else f"has {kind_of(content)} in `{field}`"
        raise MalformedInput(f"{name} of the prompts {problem}", hint="give a `--prompt-field` that has a text or chat")
    return content if isinstance(content, str) else list(content)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def is_message(message: Any) -> bool:
    """Whether a value has the form of a message; `require_contents` checks the content."""
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a model takes it: tokens, and a function that makes embeddings for some of them, or None."""

    ids: list[int]
    embeddings: Callable[[], PromptEmbeddings] | None = None


def with_embeddings(prompt: Prompt, ids: list[int], tokenizer: Any, name: str = "the prompt") -> EncodedPrompt:
    """A prompt with its own embeddings, placed among the tokens `ids`; raises as `read_embeddings` and `placed`."""
    token = token_of(tokenizer, prompt.placeholder) if prompt.placeholder else None

    def found() -> tuple[list[int], PromptEmbeddings]:
        given = prompt.embeddings
        rows = read_embeddings(Path(given)) if isinstance(given, str | Path) else as_embeddings(given)
        return placed(ids, rows, token, name)

    return EncodedPrompt(found()[0], lambda: found()[1])


FORM = "give an array of floats [tokens, hidden]"
LARGEST = 1 << 30  # maximum number of bytes of the embeddings of one prompt, in float32


def as_embeddings(value: Any, name: str = "`embeddings`") -> Array:
    """Floats of an array or a torch tensor as float32 [tokens, hidden]; UsageProblem for others, or not finite ones."""
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().float().cpu()
    if not hasattr(value, "__array__"):
        raise UsageProblem(f"{name} is {kind_of(value)}, not an array", hint=FORM)
    array = np.asarray(value)
    is_float = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    if problem := _form_problem(array.shape, str(array.dtype), is_float):
        raise UsageProblem(f"{name} {problem}", hint=FORM)
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise UsageProblem(f"{name} contains NaN or infinity, or exceeds float32", hint="give finite numbers")
    return rows


def read_embeddings(path: Path) -> Array:
    """The embeddings in a `.npy` file, or one tensor of safetensors, float32 [tokens, hidden]; raises InputRefused."""
    if not path.is_file():
        raise InputRefused(f"the embeddings `{path}` are not a file", hint="give the path of a .npy or .safetensors")
    array = _safetensors(path) if path.suffix == ".safetensors" else _npy(path)
    try:
        return as_embeddings(array, f"`{path}`")
    except UsageProblem as error:
        raise InputRefused(error.message, hint=error.hint) from error


def _npy(path: Path) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, about files of Python 2
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # refuses a shape larger than the file
    except Exception as error:  # the header is text of Python, whose parser raises anything
        reason = first_line(error)
        raise MalformedInput(f"`{path}` is not a numpy array: {reason}", hint="save it again: `np.save`") from error
    if not isinstance(array, np.ndarray):
        raise MalformedInput(f"`{path}` is not a single array", hint="save one array: `np.save`")
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _safetensors(path: Path) -> Array:
    tensors = read_header(path).tensors
    if len(tensors) != 1:
        raise InputRefused(f"`{path}` has {len(tensors)} tensors", hint="save one tensor: the embeddings")
    tensor = next(iter(tensors.values()))
    if problem := _form_problem(tensor.shape, tensor.dtype.name, tensor.dtype.name in FLOAT_NAMES):
        raise InputRefused(f"`{path}` {problem}", hint=FORM)
    return tensor.read()


FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


def _form_problem(shape: tuple[int, ...], dtype: str, is_float: bool) -> str:
    """Why an array of that form is not embeddings; empty if it is."""
    if not is_float or len(shape) != 2 or 0 in shape:
        return f"has dtype {dtype} and shape {list(shape)}"
    return f"has {shape[0]} rows of {shape[1]} numbers, too many" if 4 * shape[0] * shape[1] > LARGEST else ""


def placed(ids: list[int], rows: Array, token: int | None, name: str) -> tuple[list[int], PromptEmbeddings]:
    """The tokens of a prompt with places for embeddings `rows` [count, hidden], and the embeddings in these places.

    `token`, whose places they take, must occur once, for all rows, or once per row (else InputRefused); None places the
    embeddings before the prompt.
    """
    count = len(rows)
    if token is None:
        return [0] * count + ids, PromptEmbeddings(np.arange(count), rows, before=count)
    found = ids.count(token)
    if found == 1:
        first = ids.index(token)
        ids = [*ids[:first], *[token] * count, *ids[first + 1 :]]
    elif found != count:
        problem = f"{name} has {found} placeholder tokens, and there are {count} embeddings"
        raise InputRefused(problem, hint="write the placeholder once, for all embeddings, or once per embedding")
    return ids, PromptEmbeddings(np.flatnonzero(np.array(ids) == token), rows)


def token_of(tokenizer: Any, placeholder: str) -> int:
    """The token id of a placeholder text; raises InputRefused if it is not one token of the vocabulary."""
    found = tokenizer.get_vocab().get(placeholder)
    if found is None:
        hint = "give a token of its vocabulary, or none: the embeddings then precede the prompt"
        raise InputRefused(f"the placeholder `{placeholder}` is not a token of the tokenizer", hint=hint)
    return int(found)


def require_size(size: int | None, rows: Array, why: str) -> None:
    """Raises LlmconvError unless embeddings [count, hidden] have the model's `size`; `why` if that is None."""
    if size is None:
        raise UsageProblem("the model takes tokens, and no embeddings", hint=why)
    if rows.shape[1] != size:
        problem = f"the embeddings have {rows.shape[1]} numbers per token, and those of the model {size}"
        raise InputRefused(problem, hint="were they made for another model?")


# numbers or nested lists by name of an extra input, without the axis of the batch; tokens are those of the prompt
RequestInputs = Mapping[str, Any]
# numpy's kinds of the numbers that an input of a dtype may be given as
KINDS = {"int64": "iu", "int32": "iu", "bool": "b", "float32": "fiu"}


def given_inputs(given: RequestInputs, tokens: int, known: Mapping[str, ExtraInput], name: str) -> GivenInputs:
    """The values of a prompt of `tokens` tokens, checked (InputRefused) against the resolved inputs `known`."""
    if not isinstance(given, Mapping):
        raise InputRefused(f"the inputs of {name} are {kind_of(given)}", hint='give {"name": values}')
    return GivenInputs(tokens, {one: _array(one, value, tokens, known, name) for one, value in given.items()})


def _array(input_name: str, value: Any, tokens: int, known: Mapping[str, ExtraInput], prompt: str) -> Array:
    extra = known.get(input_name)
    if extra is None or PAST in extra.axes:
        names = ", ".join(f"`{one}`" for one, row in known.items() if PAST not in row.axes) or "none"
        raise InputRefused(f"{prompt} gives `{input_name}`, which the model does not take", hint=f"it takes {names}")
    try:
        array = np.asarray(value)
    except ValueError as error:
        message = f"{prompt} gives `{input_name}` as lists of different lengths"
        raise InputRefused(message, hint="give one number for each element") from error
    if array.dtype.kind in KINDS[extra.dtype]:
        array = array.astype(BY_NAME[extra.dtype].numpy)
    without_batch = replace(extra, axes=tuple(axis for axis in extra.axes if axis != BATCH))
    ids = np.ones((1, tokens), dtype=np.int64)  # only their sizes count
    if problem := without_batch.misfit(array, ModelCall(ids, ids, ids)):
        hint = f"the prompt has {tokens} tokens" if extra.by_token else "see docs/adding-a-family.md"
        raise InputRefused(f"{prompt} gives `{input_name}` as {problem}", hint=hint)
    return array


def require_together(rows: Sequence[GivenInputs], known: Mapping[str, ExtraInput]) -> None:
    """Raises UsageProblem for values that the prompts of one batch cannot have together.

    That is, if an input has no axis of the batch and its values differ, or only some prompts replace a computed value.
    """
    for name in {name for row in rows for name in row.values}:
        arrays = [row.values.get(name) for row in rows]
        shared = BATCH not in known[name].axes
        if (shared or callable(known[name].default)) and any(array is None for array in arrays):
            raise UsageProblem(f"not all prompts of a batch give `{name}`", hint="give it for all, or `--batch-size 1`")
        if shared and not all(np.array_equal(arrays[0], array) for array in arrays):  # type: ignore[arg-type]
            problem = f"`{name}` has one value for a batch, and its prompts differ"
            raise UsageProblem(problem, hint="give `--batch-size 1`")


def prompt_names(count: int) -> list[str]:
    return ["the prompt"] if count == 1 else [f"prompt {at}" for at in range(1, count + 1)]
