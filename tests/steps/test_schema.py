"""The JSON schema for editors accepts what `run` accepts."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from llmconv.cli import main
from llmconv.steps.run_file import run_file_schema
from llmconv.steps.step import COMMANDS

SCHEMA: dict[str, Any] = run_file_schema(main)
GOOD = (
    "steps: [{export: {model: a, prefill: true, layout: [genai, optimum], opset: 24}}]",
    "steps: [{name: x, merge-lora: {base: a, adapters: b, output: c, weight: [0.5, 1]}}]",
    "{variables: {m: a}, steps: [{verify: {folder: '${m}', suite: '${s}', report: r}}]}",
    "steps: [{push: {folder: a, repository: me/a, private: true}}]",
    "steps: [{generate: {model: a, prompt: [b, c], temperature: 0.7, add-special-tokens: false, output-file: d}}]",
    "steps: [{embed: {model: a, texts: b}}, {bench: {folder: a, against: [torch], csv: c}}]",
)
WRONG = (
    "steps: []",
    "steps: [{export: {}}]",
    "steps: [{export: {model: a, prefil: true}}]",
    "steps: [{export: {model: a, quant: int5}}]",
    "steps: [{export: {model: a, prefill: 1}}]",
    "steps: [{chat: {model: a}}]",
    "steps: [{generate: {model: a, temperature: warm}}]",
    "steps: [{generate: {model: a, json: true}}]",
    "steps: [{export: {model: a}, verify: {folder: a}}]",
)


@pytest.mark.slow
def test_it_is_a_schema_with_every_command() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    steps = SCHEMA["properties"]["steps"]["items"]["oneOf"]
    assert [next(key for key in step["properties"] if key != "name") for step in steps] == [*COMMANDS]


@pytest.mark.slow
@pytest.mark.parametrize("text", GOOD)
def test_a_good_file_is_accepted(text: str) -> None:
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), SCHEMA)
