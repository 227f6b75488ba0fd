"""What messages and hints name exists: commands with their options, options, pages, packages and Python names."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy
import peft
import pytest
import torch
import transformers

import llmconv
import llmconv.convert
import llmconv.export
import llmconv.generation
import llmconv.runtime
import llmconv.verify
from llmconv.argument_checks import in_python
from llmconv.generation import GenerationSettings, TextModel
from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.onnxruntime.session_file import SessionOptions
from tests.cli.commands import LEAVES, ROOT
from tests.cli.hint_words import HOLE, command_problem, hint_problem, option_problem, quoted, spellings, texts, words_of
from tests.cli.test_options import FUNCTIONS, options, parameters

RUN = ("generate", "chat", "serve", "embed", "bench", "serve-stage", "verify", "export")
CONVERT = ("inspect", "to-hf", "from-hf", "to-gguf", "merge-lora", "quantize", "delta apply", "delta extract", "export")
MET_IN = {
    "convert/": (*CONVERT, "onnx-adapter", "verify"),
    "export/": ("verify", "onnx-adapter", *CONVERT),
    "verify/": ("verify", "export", "merge-lora", "quantize"),
    "llmconv/generation/": RUN,
    "llmconv/serve/": RUN,
    "llmconv/bench/": ("bench",),
    "llmconv/hub/": ("push", "to-hf"),
    "llmconv/compressed/": ("quantize", "to-gguf", "from-hf"),
}
"""The commands that can meet the texts of a folder; all commands for others."""
OTHER_PROGRAMS = {
    "--no-save-model",  # Megatron-LM
    "--fp8-param-gather",
    "--llama_config",  # LLaMA2-Accessory
    "-c",  # llama.cpp
    "--recursive",  # aws s3 cp
}


def test_every_command_that_a_text_names_can_be_typed_as_it_stands() -> None:
    commands = [(place, text) for place, text in quoted() if text.startswith("llmconv ")]
    wrong = {f"{place}: `{text}`": problem for place, text in commands if (problem := command_problem(text))}
    assert len(commands) > 150 and wrong == {}


VALUES = re.compile(r"word\(|owner|again|anew|kind|task|dtype|wanted\.dtype|command_name|elsewhere|given$")


def test_every_path_in_a_command_is_one_word_of_a_shell() -> None:
    """A path with a space, as on a mounted Google Drive, is in quotes."""
    spans = [(place, span) for place, text in texts(with_code=True) for span in re.findall(r"`llmconv [^`]+`", text)]
    holes = [(place, value) for place, span in spans for value in re.findall(f"{HOLE}([^{HOLE}]+){HOLE}", span)]
    assert len(holes) > 40 and [hole for hole in holes if not VALUES.match(hole[1])] == []


def test_every_option_that_a_text_names_is_one_of_a_command_that_can_meet_it() -> None:
    wrong, seen = {}, 0
    for place, text in quoted():
        words = words_of(text) if re.match(r"-(-[a-z]|[a-z]( |$))[^(]*$", text) else []
        if not words or words[0] in OTHER_PROGRAMS or HOLE in text.split()[0]:
            continue
        seen += 1
        names = next((names for folder, names in MET_IN.items() if place.startswith(folder)), LEAVES)
        problems = [option_problem(name, words) for name in names]
        if all(problems):
            wrong[f"{place}: `{text}`"] = min(problems, key=lambda one: "has no" in one)
    assert seen > 400 and wrong == {}


def test_every_option_outside_of_backticks_exists_too() -> None:
    known = {spelling for name in LEAVES for spelling in spellings(name)}
    known |= {"--version", "--force-reinstall"}  # of llmconv itself and pip
    plain = [(place, re.sub("`[^`]*`", "", text)) for place, text in texts()]
    named = [(place, option) for place, text in plain for option in re.findall(r"(?<![\w`.-])--[a-z][\w-]+", text)]
    assert named and [one for one in named if one[1] not in known] == []


def test_every_page_that_a_text_names_is_there() -> None:
    pages = {page for _, text in texts() for page in re.findall(r"\bdocs/[\w/-]+\.md", text)}
    assert len(pages) > 5 and [page for page in pages if not (ROOT / page).exists()] == []


def test_a_package_to_install_has_the_range_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)}
    asked = {one for _, text in texts() for one in re.findall(r"pip install '([a-z][\w-]*>=[\w.<>=,]+)'", text)}
    assert asked and asked - known == set()


ROOMS = [llmconv, *(getattr(llmconv, name) for name in ("convert", "export", "generation", "verify", "runtime"))]
STANDS_FOR: dict[str, tuple[Any, ...]] = {
    "model": (
        transformers.PreTrainedModel,
        peft.tuners.lora.LoraModel,
        torch.nn.DataParallel(torch.nn.Linear(1, 1)),
        TextModel,
        SimpleNamespace(defaults=GenerationSettings()),
    ),
    "trainer": (transformers.Trainer, SimpleNamespace(model=None)),
    "AutoTokenizer": (transformers.AutoTokenizer, transformers.PreTrainedTokenizerBase),
    "tokenizer": (transformers.PreTrainedTokenizerBase,),
    "config": (transformers.LlamaConfig(),),
    "np": (numpy,),
    "torch": (torch,),
    "ExtraInput": (ExtraInput,),
    "SessionOptions": (SessionOptions,),
}
"""What the first word of code in a text may be, where it is not public in llmconv or transformers."""


class Missing(Exception):
    """A name in a text that is not there."""


def meaning(code: ast.expr) -> tuple[Any, ...]:
    """What code in a text may mean; what `from_pretrained` makes has its class's names. Raises Missing for nothing."""
    if isinstance(code, ast.Call):
        functions, given = meaning(code.func), {str(one.arg) for one in code.keywords}
        if given and not any(given <= names_of(one) for one in functions if callable(one)):
            raise Missing(f"{ast.unparse(code)}: no parameter {given}")
        return meaning(code.func.value) if isinstance(code.func, ast.Attribute) else functions
    if isinstance(code, ast.Attribute):
        found = tuple(getattr(one, code.attr) for one in meaning(code.value) if hasattr(one, code.attr))
    else:
        name = ast.unparse(code)
        owners = (*ROOMS, transformers, *STANDS_FOR["model"])
        found = STANDS_FOR.get(name) or tuple(getattr(one, name) for one in owners if hasattr(one, name))
        found = found or ((import_module(name),) if find_spec(name) else ())
    if not found:
        raise Missing(ast.unparse(code))
    return found


