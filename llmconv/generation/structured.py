"""Structured output: the tokens that may come next, so that a text has the form of a schema, a regex or a grammar.

`Structure` says what form an answer has, `GrammarCompiler` compiles it for the tokens of one model, and `TokenMask`
follows one answer. The package `llguidance` (extra `structured`) parses bytes; each token is given to it as the bytes
that it adds to the text, as the tokenizer's decoder makes them. A grammar comes with a request, so it is compiled first
in a child process with limited time, memory and stack.

Sources: llguidance's docs/json_schema.md and docs/syntax.md for what it enforces; JSON Schema 2020-12; the decoders
ByteLevel, ByteFallback, Replace, Metaspace and Strip of tokenizers.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.runtime.limited_child import TooCostly, bounded_text
from llmconv.tensors import Array

MAX_BYTES, MAX_DEPTH, MAX_SCHEMAS = 256 << 10, 64, 4000  # of a schema, regex or grammar; depth and number of schemas
MAX_CHOICES = 2000
KEPT = 64  # compiled grammars that stay
# of white space in JSON: none, a space, or a line break with its indentation, so that no answer is endless white space
WHITE_SPACE = r"[ ]?|\n[ \t]{0,40}"
# no `\u0061` and no `\/`: a key would have two spellings, and could come again in another one
ESCAPES = '"\\bfnrt'
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # those that JSON writes as `\u` only
# formats that llguidance enforces; by JSON Schema all others are annotations
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # keywords whose value is a list of schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # an object of schemas
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
COMBINED = frozenset(["anyOf", "oneOf", "$ref", "enum", "const"])  # keywords that may allow keys that stand elsewhere
OPEN = frozenset(["additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"])
VALUES = ("required", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# keywords that llguidance 1.9 refuses, or `with_options` in some schemas
UNENFORCED = frozenset(
    [
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependentSchemas", "dependentRequired", "minProperties", "unevaluatedProperties", "unevaluatedItems"),
    ]
)
LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
OF_SCHEMA = "start: %json "
NO_WAY = "NoExtension"  # llguidance's word for the end of all ways
# any tokens of the bytes that may come, not only llguidance's own choice of them
ANY_TOKENS = '\n%llguidance {"no_forcing": true}\n'
SIMPLER = "give a schema that docs/serving.md says is supported"


@dataclass(frozen=True)
class Structure:
    """The form of an answer.

    Attributes:
        grammar: in llguidance's variant of Lark.
        name: how it was given, such as `response_format`, for messages.
        after: a text that comes first, after any other, such as `</think>`; empty for none.
        opens: with which text that other text begins, such as `<think>`; without it the answer may begin at once.
            Empty: it began in the prompt.
        optional: whether `after` need not come: the text may end without it, and has no form then.
    """

    grammar: str
    name: str
    after: str = ""
    opens: str = ""
    optional: bool = False

    @classmethod
    def of_schema(cls, schema: Any, name: str = "json_schema") -> Structure:
        """JSON that is valid by a JSON Schema (an object, a boolean, or either as JSON text); raises UsageProblem."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UsageProblem(f"`{name}` is not valid JSON: {error}", hint="give a JSON Schema") from error
        return cls(f"{OF_SCHEMA}{json.dumps(with_options(schema, name))}", name)

    @classmethod
    def of_regex(cls, pattern: str, name: str = "regex") -> Structure:
        """A text that a regular expression matches as a whole, in the syntax of Rust's crate `regex`."""
        _require_size(pattern, name)
        return cls(f"start: {as_regex(pattern)}", name)

    @classmethod
    def of_choices(cls, choices: Sequence[str], name: str = "choice") -> Structure:
        """One of the texts; UsageProblem unless they are texts."""
        if isinstance(choices, str) or not choices or not all(isinstance(one, str) and one for one in choices):
            raise UsageProblem(f"`{name}` is no list of texts", hint="give the texts to choose from, none empty")
        if len(choices) > MAX_CHOICES:
            raise UsageProblem(f"`{name}` has {len(choices)} texts", hint=f"give at most {MAX_CHOICES}")
        _require_size("".join(choices), name)
        return cls(f"start: {' | '.join(map(quoted, choices))}", name)

    @classmethod
    def of_grammar(cls, grammar: str, name: str = "grammar") -> Structure:
        """A text of a context-free grammar, in llguidance's variant of Lark, or in llama.cpp's GBNF."""
        _require_size(grammar, name)
        if "::=" in grammar:
            convert = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark if library() else str
            grammar = _bounded(lambda: str(convert(grammar)), name)
        return cls(grammar, name)

    def following(self, after: str, opens: str = "") -> Structure:
        """The same after other text, see the attributes."""
        return replace(self, after=after, opens=opens)


