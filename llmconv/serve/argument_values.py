"""Values of the arguments of a call, as a model writes them: JSON, or without quotes, typed by the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class NotACall(ValueError):
    """A text is no call, whatever follows it."""


def loaded(text: str) -> Any:
    """The value of a JSON text; NotACall if it is not valid, has a number that is none, or a key twice."""

    def no_constant(name: str) -> Any:
        raise NotACall(name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise NotACall("a key comes twice")
        return found

    try:
        return json.loads(text, parse_constant=no_constant, parse_float=_number, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from error


class FarNumber(float):
    """A number beyond float64, such as 1e400, which JSON may have; `text` is how it was written."""

    def __init__(self, text: str) -> None:
        self.text = text


def _number(text: str) -> float:
    value = float(text)
    return FarNumber(text) if math.isinf(value) else value


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value that is written without quotes: a text where the schema says so or does not say, else JSON.

    Where the schema also has texts (`str | None`), JSON of a type that it names. NotACall if it is not JSON and the
    schema has no text. `root` has the `$defs` of the schema.
    """
    kinds = _kinds(schema, root, set())
    if kinds == {"string"} or not kinds:
        return text
    try:
        value = loaded(text.strip())
    except NotACall:
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        if isinstance(value, str) and "string" not in kinds:
            raise
    named = next((names for python, names in KINDS if isinstance(value, python)), set())
    return text if "string" in kinds and not kinds & {*named, "other"} else value


# types of JSON Schema by those of Python; bool is an int there
KINDS: tuple[tuple[Any, set[str]], ...] = (
    *((bool, {"boolean"}), (int, {"integer", "number"}), (float, {"number"}), (list, {"array"})),
    *((dict, {"object"}), (type(None), {"null"})),
)


def _kinds(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """The types that a schema names, those of its alternatives, values and references (but those `seen`) included."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ())
    kinds = {named} if isinstance(named, str) else {*named} if isinstance(named, list) else set()
    for one in [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]:
        kinds |= _kinds(one, root, seen)
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {"string" if isinstance(one, str) else "other" for one in schema["enum"]}
    if not kinds and isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _kinds(found, root, seen) or {"other"}
    return kinds
