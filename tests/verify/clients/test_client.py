"""Clients that `verify --client` starts: which are chosen, and what happens without them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.verify import verify
from llmconv.verify.clients.comparison import CLIENTS, WORKERS, Client, ClientError, chosen_clients


def test_every_client_has_a_worker_and_no_worker_is_left_over() -> None:
    files = {path.name for path in WORKERS.iterdir() if path.is_file()} - {"__init__.py"}
    assert files == {one.worker for one in CLIENTS.values()}


def test_a_client_runs_in_this_python_or_with_global_packages_unless_another_is_given() -> None:
    assert chosen_clients("genai", ()) == [Client("genai", sys.executable)]
    assert chosen_clients("transformersjs", ()) == [Client("transformersjs", "")]
    assert chosen_clients(["genai", "genai"], "genai=/py") == [Client("genai", "/py")]


@pytest.mark.parametrize(
    ("names", "pythons", "problem"),
    [
        ("genie", (), "unknown client `genie`"),
        ("genai", ["optimum=/py"], "`--python optimum=…` without `--client optimum`"),
        ("genai", ["genai"], "`genai` is not NAME=PATH"),
        ("genai", ["genie=/py"], "unknown name in `--python genie=/py`"),
    ],
)
def test_a_slip_is_refused_in_one_line(names: str, pythons: str | list[str], problem: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        chosen_clients(names, pythons)
    assert caught.value.message == problem
    assert caught.value.hint


@pytest.mark.parametrize("path", ["/no/such/python", ""])
def test_a_client_that_is_not_installed_is_refused_before_anything_runs(talking: Path, path: str) -> None:
    pythons = [f"genai={path}"] if path else []
    with pytest.raises(InputRefused, match="the client `genai` (cannot be started|is not installed)") as caught:
        verify(talking, clients="genai", pythons=pythons, on_checks=lambda checks: pytest.fail(str(checks)))
    assert "pip install onnxruntime-genai" in (caught.value.hint or "")


def test_a_program_that_answers_nothing_is_an_error_of_the_client(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ValueError: no such graph' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ClientError, match="ValueError: no such graph"):
        Client("optimum", str(broken)).generate(tmp_path, [[[1]]], 1)


def test_a_program_that_is_no_python_is_an_error_of_the_client(tmp_path: Path) -> None:
    for name in ("echo", "true"):
        program = shutil.which(name)
        assert program
        with pytest.raises(ClientError):
            Client("optimum", program).generate(tmp_path, [[[1]]], 1)


def test_a_configuration_that_loads_a_library_never_reaches_the_client(tmp_path: Path) -> None:
    options = '{"custom_ops_library": "evil.so"}'
    (tmp_path / "genai_config.json").write_text(f'{{"model": {{"decoder": {{"session_options": {options}}}}}}}')
    with pytest.raises(MalformedInput, match="custom_ops_library"):
        Client("genai", sys.executable).generate(tmp_path, [[[1]]], 1)


def test_node_takes_no_package_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "node_modules/@huggingface/transformers"
    home.mkdir(parents=True)
    (home / "package.json").write_text('{"name": "@huggingface/transformers", "main": "index.js"}')
    (home / "index.js").write_text("module.exports = { env: { version: 'of the folder' } };")
    monkeypatch.chdir(tmp_path)
    (given,) = chosen_clients("transformersjs", "transformersjs=.")
    assert given.require() == {"@huggingface/transformers": "of the folder"}
    (found,) = chosen_clients("transformersjs", ())
    with pytest.raises(InputRefused, match="is not installed"):
        found.require()