def quoted(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text)


def as_regex(pattern: str) -> str:
    """A regular expression as a terminal of Lark, between slashes."""
    return "/" + re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL) + "/"


def with_options(schema: Any, name: str) -> dict[str, Any]:
    """A copy of a JSON Schema for llguidance, with how JSON is written; raises UsageProblem for what it cannot enforce.

    Formats that it does not know are left out; `x-guidance` of the schema, with which it would ignore keywords, is
    replaced; objects that list properties and say nothing of others have no others. Sizes are bounded.
    """
    if not isinstance(schema, Mapping | bool):
        raise UsageProblem(f"`{name}` is not a JSON Schema", hint="give an object, or the JSON text of one")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageProblem(f"`{name}` is not JSON: {error}", hint="give a JSON Schema") from error
    _require_size(text, name)
    made: dict[str, Any] = json.loads(text)
    _close(made)
    for _, _, one in islice(_schemas(made), MAX_SCHEMAS):
        _fold(one)
    for count, (place, depth, one) in enumerate(_schemas(made), start=1):
        if depth > MAX_DEPTH or count > MAX_SCHEMAS:
            problem = f"`{name}` has more than {MAX_SCHEMAS} schemas or {MAX_DEPTH} levels, at `{place}`"
            raise UsageProblem(problem, hint=SIMPLER)
        if isinstance(one.get("format"), str) and one["format"] not in FORMATS:
            del one["format"]
        _require_countable(one, f"`{name}` at `{place}`")
        _require_exact(one, f"`{name}` at `{place}`")
    # as llguidance's options of the schema as a whole
    return {**made, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}}


def _close(schema: dict[str, Any]) -> None:
    """Adds `additionalProperties` false where objects list properties, and other schemas may not allow others.

    Properties come in the order of the schema. A model that begins one out of order would end in a free key that only
    starts like it: once the name is complete, its quotation mark is not allowed. Without free keys it cannot begin.
    """
    objects = [one for _, _, one in islice(_schemas(schema), MAX_SCHEMAS)]
    listed = [one for one in objects if isinstance(one.get("properties"), dict) and one["properties"]]
    if any("allOf" in one for one in objects) or any(COMBINED & one.keys() for one in listed):
        return
    for one in listed:
        required = one.get("required", [])
        if (
            not OPEN & one.keys()
            and isinstance(required, list)
            and all(name in [*one["properties"]] for name in required)
        ):
            one["additionalProperties"] = False


LISTED = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")  # one name, or some


def _fold(schema: dict[str, Any]) -> None:
    """Moves a `patternProperties` of names that are all listed to these properties, where no other keys are allowed.

    llguidance would let a further key begin that no name completes.
    """
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    is_open = schema.get("additionalProperties") is not False
    if is_open or not isinstance(properties, dict) or not isinstance(patterns, dict):
        return
    for pattern, value in list(patterns.items()):
        found = LISTED.fullmatch(pattern)
        names = (found[1] or found[2]).split("|") if found else []
        if names and all(name in properties for name in names):
            for name in names:
                properties[name] = {"allOf": [properties[name], value]}
            del patterns[pattern]
    if not patterns:
        del schema["patternProperties"]


def loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON Schema without what llguidance cannot enforce, in every schema of it."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for _, _, one in _schemas(made):
        for key in UNENFORCED & one.keys():
            del one[key]
        if isinstance(one.get("pattern"), str) and LOOK_AROUND.search(one["pattern"]):
            del one["pattern"]
    return made