def names_of(function: Any) -> set[str]:
    """The parameters of a function, and the options that it hands on."""
    changes = GenerationSettings.__annotations__ if function.__name__ == "but" else SessionOptions.__annotations__
    return {*parameters(function), *changes}


CODE = re.compile(
    r"(?!mindspore|transform_checkpoints)(?:[A-Za-z][\w.]*\(.*\)"
    r"|(?:[A-Z]\w+|torch|np|os|pathlib|multiprocessing|trainer|llmconv\.[a-z]\w+)(?:\.[a-z]\w*)+)"
)
"""A call, or a name with a dot; not of libraries that are not installed here."""
FILES = r"\.(json|onnx|md)$"
ELSEWHERE = {"LoRAModel.save_pretrained", "AutoBridge.export_adapter_ckpt"}
"""Names of PaddleNLP and Megatron Bridge."""


def test_code_in_a_text_names_what_is_there() -> None:
    found = {text for _, text in quoted() if CODE.fullmatch(text) and not re.search(FILES, text)}
    wrong = []
    for text in sorted(found - ELSEWHERE):
        plain = re.sub(r", (…|%s)|…(?=\))|…, ", "", text.replace("=…", "=x").replace(HOLE, "x"))
        try:
            meaning(ast.parse(plain, mode="eval").body)
        except Missing as missing:
            wrong.append(f"`{text}`: {missing}")
    assert len(found) > 25 and wrong == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hint_at_an_option_is_one_at_the_parameter_in_python(name: str) -> None:
    known = parameters(FUNCTIONS[name])
    for spelling, option in spellings(name).items():
        if option.name in options(name) and spelling.startswith("--"):
            said = in_python(f"give `{spelling} X`", known)
            assert said in (f"give `{option.name}=X`", f"give `{option.name}=False X`")


def test_a_hint_in_python_has_values_as_python_has_them() -> None:
    known = {"dtype": str, "output": str, "overwrite": bool, "weights": list, "low_memory": bool}
    said = in_python(
        "`--dtype float16 -o OUT`, `--overwrite`, `--weight 0.5`, `--no-low-memory`, `--quant int4`", known
    )
    assert said == '`dtype="float16", output=OUT`, `overwrite=True`, `weights=0.5`, `low_memory=False`, `--quant int4`'
    assert in_python("`llmconv to-hf X --dtype float16`", known) == "`llmconv to-hf X --dtype float16`"
    assert in_python("give `--no-record`", {"record": bool}) == "give `record=False`"


def test_the_words_of_a_hint_are_judged_for_the_command_that_gave_it() -> None:
    assert hint_problem("to-hf", "give `--dtype float16 -o OUT`, or `llmconv export MODEL --quant int4`") == ""
    assert "no --quant-block" in hint_problem("to-hf", "give a smaller `--quant-block`")
    assert "int8" in hint_problem("to-hf", "give `--dtype int8`")
    assert "lacks ['-o']" in hint_problem("inspect", "`llmconv merge-lora BASE ADAPTER`")
    assert "no command" in hint_problem("inspect", "`llmconv convert X`")
