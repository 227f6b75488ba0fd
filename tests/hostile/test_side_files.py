"""A side file with one value of a wrong kind is refused in one clear line, or makes no difference."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmconv.causal_lm import context_length
from llmconv.checkpoint import DEPTH_LIMIT, read_json
from llmconv.convert.inspection import inspect
from llmconv.convert.models.transformers_source import model_folder
from llmconv.convert.tokenizers import parse_sentencepiece
from llmconv.errors import LlmconvError, MalformedInput
from llmconv.generation.sampling import GenerationSettings
from llmconv.output.manifest import graph_entries, read_manifest
from llmconv.runtime.onnxruntime.session_file import read_session_file
from tests.hostile.case import Case
from tests.hostile.child import COMMANDS
from tests.hostile.honest import message
from tests.hostile.mutation import WRONG, mutants
from tests.hostile.test_hostile import HONEST, KINDS, _in_folder

SUFFIXES = (".json", ".yaml", ".yml")
CASES: dict[str, Case] = HONEST | {
    f"{kind}: {name}": case for kind, module in KINDS.items() for name, case in getattr(module, "HONEST", {}).items()
}
"""Unchanged inputs of every format and kind of adapter."""

QUICK = 8
"""Mutants of each file in the quick test, drawn anew for each file but the same in every run."""


def require_clear(case: Case, folder: Path, share: Callable[[str, list[Any]], list[Any]]) -> None:
    """Runs inspect and the conversion on mutants of every side file of a case."""
    source = case.build(folder / "in")
    options = {name: _in_folder(value, folder / "in") for name, value in case.options.items()}
    problems = []
    for path in sorted(path for path in (folder / "in").rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        honest = path.read_bytes()
        for what, text in share(path.name, list(mutants(path))):
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            problems += [f"{what}: {problem}" for problem in problems_of(case, source, folder / "out", options)]
        path.write_bytes(honest)
    assert not problems


def problems_of(case: Case, source: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """Errors that are not refusals, and leftovers of refusals."""
    runs: list[Callable[[], Any]] = [
        lambda: json.dumps(inspect(source).summary()),
        lambda: COMMANDS[case.command](source, out / "hf", **options),
    ]
    problems = []
    for run in runs:
        out.mkdir()
        try:
            run()
        except LlmconvError as error:
            problems += [] if error.message.isprintable() and error.hint else ["no line"]
            problems += [f"left {path}" for path in out.iterdir()]
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:200])
        shutil.rmtree(out)
    return problems


def few(name: str, found: list[Any]) -> list[Any]:
    """Some of the mutants of a file."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return random.Random(seed).sample(found, min(QUICK, len(found)))


@pytest.mark.slow_rows(
    "megatron: megatron",
    "state: torch",
    "dialect: torchtune",
    "adapter: peft",
    "adapter: paddle's",
    "foreign: mlx",
    "foreign: litgpt",
    "delta: exact",
    "delta: one with new tensors",
    "delta: extract",
    "delta: extract with a rank",
    "foreign delta: fastchat",
    "code: delta",
)
@pytest.mark.parametrize("name", CASES)
def test_some_side_files_with_a_wrong_value_are_refused_or_make_no_difference(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    require_clear(CASES[name], tmp_path, few)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_side_files_with_a_wrong_value_are_refused_or_make_no_difference(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    require_clear(CASES[name], tmp_path, lambda _, found: found)


MANIFEST: dict[str, Any] = {
    "manifest_version": 1,
    "steps": [{"command": "to-hf", "llmconv": "0", "source": "x.pt", "options": {"dtype": "keep"}}],
    "files": {"prefill.onnx": {"bytes": 3, "sha256": "00"}, "onnx/model.onnx": {"link": "../x"}},
    "graphs": {"prefill": {"file": "prefill.onnx", "inputs": ["a"], "outputs": ["b"], "last_logits": False}},
}


def refused_or_read(read: Callable[[Path], object], folder: Path, content: Any, name: str) -> int:
    """Reads every mutant of a file with this content; returns how many were refused."""
    refused = 0
    path = folder / name
    path.write_text(json.dumps(content))
    for what, text in list(mutants(path)):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read(folder)
        except LlmconvError:
            refused += 1
        except Exception as error:
            raise AssertionError(what) from error
    return refused


@pytest.mark.quick_rows("graph_entries")
@pytest.mark.parametrize("read", [read_manifest, graph_entries])
def test_a_broken_manifest_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    assert refused_or_read(read, tmp_path, MANIFEST, "llmconv.json") > 60


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a/b/c", "a\0", "a\nb"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "llmconv.json").write_text(json.dumps({"files": {name: {"bytes": 1}}}))
    with pytest.raises(MalformedInput, match="is not a valid manifest: `files` names"):
        read_manifest(tmp_path)


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    content = {"max_new_tokens": 2, "temperature": 0.5, "top_k": 3, "eos_token_id": [1], "stop_strings": ["a"]}
    assert refused_or_read(GenerationSettings.of, tmp_path, content, "generation_config.json") > 20


def test_a_broken_config_has_no_length_of_a_context(tmp_path: Path) -> None:
    content = {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    refused_or_read(context_length, tmp_path, content, "config.json")


def test_a_broken_session_file_is_refused(tmp_path: Path) -> None:
    content = {
        "session": {"intra_op_num_threads": 1, "graph_optimization_level": "basic", "enable_mem_pattern": True},
        "entries": {"session.intra_op.allow_spinning": "0"},
        "provider": {"name": "CPUExecutionProvider"},
        "free_dimensions": {"batch_size": 1},
    }
    assert refused_or_read(lambda folder: read_session_file(folder / "s.json"), tmp_path, content, "s.json") > 40


@pytest.mark.parametrize("text", ["[" * DEPTH_LIMIT * 2 + "]" * DEPTH_LIMIT * 2, '{"b":' * 200 + "1" + "}" * 200])
def test_deep_nesting_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"a": {text}}}')
    with pytest.raises(MalformedInput, match="nested deeper than 100 levels"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "a/../../etc", "..", "é", ""])
def test_a_model_type_that_is_not_a_name_has_no_source(name: str) -> None:
    assert name == ".." or model_folder(name) is None


PIECE = message(1, message(1, b"a") + message(2, 1))
SENTENCEPIECE = {
    "a piece that is a number": message(1, 7),
    "a text that is a number": message(1, message(1, 7)),
    "a score that is a number": PIECE,
    "a score that is short": message(1, message(1, b"a") + message(2, b"\0")),
    "a type that is a text": message(1, message(1, b"a") + message(3, b"x")),
    "settings that are a number": message(1, message(1, b"a")) + message(2, 7),
    "a special piece that is a text": message(1, message(1, b"a")) + message(2, message(40, b"x")),
    "a normalization that is a number": message(1, message(1, b"a")) + message(3, message(2, 7)),
}


@pytest.mark.parametrize("case", SENTENCEPIECE)
def test_a_sentencepiece_model_with_a_field_of_another_kind_is_refused(case: str) -> None:
    with pytest.raises(MalformedInput, match="is not a sentencepiece model"):
        parse_sentencepiece(SENTENCEPIECE[case])


def test_every_wrong_value_is_valid_json_or_one_that_python_writes() -> None:
    assert all(json.loads(text) is not ... for name, text in WRONG.items() if "5000" not in name)