def _require_countable(schema: Mapping[str, Any], where: str) -> None:
    """Raises UsageProblem for `minProperties` that the same key, written twice, would seem to satisfy."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    is_open = schema.get("additionalProperties", True) is not False or schema.get("patternProperties")
    if isinstance(least, int) and isinstance(required, list | tuple) and least > len(required) and is_open:
        problem = f"{where}: `minProperties` of free keys cannot be enforced, since a key may come twice"
        raise UsageProblem(problem, hint="list the properties, with `additionalProperties` false")


def _require_exact(schema: Mapping[str, Any], where: str) -> None:
    """Raises UsageProblem for values that no answer can have.

    llguidance rounds numbers: it reads float64, and bounds of about 15 digits. `ESCAPES` leave control characters out.
    """
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    least, most = ([schema.get(f"{kind}imum"), schema.get(f"exclusive{kind.title()}imum")] for kind in ("min", "max"))
    # llguidance 1.9 takes a 0 for a number between 0 and 1, and a -0 for one between -1 and 0
    if (_is_number(over) and over == 0 and any(_is_number(one) and one < 1 for one in most)) or (
        _is_number(under) and under == 0 and any(_is_number(one) and one > -1 for one in least)
    ):
        problem = f"{where}: numbers between 0, which is excluded, and a bound closer than 1 cannot be enforced"
        raise UsageProblem(
            problem, hint="give `minimum` a small number, such as 1e-6, in place of `exclusiveMinimum` 0"
        )
    waiting: list[Any] = [value for key, value in schema.items() if key in VALUES]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and abs(value) > 2**53:
            raise UsageProblem(f"{where}: the number {value} is beyond 2**53", hint="give a smaller one, or a text")
        if (
            isinstance(value, float)
            and value
            and len(f"{value!r}".partition("e")[0].strip("-0.").replace(".", "")) > 12
        ):
            problem = f"{where}: the number {value!r} has more than 12 digits"
            raise UsageProblem(problem, hint="give a shorter one")
        if isinstance(value, str) and CONTROL.search(value):
            problem = f"{where}: a text has the control character {CONTROL.findall(value)[0]!r}"
            raise UsageProblem(problem, hint="leave it out: no answer has any but line breaks and tabs")
        if isinstance(value, list | dict):
            waiting += [*value, *value.values()] if isinstance(value, dict) else value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _schemas(schema: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Place (a JSON pointer after `#`), depth and content of every schema in a schema, outer ones first."""
    waiting: list[tuple[str, int, Any]] = [("#", 0, schema)]
    while waiting:
        place, depth, one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield place, depth, one
        for key, value in reversed(one.items()):
            below = f"{place}/{_pointer(key)}"
            if key in SINGLE and isinstance(value, dict):
                waiting.append((below, depth + 1, value))
            elif (key in LISTS or key == "items") and isinstance(value, list):
                waiting += [(f"{below}/{at}", depth + 1, each) for at, each in enumerate(value)]
            elif key in NAMED and isinstance(value, dict):
                waiting += [(f"{below}/{_pointer(at)}", depth + 1, each) for at, each in value.items()]


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _require_size(text: str, name: str) -> None:
    if not isinstance(text, str):
        raise UsageProblem(f"`{name}` is not a text", hint="give a text")
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise UsageProblem(f"`{name}` has {size:,} bytes", hint=f"give at most {MAX_BYTES:,}")


