"""Values of the arguments of a call, as a model writes them: JSON, or without quotes, typed by the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class NotACall(ValueError):
    """A text cannot become a call, whatever follows it."""


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


def typed(text: str, schema: Any, whole: Any = None) -> Any:
    """A value that is written without quotes: a text where the schema says so or does not say, else JSON.

    `whole` is the schema of all arguments, to which references lead. A value of another type than the schema names is
    the text, if it may be one. NotACall if it is not JSON and the schema has no text.
    """
    kinds = _kinds(schema, whole, set())
    if kinds == {"string"} or not kinds:
        return text
    try:
        value = loaded(text.strip())
    except NotACall:
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        if isinstance(value, str) and "string" not in kinds:
            raise
    return text if "string" in kinds and not _types(value) & kinds else value


TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    FarNumber: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""JSON Schema's names of the types of values of `loaded`."""


def _types(value: Any) -> set[str]:
    return TYPES.get(type(value), set()) | ({"integer"} if isinstance(value, float) and value.is_integer() else set())


def _kinds(schema: Any, whole: Any, seen: set[str]) -> set[str]:
    """The types that a schema names, those of its alternatives, values and references (`seen`: earlier ones) included.

    A reference that leads nowhere may be any.
    """
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ())
    kinds = {named} if isinstance(named, str) else {str(one) for one in named} if isinstance(named, list) else set()
    several = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    for one in [each for alternatives in several if isinstance(alternatives, list) for each in alternatives]:
        kinds |= _kinds(one, whole, seen)
    if not kinds:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else ()
        values = [*values, schema["const"]] if "const" in schema else values
        kinds = {kind for one in values for kind in _types(one)}
    if isinstance(place := schema.get("$ref"), str) and place not in seen:
        seen.add(place)
        kinds |= _kinds(_referred(place, whole), whole, seen) or {*EVERY}
    return kinds


EVERY = frozenset().union(*TYPES.values())


def _referred(place: str, whole: Any) -> Any:
    """What a JSON pointer after `#` leads to; None for no such place."""
    for name in place.removeprefix("#").split("/")[1:]:
        whole = whole.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(whole, Mapping) else None
    return whole if place.startswith("#") else None
