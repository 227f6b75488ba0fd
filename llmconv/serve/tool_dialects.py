"""The dialects in which models write calls of tools and their reasoning.

`DIALECTS` has a row per dialect: how a call begins, what reads it, what tells the dialect in a chat template, and how a
forced call is written. A call that is cut off, does not parse, or names no tool of the request stays text, while the
others of its list are calls: nothing is repaired, so that no tool runs with arguments that the model did not write. So
a call is passed on when it is complete.

Sources: the chat templates and model cards of Hermes 2 Pro and Qwen 2.5, Llama 3.1, Mistral 7B v0.3 and Small 3.2,
DeepSeek-V3 and V3.1, Kimi K2, GLM-4.5, Qwen3-Coder, MiniMax-M2, Granite 3, Phi-4-mini, FunctionGemma, Gemma 4 and LFM2;
OpenAI's harmony format for gpt-oss.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmconv.serve.argument_values import FarNumber, NotACall, loaded, typed

CONTENT, REASONING, CALL = "content", "reasoning", "call"
Schemas = Mapping[str, Mapping[str, Any]]  # the JSON Schema of the arguments of each tool by name


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of its content or reasoning, or a whole call, whose `text` is the JSON of its arguments."""

    kind: str
    text: str
    name: str = ""  # the tool that is called


# a text that begins with a marker, whether all of it is there, and the tools, to the calls and the length that they
# take; None if more has to come; raises NotACall
Reader = Callable[[str, bool, Schemas], tuple[list[Part], int] | None]


@dataclass(frozen=True)
class Frame:
    """How a forced call is written: around its name, its arguments, several calls and all of them. `#` is a digit."""

    before_name: str
    after_name: str
    after_arguments: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    several: bool = True


def quoted_frame(
    before: str, behind: str, between: str, key: str = "arguments", *, opening: str = "", closing: str = ""
) -> Frame:
    """A frame of JSON objects with `name` and `key`, each after `before` and followed by `behind`."""
    return Frame(f'{before}{{"name": "', f'", "{key}": ', f"}}{behind}", opening, between, closing)


BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)


def json_end(text: str, start: int) -> int | None:
    """The end of the JSON object or array at `start`, None if it is not there yet; NotACall for something else."""
    if text[start : start + 1] not in ("{", "["):
        if start < len(text):
            raise NotACall
        return None
    depth = 0
    for found in BRACKETS.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0 and found[0] in "}]":
            return found.end()
    return None


def _json(value: Any) -> str:
    """JSON text of a value of `loaded`, or of a literal of Python; ValueError for what JSON does not have."""
    if isinstance(value, FarNumber):
        return value.text
    if isinstance(value, dict):
        keys = [key if isinstance(key, str) else json.dumps(key) for key in value]
        pairs = [f"{_json(key)}: {_json(each)}" for key, each in zip(keys, value.values(), strict=True)]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_json, value))}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def or_text(make: Callable[[], Part], text: str) -> Part:
    """The call that `make` reads, one of several; its text if it is not a call, so that the others are kept."""
    try:
        return make()
    except NotACall:
        return Part(CONTENT, f"{text.strip()}\n")


def with_calls(parts: list[Part]) -> list[Part]:
    """Parts with a call among them; NotACall without any: the text stays as the model wrote it."""
    if not any(part.kind == CALL for part in parts):
        raise NotACall("no call")
    return parts