def library() -> Any:
    """The package `llguidance`; raises UnsupportedInput without it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        problem = "structured output needs the package llguidance, which is not installed"
        raise UnsupportedInput(problem, hint="`pip install llguidance`") from error


def _bounded(make: Callable[[], str], name: str) -> str:
    """As `bounded_text`; raises UsageProblem where the work fails or takes too much."""
    try:
        return bounded_text(make)
    except TooCostly:
        problem = f"`{name}` takes too much time or memory to compile"
        raise UsageProblem(problem, hint="give a simpler one") from None
    except ValueError as error:
        raise UsageProblem(f"`{name}` cannot be used: {error}", hint="give a simpler one") from None


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token: `texts` by id, empty for those without any; `special` ids, which are in no text.

    `strips` says whether the decoder removes a space at the start of a text.
    """

    texts: tuple[bytes, ...]
    special: frozenset[int]
    strips: bool

    @classmethod
    def of(cls, tokenizer: Any, special: Mapping[int, str]) -> Vocabulary:
        """That of a tokenizer; `special` are the texts of special tokens.

        Raises UnsupportedInput where the text of tokens is not that of each of them, joined.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _not_bytes("has no tokenizer.json")
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        state = json.loads(backend.to_str())
        kinds = list(_kinds(state.get("decoder")))
        names = {kind["type"] for kind in kinds}
        if odd := names - {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace", "Sequence"}:
            raise _not_bytes(f"has a decoder `{sorted(odd)[0]}`")
        spaces = [kind["replacement"] for kind in kinds if kind["type"] == "Metaspace"]
        found = {token: text for text, token in backend.get_vocab(with_added_tokens=True).items()}
        added = {token["id"]: token["content"] for token in state.get("added_tokens", ())}
        size = max([*found, *special], default=-1) + 1
        texts = [b""] * size
        for token, text in found.items():
            if token in special:
                texts[token] = special[token].encode("utf-8", "replace")
            elif token in added and "ByteLevel" in names and decode([token]) == text:
                texts[token] = text.encode()
            else:
                texts[token] = _bytes_of(text, names, kinds, spaces)
        strips = "Metaspace" in names or any(kind["type"] == "Strip" and kind.get("start") for kind in kinds)
        made = cls(tuple(texts), frozenset(special), strips)
        made._require_same_text(backend, decode)
        return made

    def _require_same_text(self, backend: Any, decode: Callable[[Sequence[int]], str]) -> None:
        for probe in ('{"a": [1, "b c"], "Zy": null}\n', "x é ✓ 語"):
            ids = [token for token in backend.encode(probe, add_special_tokens=False).ids if token not in self.special]
            joined = b"".join(self.texts[token] for token in ids).decode("utf-8", "replace")
            if (joined[1:] if self.strips and joined.startswith(" ") else joined) != decode(ids):
                raise _not_bytes("joins tokens in another way")


def _not_bytes(problem: str) -> UnsupportedInput:
    hint = "byte-level and SentencePiece tokenizers are supported, as of tokenizer.json"
    return UnsupportedInput(f"structured output is not possible: the tokenizer {problem}", hint=hint)


def _kinds(decoder: Any) -> Iterator[dict[str, Any]]:
    """The decoders in a decoder, in order."""
    if isinstance(decoder, dict):
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes, as GPT-2 does: printable ones stand for themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {**{chr(byte): byte for byte in kept}, **{chr(256 + at): byte for at, byte in enumerate(others)}}


BYTES = _byte_letters()
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _unicode_bytes(text: str) -> bytes:
    return bytes(BYTES[letter] for letter in text)


def _bytes_of(text: str, names: set[str], kinds: Sequence[Mapping[str, Any]], spaces: Sequence[str]) -> bytes:
    if "ByteLevel" in names:
        return _unicode_bytes(text) if all(letter in BYTES for letter in text) else text.encode()
    if "ByteFallback" in names and (found := BYTE.fullmatch(text)):
        return bytes([int(found[1], 16)])
    for kind in kinds:
        if kind["type"] == "Replace":
            pattern = kind["pattern"].get("String")
            if pattern is None:
                raise _not_bytes("replaces a pattern in texts")
            text = text.replace(pattern, kind["content"])
    for space in spaces:
        text = text.replace(space, " ")
    return text.encode("utf-8", "replace")


class GrammarCompiler:
    """Compiles structures for one tokenizer; `special` are the texts of its special tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, special: Mapping[int, str]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._compiled = lru_cache(maxsize=KEPT)(self._compile)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._special)

    def require(self, structure: Structure, ends: frozenset[int]) -> None:
        """Raises UsageProblem for a grammar that cannot be used, UnsupportedInput without llguidance or bytes."""
        self._compiled(structure.grammar, structure.name, ends)

    def mask(self, structure: Structure, ends: frozenset[int]) -> TokenMask:
        """The mask of a new answer, which the tokens `ends` may end; raises as `require`."""
        matcher = self._compiled(structure.grammar, structure.name, ends)
        return TokenMask(matcher.deep_copy(), structure, self.vocabulary, ends)

    @cached_property
    def _tokens(self) -> Callable[[frozenset[int]], Any]:
        return lru_cache(maxsize=4)(self._tokens_of)

    def _tokens_of(self, ends: frozenset[int]) -> Any:
        """llguidance's tokenizer, in which the tokens `ends` end a text; without any, one beyond the vocabulary."""
        known, guidance = self.vocabulary, library()
        last = max(ends, default=len(known.texts))
        texts = [*known.texts, *[b""] * (last + 1 - len(known.texts))]

        class Given:
            eos_token_id, bos_token_id, tokens = last, None, texts
            special_token_ids = sorted({*known.special, *ends, last})

            def __call__(self, text: str) -> list[int]:
                return []  # no text is made into tokens here

        return guidance.LLTokenizer(guidance.TokenizerWrapper(Given()), eos_token=sorted(ends) or [last])

    def _compile(self, grammar: str, name: str, ends: frozenset[int]) -> Any:
        guidance, tokens = library(), self._tokens(ends)

        def matcher() -> Any:
            text = guidance.LLMatcher.grammar_from_lark(grammar + ANY_TOKENS)
            return guidance.LLMatcher(tokens, text, log_level=0)

        def problem() -> str:
            made = matcher()
            if not made.is_error() and not made.is_stopped():
                made.compute_bitmask()
            if made.is_error():
                return _place(guidance, grammar, made.get_error()) + _one_line(made.get_error())
            return "" if made.is_accepting() or any(made.compute_bitmask()) else "no text has this form"

        if found := _bounded(problem, name):
            raise UsageProblem(f"`{name}` cannot be used: {found}", hint=SIMPLER)
        return matcher()


