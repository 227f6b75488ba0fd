"""The options of a command are the parameters of the function behind it."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

import click
import pytest

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from llmconv.convert.adapters.combining import DEFAULTS as MERGE_DEFAULTS
from llmconv.export.export_options import DEFAULTS as EXPORT_DEFAULTS
from llmconv.generation.generate import RunningOptions
from llmconv.runtime.onnxruntime.session_file import SessionOptions
from tests.cli.commands import LEAVES, command

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "inspect": llmconv.convert.inspect,
    "to-hf": llmconv.convert.to_hf,
    "from-hf": llmconv.convert.from_hf,
    "to-gguf": llmconv.to_gguf,
    "merge-lora": llmconv.convert.merge_lora,
    "quantize": llmconv.quantize,
    "onnx-adapter": llmconv.convert.onnx_adapter,
    "delta apply": llmconv.convert.apply_delta,
    "delta extract": llmconv.convert.extract_delta,
    "export": llmconv.export.export,
    "verify": llmconv.verify.verify,
    "push": llmconv.push.push,
    "generate": llmconv.generation.generate,
    "embed": llmconv.embedding.embed,
}
"""The function behind each command; the other commands only list a registry."""

PRESENTATION = {"as_json", "stream", "null", "github", "help"}
"""Options for the output of a command, which are not parameters of the function."""

ELSEWHERE = {
    "export": {"verify"},
    "verify": {"graphs", "input_map", "text", "max_divergence", "min_agreement"},
    "generate": {"texts", "images", "first_export"},
}
"""Options for another function, `verify` or `verify_graphs`; and prompts, which are one argument of `generate`."""

SPELLED: dict[str, str] = {
    "from": "format",  # a word of Python
    "stop": "stop_strings",  # as in transformers
    "no_record": "record",
    "json": "as_json",
    "csv": "csv_file",
    "plot": "plot_file",
    "stage": "number",
    "export": "first_export",
}
"""Options to their parameters where the names differ; those that may be repeated are plural in Python."""

PLURALS = {"density": "densities"}


def options(name: str) -> dict[str, click.Parameter]:
    """The options and arguments that reach the function."""
    parameters = {str(option.name): option for option in command(name).params if option.expose_value}
    return {key: option for key, option in parameters.items() if key not in PRESENTATION | ELSEWHERE.get(name, set())}


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of a function's parameters; for option objects, those of their fields."""
    found = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for hint in typing.get_type_hints(function).values():
        for kind in filter(dataclasses.is_dataclass, typing.get_args(hint)):
            found |= {field.name: field.default for field in dataclasses.fields(kind)}
    if function is llmconv.generation.generate:  # what is left out is as generation_config.json or a file says
        found |= {field.name: None for field in dataclasses.fields(llmconv.generation.GenerationSettings)}
        found |= {**dict.fromkeys(RunningOptions.__annotations__), "backend": "onnx"}
        found |= {field.name: field.default for field in dataclasses.fields(llmconv.generation.Wording)}
    if function is llmconv.embedding.embed:
        found |= dict.fromkeys(SessionOptions.__annotations__)
    if "provider" in found:  # left out, it is the session file's or the CPU
        found["provider"] = found["provider"] if function is llmconv.bench.bench else None
    if function is llmconv.export.export:
        found |= EXPORT_DEFAULTS
    return found | (dict(MERGE_DEFAULTS) if function is llmconv.convert.merge_lora else {})


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_has_help(name: str) -> None:
    bare = [option.name for option in command(name).params if isinstance(option, click.Option) and not option.help]
    assert not bare


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_is_a_parameter_of_the_function(name: str) -> None:
    assert set(options(name)) <= set(parameters(FUNCTIONS[name]))


@pytest.mark.parametrize("name", LEAVES)
def test_an_option_is_spelled_as_its_parameter(name: str) -> None:
    for option in (param for param in command(name).params if isinstance(param, click.Option) and param.expose_value):
        spellings = [text.lstrip("-").replace("-", "_") for text in option.opts]
        plurals = [PLURALS.get(text, f"{text}s") for text in spellings] if option.multiple else []
        assert option.name in {*spellings, *plurals, *(SPELLED.get(text) for text in spellings)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_has_the_default_of_the_function(name: str) -> None:
    ours = command(name).make_context(name, [], resilient_parsing=True).params
    theirs = parameters(FUNCTIONS[name])
    chosen = [key for key, option in options(name).items() if not option.required]
    given = {key: None if theirs[key] is inspect.Parameter.empty else theirs[key] for key in chosen}
    assert {key: ours[key] or None for key in chosen} == {key: given[key] or None for key in chosen}
