"""`optimum-cli export llmconv` is `llmconv export` with optimum's command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from tests.conftest import save_tiny
from tests.hub.conftest import contents

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins/optimum"


def optimum_cli(
    *words: object, python: Path | str = sys.executable, path: str = str(PLUGIN)
) -> subprocess.CompletedProcess[str]:
    line = [str(python), "-m", "optimum.commands.optimum_cli", "export", "llmconv", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "400"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_has_the_options_of_export() -> None:
    found = optimum_cli("--help").stdout
    for option in main.commands["export"].params:
        if isinstance(option, click.Option) and option.name != "output":
            assert max(option.opts, key=len) in found


@pytest.mark.slow
def test_it_writes_the_files_of_export(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    words = ["--unified", "--layout", "optimum", "--layout", "genai", "--opset", "24"]
    done = optimum_cli(model, tmp_path / "one", *words)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{tmp_path}/one/model.onnx"), done.stderr
    assert CliRunner().invoke(main, ["export", str(model), "-o", str(tmp_path / "two"), *words]).exit_code == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_an_error_has_the_message_and_the_exit_code_of_export(tmp_path: Path) -> None:
    done = optimum_cli(tmp_path / "none", tmp_path / "out")
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert "\n\nhint: " in done.stderr


@pytest.mark.slow
def test_an_abbreviated_option_is_refused_as_by_export(tmp_path: Path) -> None:
    done = optimum_cli(tmp_path / "none", "--unif")
    assert (done.returncode, "--unif" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_the_plugin_installs_by_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)  # too old to build it
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    source = shutil.copytree(PLUGIN, tmp_path / "plugin")  # pip leaves a folder `build` in it
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", str(source)]
    subprocess.run([str(python), *install], check=True)
    done = optimum_cli("--help", python=python, path="")
    assert (done.returncode, "Hugging Face folder" in done.stdout) == (0, True), done.stderr
    assert not [*site.glob("optimum/**/__init__.py")]