def _place(guidance: Any, grammar: str, problem: str) -> str:
    """`at PLACE: ` of the innermost schema of which llguidance says the same; empty for other grammars."""
    if not grammar.startswith(OF_SCHEMA):
        return ""
    schema = json.loads(grammar.removeprefix(OF_SCHEMA))
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = "#"
    for place, _, one in _schemas(schema):
        alone = guidance.LLMatcher.grammar_from_lark(f"{OF_SCHEMA}{json.dumps({**shared, **one})}")
        same = place.startswith(found) and guidance.LLMatcher.validate_grammar(alone)
        if same and _one_line(same) == _one_line(problem):
            found = place
    return f"at `{found}`: "


def _one_line(problem: str) -> str:
    """A message of llguidance on one line: of a pattern that is refused, what is wrong with it."""
    if problem.startswith(NO_WAY):
        return "no text has this form"
    problem = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", problem)
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error:")]
    return (f"{lines[0].partition('regex parse')[0]}{reasons[0]}" if reasons else lines[0])[:300] if lines else ""


class TokenMask:
    """Which tokens may come next in one answer."""

    def __init__(self, matcher: Any, structure: Structure, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, sorted(ends)
        self._name, self._after, self._is_optional = structure.name, structure.after.encode(), structure.optional
        self._tail = b""  # the last bytes before the structure begins
        self._waits = bool(self._after)
        opens = structure.opens.encode()
        self._opening = [at for at, text in enumerate(vocabulary.texts) if opens and text == opens]
        self._undecided = bool(opens)  # the other text may begin, or the structure
        self._begun = False
        self._allowed: Array | None = None

    def scores(self, scores: Array) -> Array:
        """A copy of scores [vocabulary] with minus infinity for the tokens that may not come next.

        Raises InputRefused if no token may: the grammar became too complex, or needs bytes that no token has.
        """
        allowed = self.allowed(len(scores))
        if not allowed.any():
            problem = f"no token continues the answer as `{self._name}` demands"
            if (error := self._matcher.get_error()).startswith(NO_WAY):
                hint = (
                    "leave out `patternProperties` that match no names but those of `properties`, or simplify the form"
                )
                raise InputRefused(f"{problem}: no text begins like this one", hint=hint)
            reason = _one_line(error)
            raise InputRefused(f"{problem}{reason and ': '}{reason}", hint="give a simpler form")
        return np.where(allowed, scores, np.array(-np.inf, scores.dtype))

    def allowed(self, columns: int) -> Array:
        """Which of the first `columns` tokens may come next, bool [columns]; computed once per token."""
        if self._allowed is None or len(self._allowed) != columns:
            self._allowed = self._compute(columns)
        return self._allowed

    def _compute(self, columns: int) -> Array:
        texts = self._vocabulary.texts
        allowed = np.zeros(columns, dtype=bool)
        if self._waits and not self._undecided:
            allowed[: len(texts)] = True
            allowed[[end for end in self._ends if end < columns]] = self._is_optional
            return allowed
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # it ended: llguidance would end the text here, which has not the form
            return allowed
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        count = min(columns, len(bits))
        allowed[:count] = bits[:count]
        if self._vocabulary.strips and not self._begun:  # the decoder would remove the space
            allowed[[at for at, text in enumerate(texts[:columns]) if text.startswith(b" ")]] = False
        if self._undecided:
            allowed[[token for token in self._opening if token < columns]] = True
        return allowed

    def push(self, token: int) -> bool:
        """Notes the next token; returns whether the answer is complete, so that only an end could follow."""
        self._allowed = None
        if self._undecided:
            self._undecided = False
            self._waits = token in self._opening
        if self._waits:
            seen = self._tail + self._vocabulary.texts[token]
            self._waits, self._tail = self._after not in seen, seen[-len(self._after) :]
            return False
        self._begun = True
        if not self._matcher.consume_token(token):
            raise InputRefused(
                f"the answer cannot go on as `{self._name}` demands: {_one_line(self._matcher.get_error())}",
                hint="give a simpler form",
            )
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())
