"""Side files with one wrong value: each value of a JSON or YAML file in turn, and its replacements."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEEP = 900
"""Nested so far that a parser takes it, and a function that walks it by recursion does not."""

WRONG: dict[str, str] = {
    "nothing": "null",
    "true": "true",
    "a list": "[]",
    "a list of a list": "[[1]]",
    "an object": "{}",
    "an object of null": '{"a": null}',
    "minus one": "-1",
    "zero": "0",
    "a half": "0.5",
    "a number of 400 digits": "1" + "0" * 400,
    "a number of 5000 digits": "1" + "0" * 5000,
    "2^63": str(2**63),
    "infinity": "1e999",
    "not a number": "NaN",
    "no text": '""',
    "a text": '"abc"',
    "a long text": '"' + "x" * 5000 + '"',
    "half a surrogate": '"a\\ud800"',
    "a zero character": '"a\\u0000b"',
    "a path": '"../../../etc/passwd"',
    "900 deep": "[" * DEEP + "]" * DEEP,
}
"""What it is called, to its JSON."""

MARK = "the value that another takes the place of"
MISSING = "missing"
MOST_ITEMS = 2
"""Items of a list that are changed: the first and the last."""


def places(content: Any) -> Iterator[tuple[str | int, ...]]:
    """Where the values of a JSON value are, itself included; of a long list or map the first and the last."""
    yield ()
    keys: list[Any] = list(content) if isinstance(content, dict) else []
    if isinstance(content, list):
        keys = list(range(len(content)))
    if len(keys) > 40 or (isinstance(content, list) and len(keys) > MOST_ITEMS):
        keys = [keys[0], keys[-1]]
    for key in keys:
        for place in places(content[key]):
            yield (key, *place)


def changed(content: Any, place: tuple[str | int, ...], wrong: str) -> str:
    """The JSON of `content` with `wrong` (a key of WRONG, or MISSING) at `place`."""
    if not place:
        return "" if wrong == MISSING else WRONG[wrong]
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if wrong == MISSING:
        del inner[place[-1]]
        return json.dumps(content)
    inner[place[-1]] = MARK
    return json.dumps(content).replace(json.dumps(MARK), WRONG[wrong])


def read(path: Path) -> Any:
    """The content of a JSON or YAML file."""
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def mutants(path: Path) -> Iterator[tuple[str, str]]:
    """What is changed in a file, and its text then. JSON is YAML, so that YAML files are changed in the same way."""
    content = read(path)
    for place in places(content):
        for wrong in (MISSING, *WRONG):
            yield f"{path.name} {'.'.join(map(str, place)) or 'whole'}: {wrong}", changed(content, place, wrong)
