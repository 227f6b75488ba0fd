"""Transcripts in the forms that the models' cards and chat templates document, in pieces of every size."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from llmconv.serve.answer_parser import AnswerParser, HarmonyParser, TextParser
from llmconv.serve.tool_dialects import CALL, CONTENT, DIALECTS, REASONING, THOUGHTS, Part, detected, detected_thoughts

STRING, ANY = {"type": "string"}, {"type": "object"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}, "units": {}}},
    "write": {"type": "object", "properties": {"text": STRING, "lines": {"type": "array"}, "on": {"type": "boolean"}}},
    "now": {"type": "object", "properties": {}},
}
PARIS = ("get_weather", {"city": "Paris"})
ZURICH = ("get_weather", {"city": "Zürich", "days": 3})
NASTY = ("write", {"text": 'a "quoted" } ] </tool_call> \\ \n{', "lines": [{"x": [1.5, None]}], "on": True})


def parser(dialect: str, opened: bool = False, without: str = "") -> AnswerParser:
    tools = {name: schema for name, schema in TOOLS.items() if name != without}
    if dialect == "harmony":
        return HarmonyParser(tools)
    return TextParser(THOUGHTS[0], DIALECTS[dialect], tools, opened)


def parsed(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]], list[Part]]:
    """Content, reasoning, calls and all parts of a text that arrives in pieces of `size` characters."""
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])] + parser.close()
    said = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in (CONTENT, REASONING)}
    calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == CALL]
    return said[CONTENT], said[REASONING], calls, parts


def hermes(*calls: tuple[str, Any]) -> str:
    blocks = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
    return "\n".join(blocks)


GEMMA = '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Zürich", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
HARMONY = (
    "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
NOW: tuple[str, Any] = ("now", {})
TRANSCRIPTS: list[tuple[str, str, str, str, list[Any]]] = [
    ("hermes", hermes(PARIS), "", "", [PARIS]),
    ("hermes", f"Let me look.\n\n{hermes(PARIS, ZURICH)}", "Let me look.", "", [PARIS, ZURICH]),
    ("hermes", hermes(NASTY, PARIS), "", "", [NASTY, PARIS]),
    ("hermes", f"<think>\nHm, <tool_call>?\n</think>\n\n{hermes(PARIS)}", "", "Hm, <tool_call>?", [PARIS]),
    ("hermes", "No call < than <tool", "No call < than <tool", "", []),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', "", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call> Done.', "Done.", "", [NOW]),
    ("qwen3_coder", f"I call.\n{CODER}\n{CODER}", "I call.", "", [ZURICH, ZURICH]),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", "", [ZURICH]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "", [NOW]),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=write>\n<parameter=text>\n}\n</parameter>\n<parameter=on>\ntrue\n</pa"
            'rameter>\n<parameter=lines>\n[1, {"a": 2}]\n</parameter>\n</function>\n</tool_call>'
        ),
        "",
        "",
        [("write", {"text": "}", "on": True, "lines": [1, {"a": 2}]})],
    ),
    ("glm45", f"<think>Sure.</think>\nOK\n{GLM}", "OK", "Sure.", [ZURICH]),
    ("glm45", "<tool_call>now\n</tool_call>", "", "", [NOW]),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>",
        "",
        "",
        [("get_weather", {"city": "12"})],
    ),
    ("minimax_m2", MINIMAX, "", "", [ZURICH, NOW]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [PARIS]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        "",
        "",
        [PARIS, NOW],
    ),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', "", []),
    ("llama3_json", 'Here: {"name": "now", "parameters": {}}', 'Here: {"name": "now", "parameters": {}}', "", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "",
        "",
        [PARIS, NOW],
    ),
    (
        "mistral_v11",
        'Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "Wait.",
        "",
        [PARIS, NOW],
    ),
    ("mistral_v11", '[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}', "", "", [PARIS]),
    ("deepseek_v3", f"I look.{DEEPSEEK}", "I look.", "", [ZURICH, NOW]),
    (
        "deepseek_v31",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool'
            "▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "",
        "",
        [PARIS, NOW],
    ),
    (
        "kimi_k2",
        (
            "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_"
            'argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1 '
            "<|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        "Hm.",
        "",
        [PARIS, NOW],
    ),
    ("gemma4", f"{GEMMA}<|tool_call>call:now{{}}<tool_call|>", "", "", [ZURICH, NOW]),
    (
        "gemma4",
        '<|tool_call>call:write{text:<|"|>a, {b}: "c"<|"|>,lines:[1,{k:<|"|>v<|"|>},[]],on:false}<tool_call|>',
        "",
        "",
        [("write", {"text": 'a, {b}: "c"', "lines": [1, {"k": "v"}, []], "on": False})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>",
        "",
        "",
        [ZURICH],
    ),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Paris'), now()]<|tool_call_end|>Done", "Done", "", [PARIS, NOW]),
    ("pythonic", '[get_weather(city="Zürich", days=3)]', "", "", [ZURICH]),
    ("phi4_mini", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", "", [NOW]),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", "", [PARIS]),
    ("harmony", HARMONY, "", "Need the weather.", [PARIS]),
    ("harmony", HARMONY.removesuffix("<|call|>"), "", "Need the weather.", [PARIS]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi < there",
        "Hi < there",
        "Hm.",
        [],
    ),
    (
        "harmony",
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|ch"
            "annel|>commentary json<|message|>{}"
        ),
        "I look.",
        "",
        [NOW],
    ),
]


@pytest.mark.parametrize(("dialect", "text", "content", "reasoning", "calls"), TRANSCRIPTS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_transcript_is_taken_apart(
    dialect: str, text: str, content: str, reasoning: str, calls: list[Any], size: int
) -> None:
    assert parsed(parser(dialect), text, size)[:3] == (content, reasoning, calls)


CUT = [(row[0], row[1]) for row in TRANSCRIPTS if row[4]]


@pytest.mark.parametrize(("dialect", "text"), CUT)
def test_a_transcript_that_is_cut_has_only_whole_calls(dialect: str, text: str) -> None:
    whole = parsed(parser(dialect), text, 10_000)[2]
    for end in range(len(text)):
        content, _, calls, _ = parsed(parser(dialect), text[:end], 5)
        assert calls == whole[: len(calls)]
        if not calls and "think" not in text and dialect != "harmony":
            assert content.rstrip() == text[:end].rstrip()


SEVERAL = [(row[0], row[1], row[4]) for row in TRANSCRIPTS if len({name for name, _ in row[4]}) > 1]


@pytest.mark.parametrize(("dialect", "text", "calls"), SEVERAL)
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_of_an_unknown_tool_takes_no_other_call_with_it(
    dialect: str, text: str, calls: list[Any], place: int, size: int
) -> None:
    unknown = calls[place][0]
    content, _, found, _ = parsed(parser(dialect, without=unknown), text, size)
    assert found == [call for call in calls if call[0] != unknown]
    assert unknown in content and content == content.strip()


def test_every_dialect_has_a_transcript_of_several_tools() -> None:
    alone = {"functiongemma", "harmony", "pythonic", "phi4_mini", "granite", "qwen3_coder", "glm45"}
    assert {dialect for dialect, _, _ in SEVERAL} >= DIALECTS.keys() - alone


@pytest.mark.parametrize("number", ["1e400", "-14471E+903", "25052e9015", "9" * 400 + ".5"])
@pytest.mark.parametrize("dialect", ["hermes", "gemma4"])
def test_a_number_beyond_float64_is_passed_on_as_it_was_written(dialect: str, number: str) -> None:
    text = {
        "hermes": f'<tool_call>{{"name": "now", "arguments": {{"a": [1, {{"b": {number}}}]}}}}</tool_call>',
        "gemma4": f"<|tool_call>call:now{{a:[1,{{b:{number}}}]}}<tool_call|>",
    }[dialect]
    [part] = parsed(parser(dialect), text, 10_000)[3]
    assert part == Part(CALL, f'{{"a": [1, {{"b": {number}}}]}}', "now")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now", "arguments": {]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "</tool_call>",
        "<tool_call>none</tool_call>",
        "<tool_call><tool_call>",
    ],
)
def test_what_is_no_valid_call_stays_text(text: str) -> None:
    assert parsed(parser("hermes"), f"Hi {text} end", 3)[:3] == (f"Hi {text} end", "", [])
    assert parsed(parser("hermes"), f"{text}{hermes(PARIS)}", 3)[2] in ([PARIS], [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>many</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=now>text</function></tool_call>"),
        ("gemma4", "<|tool_call>call:now{a:}<tool_call|>"),
        ("gemma4", '<|tool_call>call:now{a:"b"}<tool_call|>'),
        ("gemma4", "<|tool_call>code"),
        ("pythonic", "[__import__('os').system('x')]"),
        ("pythonic", "[now(a=open('x'))]"),
        ("pythonic", "[1, 2]"),
        ("mistral", "[TOOL_CALLS]{}"),
        ("kimi_k2", "<|tool_calls_section_begin|>x"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("lfm2", "<|tool_call_start|>[now(**a)]<|tool_call_end|>"),
    ],
)
def test_calls_of_other_dialects_that_are_invalid_stay_text(dialect: str, text: str) -> None:
    assert parsed(parser(dialect), text, 4)[:3] == (text, "", [])


def test_reasoning_that_the_prompt_began() -> None:
    assert parsed(parser("hermes", opened=True), "Hm.\n</think>\n\nYes.\n", 2)[:2] == ("Yes.\n", "Hm.")
    assert parsed(parser("hermes", opened=True), "<think>\nHm.\n</think>\n\nYes.\n", 2)[:2] == ("Yes.\n", "Hm.")
    assert parsed(parser("hermes", opened=True), "Hm. I never end", 2)[:2] == ("", "Hm. I never end")
    assert parsed(TextParser(THOUGHTS[1]), "[THINK]a[/THINK]b", 2)[:2] == ("b", "a")
    assert parsed(TextParser(THOUGHTS[0]), "a <think> b </think>\n", 2)[:2] == ("a <think> b </think>\n", "")


def test_a_long_call_takes_linear_time() -> None:
    call = ("write", {"text": "x { } " * 4000, "lines": [[{}] * 50]})
    assert parsed(parser("hermes"), hermes(call), 3)[2] == [call]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call> {{ tool | tojson }}", "hermes"),
        ("<tool_call>\\n<function=", "qwen3_coder"),
        ("<tool_call> <arg_key>", "glm45"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral_v11"),
        ("<｜tool▁sep｜> ```json", "deepseek_v3"),
        ("<｜tool▁sep｜>", "deepseek_v31"),
        ('"ipython" {"name": function name, "parameters": {', "llama3_json"),
        ("<|start|> <|channel|>final<|message|>", "harmony"),
        ("<|tool_call> call:", "gemma4"),
        ("{{ messages }}", ""),
    ],
)
def test_a_dialect_is_told_by_the_chat_template(source: str, name: str) -> None:
    assert detected(source, []) == name


def test_reasoning_is_told_by_template_or_tokens() -> None:
    assert detected_thoughts("x </think>", []) == THOUGHTS[0]
    assert detected_thoughts("<|im_start|>assistant\n<think>", []) == THOUGHTS[0]  # OLMo 3 Think, vllm 13125
    assert detected_thoughts("", ["[THINK]", "[/THINK]"]) == THOUGHTS[1]
    assert detected_thoughts("", ["<think>"]) is None


REFERRING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"anyOf": [STRING, {"type": "null"}]},
        "color": {"$ref": "#/$defs/Color"},
        "who": {"allOf": [{"$ref": "#/$defs/Who"}], "description": "as pydantic writes a default"},
        "next": {"$ref": "#/properties/next"},
        "size": {"anyOf": [{"const": 3}, {"enum": ["large"]}]},
    },
    "$defs": {"Color": {"enum": ["red", "12"]}, "Who": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        *(("zip", "12345", "12345"), ("zip", "null", None), ("zip", "[1]", "[1]"), ("color", "red", "red")),
        *(("color", "12", "12"), ("who", '{"a": 1}', {"a": 1}), ("next", "anything", "anything")),
        *(("size", "3", 3), ("size", "large", "large")),
    ],
)
def test_a_value_without_quotes_has_a_type_of_its_schema(name: str, written: str, value: Any) -> None:
    if name != "next":  # which refers to itself
        jsonschema.validate({name: value}, REFERRING)
    text = CODER.replace("city", name).replace("Zürich", written).replace("<parameter=days>\n3\n</parameter>\n", "")
    (part,) = TextParser(None, DIALECTS["qwen3_coder"], {"get_weather": REFERRING}).push(text)
    assert part.kind == CALL and json.loads(part.text) == {name: value}
