"""Arguments that a model writes without quotes are values of the types that the tool's schema names."""

from __future__ import annotations

from typing import Any

import pytest

from llmconv.serve.argument_values import NotACall, typed

STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
KIND = {
    "$defs": {
        "Kind": {"enum": ["1", "2"]},
        "Place": {"type": "object"},
        "Again": {"anyOf": [{"$ref": "#/$defs/Again"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [STRING, NULL]}, "12", "12"),
        ({"anyOf": [STRING, NULL]}, "true", "true"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "null"]}, "1.5", "1.5"),
        ({"anyOf": [STRING, INTEGER]}, "12", 12),
        ({"anyOf": [STRING, INTEGER]}, "1.5", "1.5"),
        ({"anyOf": [STRING, INTEGER]}, "true", "true"),
        ({"anyOf": [INTEGER, NULL]}, "12", 12),
        ({"$ref": "#/$defs/Kind"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Kind"}]}, "1", "1"),
        ({"$ref": "#/$defs/Place"}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, STRING]}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/None"}, "1", 1),
        ({"anyOf": [{"$ref": "#/$defs/Again"}] * 40}, "1", 1),
        ({}, "12", "12"),
    ],
)
def test_a_value_is_of_a_type_of_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    found = typed(text, schema, KIND)
    assert found == value and type(found) is type(value)


def test_what_is_neither_json_nor_may_be_a_text_is_no_call() -> None:
    with pytest.raises(NotACall):
        typed("many", {"anyOf": [INTEGER, NULL]}, KIND)
