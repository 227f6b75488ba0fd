"""`llmconv doctor` names what is missing, out of range, or does not load; it runs where no other command does."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from llmconv import doctor
from llmconv.cli import main
from llmconv.doctor import WRONG, Finding

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def with_module(folder: Path, name: str, code: str = "", version: str = "") -> dict[str, str]:
    """An environment in which a package is another one: of this version, or with this code."""
    if version:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if code:
        (folder / f"{name}.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "llmconv", "doctor", *options]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_this_installation_works() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (0, True)


def test_every_requirement_and_every_extra_for_users_has_a_line() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    lines = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")}
    names = {line.split(">")[0].split(";")[0] for line in PROJECT["dependencies"]}
    assert names - lines <= {"packaging"}, "`make setup` again"
    assert {*doctor.NEEDED_FOR} == {*PROJECT["optional-dependencies"]} - {"dev"}


@pytest.mark.slow
def test_a_version_out_of_range_is_named_where_other_commands_stop(tmp_path: Path) -> None:
    done = run(with_module(tmp_path, "transformers", version="4.57.6"))
    assert done.returncode == 3
    (line,) = (line for line in done.stdout.splitlines() if line.split()[:1] == ["transformers"])
    assert "out of range   4.57.6 (<6,>=" in line
    assert done.stderr.startswith("error: this installation does not work: `transformers`\n\nhint: `pip install 'trans")


@pytest.mark.slow
def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    done = run(with_module(tmp_path, "onnxruntime", code="raise ImportError('libcudart.so.13: cannot open')"), "--json")
    assert done.returncode == 3
    findings = {(one["group"], one["name"]): one for one in json.loads(done.stdout)["findings"]}
    assert findings["devices", "onnxruntime"]["note"] == "does not load: libcudart.so.13: cannot open"
    assert findings["devices", "torch"]["status"] == "ok"


def test_a_required_package_that_does_not_load_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml/__init__.py").write_text("raise ImportError('broken')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "llmconv", "doctor"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "(does not load: broken)" in done.stdout
    assert "pyyaml" in done.stderr.splitlines()[0]
    (hint,) = (line for line in done.stderr.splitlines() if line.startswith("hint: "))
    pip, install, again, *requirements = shlex.split(hint.removeprefix("hint: ").strip("`"))
    assert (pip, install, again) == ("pip", "install", "--force-reinstall")
    assert "pyyaml" in {Requirement(one).name for one in requirements}


def test_an_optional_package_out_of_its_range_is_no_problem() -> None:
    assert not Finding("optional", "matplotlib", WRONG, "1.0", "").is_problem
    assert Finding("required", "numpy", WRONG, "1.0", "").is_problem