def call_of(name: Any, arguments: Any, tools: Schemas) -> Part:
    """A call with arguments as an object, or as JSON text of one; NotACall for others, and for an unknown tool."""
    if not isinstance(name, str) or name not in tools:
        raise NotACall(f"unknown tool {name!r:.80}")
    arguments = loaded(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise NotACall("the arguments are not an object")
    try:
        text = _json(arguments)
        text.encode()  # half of a surrogate pair, as `\ud800`, is no text
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from error
    return Part(CALL, text, name)


def skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def after(text: str, start: int, end: str, is_all: bool) -> int | None:
    """The place after `end`, which comes next after white space or is missing at the end of the text; else NotACall."""
    at = skip_space(text, start)
    if text.startswith(end, at):
        return at + len(end)
    if is_all and at == len(text):
        return at
    if not is_all and end.startswith(text[at:]):
        return None
    raise NotACall(f"`{end}` is missing")


def _object(text: str, tools: Schemas) -> Part:
    """The call of an object with `name` and `arguments` or `parameters`."""
    value = loaded(text)
    if not isinstance(value, dict):
        raise NotACall("no object")
    return call_of(value.get("name"), value.get("arguments", value.get("parameters")), tools)


def _objects(text: str, tools: Schemas) -> list[Part]:
    """The calls of an object, or of a list of objects."""
    if not text.startswith("["):
        return [or_text(partial(_object, text, tools), text)]
    parts: list[Part] = []
    at = 0
    while text[at] != "]":
        start = skip_space(text, at + 1)
        if (end := json_end(text, start)) is None:
            raise NotACall("no list")
        parts.append(or_text(partial(_object, text[start:end], tools), text[start:end]))
        at = skip_space(text, end)
        if text[at : at + 1] not in (",", "]"):
            raise NotACall("no list")
    return parts


def read_json(
    text: str, is_all: bool, tools: Schemas, *, begin: str = "", end: str = "", between: str = ""
) -> tuple[list[Part], int] | None:
    """Calls as JSON between `begin` and `end`, several of them with `between`."""
    calls: list[Part] = []
    at = len(begin) if text.startswith(begin) else 0
    while True:
        start = skip_space(text, at)
        stop = json_end(text, start)
        if stop is None:
            return None
        calls += _objects(text[start:stop], tools)
        following = skip_space(text, stop)
        if between and text.startswith(between, following):
            at = following + len(between)
            continue
        if between and following == len(text) and not is_all:
            return None  # another one may come
        done = after(text, stop, end, is_all) if end else stop
        return None if done is None else (with_calls(calls), done)


NAMED = re.compile(r"\s*([\w.:/-]+?)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def read_mistral(text: str, is_all: bool, tools: Schemas) -> tuple[list[Part], int] | None:
    """`[TOOL_CALLS]` and a list of objects, or, since tokenizer v11, a name, `[ARGS]` and the arguments."""
    at = skip_space(text, len("[TOOL_CALLS]"))
    if text.startswith("[", at) and not text.startswith(("[ARGS]", "[CALL_ID]"), at):
        return read_json(text, is_all, tools, begin="[TOOL_CALLS]")
    found = NAMED.match(text, at)
    if not found:
        if re.fullmatch(r"[\w.:/\[\]\s-]*", text[at:]):
            return None
        raise NotACall
    end = json_end(text, found.end())
    return None if end is None else ([call_of(found[1], loaded(text[found.end() : end]), tools)], end)


SECTION = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Sections:
    """Calls in a section, each with marks around its name and its arguments, as DeepSeek and Kimi K2 write them."""

    opening: str
    begin: str
    before_name: str
    after_name: str  # between name and arguments
    after_arguments: str
    closing: str

    def read(self, text: str, is_all: bool, tools: Schemas) -> tuple[list[Part], int] | None:
        calls: list[Part] = []
        at = len(self.opening)
        while True:
            start = skip_space(text, at)
            if calls and (text.startswith(self.closing, start) or (is_all and start == len(text))):
                return with_calls(calls), min(start + len(self.closing), len(text))
            if not text.startswith(self.begin, start):
                if not is_all and any(mark.startswith(text[start:]) for mark in (self.begin, self.closing)):
                    return None
                raise NotACall
            place = text.find(self.after_name, start + len(self.begin))
            if place < 0:
                return None
            name = text[start + len(self.begin) : place].strip().removeprefix(self.before_name)
            begin = skip_space(text, place + len(self.after_name))
            if (end := json_end(text, begin)) is None:
                return None
            if (done := after(text, end, self.after_arguments.strip(), is_all)) is None:
                return None
            call = partial(self._call, re.sub(r":\d+$", "", name), text[begin:end], tools)
            calls.append(or_text(call, text[start:done]))
            at = done

    @staticmethod
    def _call(name: str, arguments: str, tools: Schemas) -> Part:
        return call_of(name, loaded(arguments), tools)


@dataclass(frozen=True)
class Tags:
    """A call of tags: its name, and each argument between tags of its own; values are not quoted."""

    name: re.Pattern[str]
    argument: re.Pattern[str]  # groups: name and value
    end: str
    wrapper: str = ""  # the tag around calls, which may be left out

    def read(self, text: str, is_all: bool, tools: Schemas) -> tuple[list[Part], int] | None:
        calls: list[Part] = []
        at = len(self.wrapper) if self.wrapper and text.startswith(self.wrapper) else 0
        closing = self.wrapper.replace("<", "</", 1)
        while True:
            stop = text.find(self.end, at)
            if stop < 0:
                return None
            calls.append(or_text(partial(self._call, text[at:stop], tools), text[at : stop + len(self.end)]))
            at = stop + len(self.end)
            following = skip_space(text, at)
            if self.wrapper and text.startswith(closing, following):
                return with_calls(calls), following + len(closing)
            if not self.wrapper or (is_all and following == len(text)):
                return with_calls(calls), at
            if closing.startswith(text[following:]):
                return None
            if not text.startswith(self.wrapper):  # left out, so that this call is alone
                return with_calls(calls), at

    def _call(self, text: str, tools: Schemas) -> Part:
        named = self.name.match(text)
        if not named:
            raise NotACall
        name, rest = named[1].strip(), text[named.end() :]
        properties = tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments: dict[str, Any] = {}
        for key, value in self.argument.findall(rest):
            if key.strip() in arguments:
                raise NotACall("an argument comes twice")
            arguments[key.strip()] = typed(value, schemas.get(key.strip()), tools.get(name))
        if self.argument.sub("", rest).strip():
            raise NotACall("text between the arguments")
        return call_of(name, arguments, tools)


FUNCTION = Tags(
    re.compile(r"\s*<function=([^>\n]+)>"),
    re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    "</function>",
    "<tool_call>",
)
INVOKE = Tags(
    re.compile(r'\s*<invoke name="([^">\n]+)">'),
    re.compile(r'<parameter name="([^">\n]+)">\n?(.*?)\n?</parameter>', re.DOTALL),
    "</invoke>",
    "<minimax:tool_call>",
)
ARGUMENTS = Tags(
    re.compile(r"<tool_call>\s*([^\s<]+)\s*(?=<arg_key>|$)"),
    re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL),
    "</tool_call>",
)
WORD = re.compile(r'[^\s{}\[\],:"<>]+')


def read_keys(
    text: str, is_all: bool, tools: Schemas, *, begin: str, end: str, quote: str
) -> tuple[list[Part], int] | None:
    """`call:NAME{key:value,…}` of Gemma, whose texts are between `quote` marks; keys have none."""
    at = skip_space(text, len(begin))
    found = re.compile(r"call:\s*([\w.:/-]+?)\s*(?=\{)").match(text, at)
    if not found:
        if len(text) - at > 256 or not "call:".startswith(text[at : at + 5]):
            raise NotACall
        return None
    try:
        value, stop = _unquoted(text, found.end(), quote, 0)
        done = after(text, stop, end, is_all)
    except IndexError:
        return None
    return None if done is None else ([call_of(found[1], value, tools)], done)


def _unquoted(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """A value of Gemma's notation and its end; IndexError if it is not there yet."""
    at = skip_space(text, at)
    if depth > 64:
        raise NotACall("too deep")
    if text.startswith(quote, at):
        stop = text.find(quote, at + len(quote))
        if stop < 0:
            raise IndexError
        return text[at + len(quote) : stop], stop + len(quote)
    if text[at] in "{[":
        return _collection(text, at, quote, depth)
    if text[at] == '"':
        raise NotACall("another kind of quotes")
    found = WORD.match(text, at)
    if not found or found.end() == len(text):
        raise IndexError if quote.startswith(text[at:]) or found else NotACall
    return loaded(found[0]), found.end()


def _collection(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    closing = "}" if text[at] == "{" else "]"
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    at = skip_space(text, at + 1)
    while text[at] != closing:
        if closing == "}":
            if text.startswith(quote, at):
                key, at = _unquoted(text, at, quote, depth + 1)
            else:
                found = WORD.match(text, at)
                if not found:
                    raise IndexError if quote.startswith(text[at:]) else NotACall
                key, at = found[0], found.end()
            at = skip_space(text, at)
            if text[at] != ":" or key in pairs:
                raise NotACall
            pairs[key], at = _unquoted(text, at + 1, quote, depth + 1)
        else:
            value, at = _unquoted(text, at, quote, depth + 1)
            items.append(value)
        at = skip_space(text, at)
        if text[at] not in (",", closing):
            raise NotACall
        at = skip_space(text, at + (text[at] == ","))
    return (pairs if closing == "}" else items), at + 1


def read_python(
    text: str, is_all: bool, tools: Schemas, *, begin: str = "", end: str = ""
) -> tuple[list[Part], int] | None:
    """A list of calls in Python's notation with literals only, which is parsed and never run."""
    stop = text.find(end) if end else len(text) if is_all else -1
    if stop < 0:
        return None
    source = text[len(begin) : stop].strip()
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error
    found = tree.elts if isinstance(tree, ast.List) else []
    if not all(isinstance(one, ast.Call) for one in found):
        raise NotACall("no list of calls")
    written = [ast.get_source_segment(source, one) or "" for one in found]
    calls = [or_text(partial(_python_call, one, tools), words) for one, words in zip(found, written, strict=True)]
    return with_calls(calls), stop + len(end)


def _python_call(found: ast.expr, tools: Schemas) -> Part:
    if not isinstance(found, ast.Call) or found.args or not all(word.arg for word in found.keywords):
        raise NotACall
    try:
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in found.keywords}
        return call_of(ast.unparse(found.func), arguments, tools)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error


DEEPSEEK = Sections(
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "", "\n```json"),
    *("```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_31 = Sections(
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = Sections(
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls.

    Attributes:
        signs: texts that are all in a chat template of the dialect.
        markers: texts with which a call begins.
        read: reads it.
        starts: markers that count only at the start of an answer.
        frame: how a forced call is written; None for Hermes' frame, which any model can be made to write.
        ends: texts of which a complete call has one at its end; empty for any.
    """

    signs: tuple[str, ...]
    markers: tuple[str, ...]
    read: Reader
    starts: tuple[str, ...] = ()
    frame: Frame | None = None
    ends: tuple[str, ...] = ()


HARMONY, HERMES = "harmony", "hermes"
HERMES_FRAME = quoted_frame("<tool_call>\n", "\n</tool_call>", "\n")
HERMES_READ = partial(read_json, begin="<tool_call>", end="</tool_call>")
ESCAPE, QUOTE = "<escape>", '<|"|>'

# the first whose signs a chat template has; so those with more of them are first
DIALECTS: dict[str, Dialect] = {
    HARMONY: Dialect(
        ("<|channel|>", "<|message|>"),
        (),
        read_json,  # `HarmonyParser` takes the answer apart
        frame=Frame("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", several=False),
    ),
    "qwen3_coder": Dialect(
        ("<function=", "<tool_call>"),
        ("<tool_call>", "<function="),
        FUNCTION.read,
        ends=("</function>", "</tool_call>"),
    ),
    "glm45": Dialect(("<arg_key>",), ("<tool_call>",), ARGUMENTS.read, ends=("</tool_call>",)),
    "minimax_m2": Dialect(
        ("<invoke name=", "minimax:tool_call"),
        ("<minimax:tool_call>",),
        INVOKE.read,
        ends=("</invoke>", "</minimax:tool_call>"),
    ),
    "gemma4": Dialect(
        ("<|tool_call>",),
        ("<|tool_call>",),
        partial(read_keys, begin="<|tool_call>", end="<tool_call|>", quote=QUOTE),
    ),
    "functiongemma": Dialect(
        ("<start_function_call>",),
        ("<start_function_call>",),
        partial(read_keys, begin="<start_function_call>", end="<end_function_call>", quote=ESCAPE),
    ),
    "kimi_k2": Dialect(
        ("<|tool_call_argument_begin|>",),
        (KIMI.opening,),
        KIMI.read,
        frame=Frame(
            *("<|tool_call_begin|>functions.", ":#<|tool_call_argument_begin|>", KIMI.after_arguments),
            *(KIMI.opening, "", KIMI.closing),
        ),
    ),
    "deepseek_v3": Dialect(
        ("<｜tool▁sep｜>", "```json"),
        (DEEPSEEK.opening,),
        DEEPSEEK.read,
        frame=Frame(
            DEEPSEEK.begin, "\n```json\n", f"\n{DEEPSEEK.after_arguments}", DEEPSEEK.opening, "\n", DEEPSEEK.closing
        ),
    ),
    "deepseek_v31": Dialect(
        ("<｜tool▁sep｜>",),
        (DEEPSEEK_31.opening,),
        DEEPSEEK_31.read,
        frame=Frame(
            *(DEEPSEEK_31.begin, "<｜tool▁sep｜>", DEEPSEEK_31.after_arguments),
            *(DEEPSEEK_31.opening, "", DEEPSEEK_31.closing),
        ),
    ),
    "mistral_v11": Dialect(
        ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), read_mistral, frame=Frame("[TOOL_CALLS]", "[ARGS]", "")
    ),
    "mistral": Dialect(
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        read_mistral,
        frame=quoted_frame("", "", ", ", opening="[TOOL_CALLS][", closing="]"),
    ),
    "lfm2": Dialect(
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        partial(read_python, begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    ),
    "phi4_mini": Dialect(
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<|tool_call|>",),
        partial(read_json, begin="<|tool_call|>", end="<|/tool_call|>"),
        frame=quoted_frame("", "", ", ", opening="<|tool_call|>[", closing="]<|/tool_call|>"),
    ),
    "granite": Dialect(
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        partial(read_json, begin="<|tool_call|>"),
        frame=quoted_frame("", "", ", ", opening="<|tool_call|>[", closing="]"),
    ),
    HERMES: Dialect(("<tool_call>",), ("<tool_call>",), HERMES_READ, frame=HERMES_FRAME, ends=("</tool_call>",)),
    "llama3_json": Dialect(
        ("ipython", '"parameters"'),
        ("<|python_tag|>",),
        partial(read_json, begin="<|python_tag|>", between=";"),
        starts=("{",),
        frame=quoted_frame("", "", "; ", "parameters"),
    ),
    "pythonic": Dialect((), (), read_python, starts=("[",)),  # of Llama 4; no template tells it for sure
}


def detected(source: str, texts: Iterable[str]) -> str:
    """The dialect of a chat template and the texts of added tokens, a name in `DIALECTS`; empty for none."""
    known = {*texts}

    def has(sign: str) -> bool:
        return sign in source or sign in known

    return next((name for name, one in DIALECTS.items() if one.signs and all(map(has, one.signs))), "")


@dataclass(frozen=True)
class Thoughts:
    """The texts around the reasoning of an answer."""

    opening: str
    closing: str


THOUGHTS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),  # Magistral
    Thoughts("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thoughts("<|channel>thought\n", "<channel|>"),  # Gemma 4
)


def detected_thoughts(source: str, texts: Iterable[str]) -> Thoughts | None:
    """What is around the reasoning of a model with this chat template and these added tokens; None for none.

    A template that begins the reasoning may name no end of it, and its marks be no tokens of their own (OLMo 3 Think).
    """
    known = {*texts}
    for one in THOUGHTS:
        marks = {one.opening.strip(), one.closing}
        if marks <= known or any(mark in source for mark in marks):
            return one
    return None


HARMONY_TEXTS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
# special tokens whose texts are marks of a dialect; all others are in no text
MARKS = frozenset(
    [
        *(mark for one in DIALECTS.values() for mark in one.markers),
        *(text.strip() for one in THOUGHTS for text in (one.opening, one.closing)),
        *("</tool_call>", "<function=", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("</minimax:tool_call>", "[ARGS]", "[CALL_ID]", "<|/tool_call|>", "<|tool_call_end|>", ESCAPE, QUOTE),
        *("<end_function_call>", "<tool_call|>", "<|channel>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ]
)
