"""Structured output: what a mask lets through is valid by jsonschema and re, for every tokenizer."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.generation import TextModel, generate
from llmconv.generation.sampling import GenerationSettings
from llmconv.generation.structured import GrammarCompiler, Structure, Vocabulary
from llmconv.runtime.tokenizer import TokenDecoder
from tests.builders.worded_models import TOKENIZERS, byte_level, fast, save_worded

pytest.importorskip("llguidance")
Compiler = tuple[GrammarCompiler, TokenDecoder, frozenset[int]]


@pytest.fixture(scope="module", params=TOKENIZERS)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    tokenizer = fast(TOKENIZERS[request.param](added=["<think>", "</think>"]))
    decode = TokenDecoder(tokenizer)
    return GrammarCompiler(tokenizer, decode.special_texts), decode, frozenset([tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = save_worded(tmp_path_factory.mktemp("worded"), fast(byte_level(added=["<think>", "</think>"])))
    return TextModel.open(folder)


def walk(compiler: Compiler, structure: Structure, seed: int, most: int = 300) -> str | None:
    """The text of random tokens that the mask allows, ended where it may end; None if it got too long."""
    grammars, decode, ends = compiler
    mask, random, tokens = grammars.mask(structure, ends), np.random.default_rng(seed), list[int]()
    for _ in range(most):
        allowed = np.flatnonzero(mask.allowed(len(grammars.vocabulary.texts) + 29))
        if not len(allowed):
            mask.scores(np.zeros(len(grammars.vocabulary.texts), np.float32))
        if set(allowed.tolist()) & ends and random.random() < 0.8:
            return decode(tokens)
        token = int(random.choice(allowed))
        if token in ends:
            return decode(tokens)
        tokens.append(token)
        if mask.push(token):
            return decode(tokens)
    return None


def accepts(compiler: Compiler, structure: Structure, text: str) -> bool:
    """Whether the mask lets a text through, byte by byte."""
    grammars, _, ends = compiler
    mask, texts = grammars.mask(structure, ends), grammars.vocabulary.texts
    complete = False
    for byte in text.encode():
        allowed = mask.allowed(len(texts))
        single = [at for at in np.flatnonzero(allowed).tolist() if texts[at] == bytes([byte])]
        if not single or complete:
            return False
        complete = mask.push(single[0])
    return complete or bool(mask.allowed(len(texts))[sorted(ends)].any())


LETTERS = st.text(st.sampled_from('ab é語\n\t"\\/'), max_size=4)
NAMES = st.sampled_from(["a", "b", "name", "é", 'q"', "x y"])
SCALARS = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 2}, st.integers(-9, 9)),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(["^[a-z]{1,4}$", "^\\d{3}-\\d{2}$", "^(é|ü){2}$", "^[^\\s]{2}$"]).map(
        lambda one: {"type": "string", "pattern": one}
    ),
    st.sampled_from(["date-time", "date", "time", "ipv4", "uuid"]).map(lambda one: {"type": "string", "format": one}),
    st.builds(
        lambda low, size: {"type": "number", "minimum": low, "maximum": low + size},
        st.floats(-1e4, 1e4).map(lambda one: round(one, 5)),
        st.sampled_from([0.25, 7.5]),
    ).filter(lambda one: len(repr(one["maximum"])) < 13),
    st.lists(st.one_of(st.integers(-5, 5), LETTERS, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda one: {"enum": one}
    ),
    st.one_of(st.integers(-(2**53), 2**53), LETTERS, st.dictionaries(NAMES, st.integers(0, 3), max_size=2)).map(
        lambda one: {"const": one}
    ),
)


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    names = list(properties)
    form = {"type": "object", "properties": properties, "required": names[optional:], "additionalProperties": False}
    return {**form, "examples": [1], "description": "an object", "title": "T"}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 2)),
        st.builds(
            lambda one, least: {"type": "array", "items": one, "minItems": least, "maxItems": least + 2},
            inner,
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        inner.map(
            lambda one: {"$defs": {"one": one}, "type": "array", "prefixItems": [one], "items": False, "minItems": 1}
        ),
    ),
    max_leaves=6,
)


def _check(compiler: Compiler, schema: dict[str, Any], seed: int) -> bool:
    text = walk(compiler, Structure.of_schema(schema), seed)
    if text is None:
        return False
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    return True


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=CHECKS)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_finished_text_is_valid(compiler: Compiler, schema: dict[str, Any], seed: int) -> None:
    _check(compiler, schema, seed)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("SCHEMAS", "1000")), deadline=None, suppress_health_check=CHECKS)
@given(SCHEMAS, st.integers(0, 2**32))
def test_thousands_of_finished_texts_are_valid(compiler: Compiler, schema: dict[str, Any], seed: int) -> None:
    """`SCHEMAS=10000` tries as many."""
    _check(compiler, schema, seed)


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        (TREE, '{"value": 1, "next": {"value": 2, "next": null}}', True),
        (TREE, '{"value": 1}', False),
        (OPEN, '{"a": 1, "b": "x"}', True),
        (OPEN, '{"a": "x"}', False),
        (OPEN, r'{"a": 1, "\u0061": "x"}', False),  # the second of two equal keys would count
        ({"type": "string"}, r'"\ud800"', False),
        ({"type": "string", "maxLength": 2}, r'"é\n"', True),
        ({"type": "string", "pattern": "a.b"}, '"-a/b-"', True),
        ({"type": "string", "format": "binary"}, '"any"', True),
        ({"enum": ["a", 1, None]}, "null", True),
        ({"type": "number", "maximum": 5}, "1e9", False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1]", False),
        ({"oneOf": [OPEN | {"required": ["a"]}, {"type": "string"}]}, '{"a": 1}', True),
        (True, '[{}, ""]', True),
        ({"type": "object"}, "[]", False),
        ({"type": "object"}, "{\n\n}", False),  # endless white space
        ({"type": "object"}, "{}", True),
    ],
)
def test_a_text_is_accepted_as_jsonschema_says(compiler: Compiler, schema: Any, text: str, valid: bool) -> None:
    assert accepts(compiler, Structure.of_schema(schema), text) == valid
    if valid:
        jsonschema.validate(json.loads(text), schema)


LISTED: dict[str, Any] = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]}
FREE, OUT_OF_ORDER = '{"b":1,"ab":2}', '{"b":1,"a":2}'


@pytest.mark.parametrize(
    ("schema", "free"),
    [
        (LISTED, False),  # as pydantic writes it
        ({"$defs": {"one": LISTED}, "$ref": "#/$defs/one"}, False),
        ({"anyOf": [LISTED, {"type": "null"}]}, False),
        ({**LISTED, "additionalProperties": True}, True),
        ({**LISTED, "patternProperties": {"^ab$": {"type": "integer"}}}, True),
        ({**LISTED, "required": ["b", "ab"]}, True),
        ({"allOf": [LISTED, {"properties": {"ab": {"type": "integer"}}}]}, True),
        ({**LISTED, "anyOf": [{"required": ["ab"]}, {"required": ["b"]}]}, True),
        ({"type": "object", "properties": {}}, True),
    ],
    ids=str,
)
def test_free_keys_are_those_that_a_schema_asks_for(compiler: Compiler, schema: dict[str, Any], free: bool) -> None:
    """A property that comes out of order would otherwise end in a free key that begins like its name."""
    assert accepts(compiler, Structure.of_schema(schema), FREE) is free
    assert not accepts(compiler, Structure.of_schema(LISTED), OUT_OF_ORDER)
    assert accepts(compiler, Structure.of_schema(LISTED), '{"a":2,"b":1}')


TWO = {"a": {"type": "integer", "maximum": 50}, "b": {"type": "boolean"}}


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^(?:b|a)$", "^[ab]$", "^(a|b|c)$", "a"])
@pytest.mark.parametrize("required", [["a"], ["a", "b"], []])
@pytest.mark.parametrize("seed", range(4))
def test_patterns_of_listed_names_end_in_valid_texts(
    compiler: Compiler, pattern: str, required: list[str], seed: int
) -> None:
    rest = {"required": required, "additionalProperties": False, "patternProperties": {pattern: {"minimum": 0}}}
    schema = {"type": "object", "properties": TWO, **rest}
    try:
        text = walk(compiler, Structure.of_schema(schema), seed)
    except InputRefused:  # a further key began, and none is left
        assert pattern == "^[ab]$"
        return
    if text is not None:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_a_text_does_not_end_where_nothing_can_follow(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": TWO, "additionalProperties": False, "patternProperties": {"^[ab]$": {}}}
    structure = Structure.of_schema(schema)
    assert accepts(compiler, structure, '{"a":1,"b":true}')
    assert not accepts(compiler, structure, '{"a":1,"b":true, ')
    with pytest.raises(InputRefused, match="no text begins like this one") as raised:
        for seed in range(20):
            walk(compiler, structure, seed)
    assert "leave out `patternProperties`" in str(raised.value.hint)


@pytest.mark.parametrize("pattern", ["[a-c]{2,4}", "a/b|é+x", r"\d{2}\.\d", "(?i)yes|no", r"a\/b", "[/]x"])
def test_a_regex_matches_the_whole_text(compiler: Compiler, pattern: str) -> None:
    for seed in range(5):
        text = walk(compiler, Structure.of_regex(pattern), seed)
        assert text is None or re.fullmatch(pattern, text)


def test_choices_and_grammars(compiler: Compiler) -> None:
    choices = ["yes", "no\n", 'qu"ote', "é"]
    assert {walk(compiler, Structure.of_choices(choices), seed) for seed in range(30)} == set(choices)
    sums = 'root ::= item ("+" item)*\nitem ::= [0-9] | "x"'
    found = [walk(compiler, Structure.of_grammar(sums), seed) for seed in range(5)]
    assert all(re.fullmatch(r"[0-9x](\+[0-9x])*", text) for text in found if text is not None)
    assert walk(compiler, Structure.of_grammar('start: "a" "b"?'), 0) in ("a", "ab")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, 'at `#`: Unimplemented keys: ["uniqueItems"]'),
        ({"properties": {"a": {"type": "array", "items": {"not": {}}}}}, "at `#/properties/a/items`: Unimplemented"),
        ({"$defs": {"x/y": {"pattern": "(?=a)", "type": "string"}}, "$ref": "#/$defs/x~1y"}, "error: look-around"),
        ({"type": "object", "minProperties": 3}, "`minProperties` of free keys"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"$ref": "http://example.com/x"}, "`#`"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, ""),
        (False, "Unimplemented"),
        ({"enum": [{"\x1f": 1}]}, "the control character"),
        ({"maximum": 0.1234567890123, "type": "number"}, "more than 12 digits"),
        ({"properties": {"a": {"enum": [{"b": 2**53 + 1}]}}}, "at `#/properties/a`: the number 9007199254740993"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "at `#`: numbers between 0, which is excluded"),
        ({"type": "number", "exclusiveMaximum": 0, "exclusiveMinimum": -0.5}, "numbers between 0, which is excluded"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented"),
        ("{", "is not valid JSON"),
        ([1], "is not a JSON Schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(
    compiler: Compiler, schema: Any, problem: str
) -> None:
    with pytest.raises(UsageProblem) as refused:
        compiler[0].require(Structure.of_schema(schema, "response_format"), compiler[2])
    assert problem in refused.value.message and "response_format" in refused.value.message


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


RULES = "start: a0\n" + "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(6000)) + 'a6000: "a"'
CHAIN = {"$ref": "#/$defs/0", "$defs": {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(3000)} | {"3000": {}}}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Structure.of_schema(_nested(70)), id="deep"),
        pytest.param(lambda: Structure.of_schema({"enum": ["a" * 2**18]}), id="large"),
        pytest.param(lambda: Structure.of_schema({"anyOf": [{"const": at} for at in range(5000)]}), id="many"),
        pytest.param(lambda: Structure.of_grammar(RULES), id="rules", marks=pytest.mark.slow),
        pytest.param(lambda: Structure.of_grammar("start: " + "(" * 20000 + '"a"'), id="brackets"),
        pytest.param(lambda: Structure.of_regex("(" * 500), id="regex"),
        pytest.param(lambda: Structure.of_grammar("root ::= [[[["), id="gbnf"),
        pytest.param(lambda: Structure.of_choices(["a", 1]), id="choices"),  # type: ignore[list-item]
    ],
)
def test_hostile_grammars_end_in_a_refusal(compiler: Compiler, make: Callable[[], Structure]) -> None:
    with pytest.raises(UsageProblem):
        compiler[0].require(make(), compiler[2])


@pytest.mark.slow
def test_a_chain_of_references_does_not_end_the_process(compiler: Compiler) -> None:
    try:
        compiler[0].require(Structure.of_schema(CHAIN), compiler[2])
    except UsageProblem as error:
        assert "`json_schema`" in error.message


def test_bytes_of_tokens_joined_are_the_text(compiler: Compiler) -> None:
    grammars, decode, _ = compiler
    tokenizer = decode._tokenizer
    for text in ("Zürich: 語 ✓\n\t{}", "<think> a  b</think>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined = b"".join(grammars.vocabulary.texts[token] for token in ids).decode()
        assert joined.removeprefix(" " if grammars.vocabulary.strips else "") == decode(ids)


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models  # noqa: PLC0415 - of this test alone

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedInput, match="decoder `WordPiece`"):
        Vocabulary.of(fast(words), {})


def test_the_structure_begins_after_thoughts(compiler: Compiler) -> None:
    grammars, _, ends = compiler
    texts = grammars.vocabulary.texts
    shut = texts.index(b"</think>")
    mask = grammars.mask(Structure.of_choices(["yes"]).following("</think>"), ends)
    assert mask.allowed(len(texts)).sum() == len(texts) - 1  # all but the end
    assert not mask.push(texts.index(b"a")) and not mask.push(shut)
    assert {texts[at][:1] for at in np.flatnonzero(mask.allowed(len(texts)))} == {b"y"}
    either = grammars.mask(Structure.of_choices(["yes"]).following("</think>", "<think>"), ends)
    assert {texts[at][:1] for at in np.flatnonzero(either.allowed(len(texts)))} == {b"y", b"<"}
    assert not either.push(texts.index(b"<think>"))
    assert either.allowed(len(texts))[texts.index(b"a")]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "top_k": 3, "typical_p": 0.9},
    ],
)
def test_a_random_model_writes_valid_json(worded: TextModel, fields: dict[str, Any]) -> None:
    made = generate(worded, ["Hello", "A longer one"], json_schema=SCHEMA, max_new_tokens=200, **fields)
    for one in made.completions:
        assert one.finish in ("stop", "eos")
        jsonschema.validate(json.loads(one.text), SCHEMA)


def test_guessed_tokens_do_not_change_structured_text(worded: TextModel) -> None:
    schema = {"type": "array", "items": {"enum": ["abcabc", "abc"]}, "minItems": 12, "maxItems": 12}
    texts = []
    for speculate in ("lookup", "off"):
        model = TextModel.open(worded.folder, speculate=speculate)
        texts.append(generate(model, '["abcabc", "abc"]', json_schema=schema, max_new_tokens=400).completions[0])
    assert texts[0].text == texts[1].text and texts[0].tokens == texts[1].tokens
    jsonschema.validate(json.loads(texts[0].text), schema)


def test_a_schema_may_be_a_file(worded: TextModel, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    made = generate(worded, "a", json_schema=tmp_path / "schema.json", max_new_tokens=1000)
    jsonschema.validate(json.loads(made.completions[0].text), SCHEMA)
    assert made.settings["structure"] == "--json-schema"


def test_without_llguidance_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedInput, match="needs the package llguidance") as refused:
        generate("nowhere", "a", regex="a")
    assert "pip install" in refused.value.hint


def test_a_maximum_in_the_middle_is_a_length(worded: TextModel) -> None:
    one = generate(worded, "a", regex="[a-z]{50}", max_new_tokens=3).completions[0]
    assert (one.finish, len(one.tokens)) == ("length", 3)


def test_what_takes_no_structure_is_refused(worded: TextModel) -> None:
    with pytest.raises(UsageProblem, match="a beam search takes no structured output"):
        generate(worded, "a", regex="a", num_beams=2)
    with pytest.raises(UsageProblem, match="both set the form"):
        generate(worded, "a", regex="a", json_schema={})
    assert GenerationSettings().but(structure=Structure.of_regex("a")).structure


def test_a_grammar_that_no_token_continues_is_an_error(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models  # noqa: PLC0415 - of this test alone

    letters = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "é": 2}, unk_token="<unk>"))
    letters.decoder = decoders.Fuse()
    grammars = GrammarCompiler(fast(letters), {0: "<unk>"})
    mask = grammars.mask(Structure.of_regex("ab"), frozenset())
    mask.push(1)
    with pytest.raises(InputRefused, match="no token continues"):
        mask.scores(np.zeros(3, np.float32))
    with pytest.raises(UsageProblem, match="no text has this form"):
        grammars.mask(Structure.of_regex("b"), frozenset())
