"""Outputs are local: a URI is refused for every option and parameter that is written."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import llmconv.bench
import llmconv.convert
import llmconv.export
import llmconv.verify
from llmconv.bench.bench import BenchResult, write_csv, write_plot
from llmconv.cli import main
from llmconv.cli.options import Output
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.files.paths import PLACED, WRITTEN, output_path, path_of
from llmconv.generation.completions import CompletionFile
from llmconv.verify.report.files import write_report
from llmconv.verify.results import Report
from tests.cli.commands import LEAVES, command

STORES = ["s3", "gs", "az", "abfs", "hf", "oci", "http", "https", "memory", "file", "S3"]
FORMS = ["{}://bucket/x", "{}:/bucket/x", " {}://bucket/x"]

READ = {
    *("file", "folder", "prefix", "adapter", "decode", "session_config", "graphs", "text", "tokenizer", "calibrate"),
    "json_schema",
}
"""Options of click's own type for paths; they are inputs."""

COMMANDS = {
    "to-hf": ["to-hf", "missing", "-o"],
    "from-hf": ["from-hf", "missing", "--to", "meta", "-o"],
    "to-gguf": ["to-gguf", "missing", "-o"],
    "merge-lora": ["merge-lora", "missing", "missing", "-o"],
    "delta apply": ["delta", "apply", "missing", "missing", "-o"],
    "delta extract": ["delta", "extract", "missing", "missing", "-o"],
    "export": ["export", "missing", "-o"],
    "verify": ["verify", "missing", "--report"],
    "verify, the smallest piece": ["verify", "missing", "--minimize"],
    "generate": ["generate", "missing", "a", "--output-file"],
    "bench": ["bench", "missing", "--csv"],
    "bench, the curves": ["bench", "missing", "--plot"],
}
"""Command lines that end before the place to write; nothing that they name exists, so that is not looked at first."""

NOTHING = BenchResult([], {}, [], 0, 0, 0)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "to_hf": lambda out: llmconv.convert.to_hf("missing", out),
    "from_hf": lambda out: llmconv.convert.from_hf("missing", out, to="meta"),
    "to_gguf": lambda out: llmconv.to_gguf("missing", out),
    "importance_matrix": lambda out: llmconv.compressed.importance_matrix("missing", out),
    "merge_lora": lambda out: llmconv.convert.merge_lora("missing", "missing", out),
    "apply_delta": lambda out: llmconv.convert.apply_delta("missing", "missing", out),
    "extract_delta": lambda out: llmconv.convert.extract_delta("missing", "missing", out),
    "export": lambda out: llmconv.export.export("missing", out),
    "verify": lambda out: llmconv.verify.verify("missing", minimize=out),
    "verify_graphs": lambda out: llmconv.verify.verify_graphs("missing.onnx", minimize=out),
    "write_report": lambda out: write_report(Report("a", "a", "quick"), out),
    "write_csv": lambda out: write_csv(NOTHING, out),
    "write_plot": lambda out: write_plot(NOTHING, out),
    "CompletionFile": lambda out: CompletionFile(out, [], {}),
}


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in an empty folder and leaves it so."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [*tmp_path.rglob("*")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("store", STORES)
def test_a_uri_is_refused_as_an_output(store: str, form: str) -> None:
    with pytest.raises(InputRefused, match="not on this machine") as caught:
        output_path(form.format(store))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("s3://b/x", "aws s3 cp"),
        ("gs://b/x", "gcloud storage cp"),
        ("hf://org/x", "hf upload"),
        ("file:///tmp/x", "`/tmp/x`"),
        ("host:/data/x", "`./host:/data/x`"),
        ("me@host:/data/x", "copy it"),
    ],
)
def test_the_hint_names_the_way_there(address: str, hint: str) -> None:
    with pytest.raises(InputRefused) as caught:
        output_path(address)
    assert hint in caught.value.hint


def test_a_local_folder_that_looks_like_an_address_is_given_with_a_dot(tmp_path: Path) -> None:
    once = output_path("./s3:/bucket/x")
    assert once == output_path(once) == tmp_path / "s3:/bucket/x"


@pytest.mark.parametrize("name", ["out", "/a/b", "a:b", "C:/x", "a/s3:/b", "../x", "out.jsonl"])
def test_other_names_are_unchanged(name: str) -> None:
    assert output_path(name) == Path(name)


@pytest.mark.parametrize("value", [None, 3, b"x", ["x"], {"x": 1}, "", "a\0b"])
def test_the_type_of_a_value_that_is_not_a_path_is_named(value: Any) -> None:
    with pytest.raises(UsageProblem, match="`output` is"):
        path_of(value, "output")


def test_an_open_model_is_to_be_saved_first() -> None:
    class Model:
        def save_pretrained(self, folder: str) -> None: ...

    with pytest.raises(UsageProblem, match="a Model, not a path") as caught:
        path_of(Model(), "model")
    assert "save_pretrained(FOLDER)" in caught.value.hint


def test_of_a_trainer_the_model_is_to_be_given() -> None:
    class Model:
        def save_pretrained(self, folder: str) -> None: ...

    class Trainer:
        model = Model()

        def train(self) -> None: ...

    with pytest.raises(UsageProblem, match="a Trainer, not a path") as caught:
        export(Trainer(), "out")  # type: ignore[arg-type]
    assert "`trainer.model`" in caught.value.hint


def test_a_hyphen_is_not_a_file_to_write() -> None:
    with pytest.raises(InputRefused, match="not a file"):
        output_path("-")


@pytest.mark.parametrize("address", ["ftp://host/x", "s3:/bucket/x", "file:///x"])
@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_every_command_refuses_an_address_before_anything_else(line: list[str], address: str) -> None:
    result = CliRunner().invoke(main, [*line, address])
    assert result.exit_code == 3, result.output
    assert f"`{address}` is not on this machine" in result.stderr
    assert "hint: " in result.stderr


@pytest.mark.parametrize("address", ["ftp://host/x", Path("s3://bucket/x")], ids=["text", "path"])
@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_function_refuses_an_address_before_anything_else(call: Callable[[Any], Any], address: Any) -> None:
    with pytest.raises(InputRefused, match="not on this machine"):
        call(address)


@pytest.mark.parametrize("name", LEAVES)
def test_every_path_option_declares_whether_it_is_an_output(name: str) -> None:
    paths = [option for option in command(name).params if isinstance(option.type, click.Path)]
    assert {str(option.name) for option in paths} <= READ
    written = {"output", "report_folder", "minimize", "output_file", "csv_file", "plot_file"}
    assert all(isinstance(option.type, Output) for option in command(name).params if option.name in written)


@pytest.mark.parametrize("room", [llmconv.convert, llmconv.export, llmconv.verify, llmconv.bench])
def test_every_output_parameter_is_declared(room: Any) -> None:
    for name in room.__all__:
        if not inspect.isfunction(getattr(room, name)):
            continue
        hints = typing.get_type_hints(getattr(room, name), include_extras=True)
        for parameter in hints.keys() & {"output", "minimize", "report"}:
            assert any(mark in str(hints[parameter]) for mark in (WRITTEN, PLACED)), (name, parameter)
