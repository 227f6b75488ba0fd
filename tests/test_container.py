"""The commands of the Dockerfile, run as a script in an empty environment: there is no container runtime in tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split()


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def context(folder: Path) -> Path:
    """What `COPY . .` copies: the files of the tree that .dockerignore lets in."""
    names = [name[1:] for name in IGNORED if name.startswith("!")]
    kept = [path for name in names for path in ROOT.glob(name)]
    folder.mkdir()
    for path in kept:
        if path.is_dir():
            shutil.copytree(
                path, folder / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(path, folder)
    return folder


def test_it_runs_as_no_root_user_and_its_entry_point_is_the_command() -> None:
    found = instructions()
    assert [rest for name, rest in found if name == "USER"] == ["1000:1000"]
    assert json.loads(next(rest for name, rest in found if name == "ENTRYPOINT")) == ["llmconv"]


def test_the_python_is_one_that_llmconv_supports() -> None:
    versions = {rest.split(":")[1].split("-")[0] for name, rest in instructions() if name == "FROM"}
    assert versions == {"3.11"}
    assert "Programming Language :: Python :: 3.11" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_its_commands_build_and_install_a_working_llmconv(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip"]
    subprocess.run([*pip, "uninstall", "-q", "-y", "setuptools"], check=True)  # too old to build it
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone |= {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "PIP_OPTIONS": "--no-deps --no-index"}
    alone |= {"PIP_NO_BUILD_ISOLATION": "0"}  # as pip reads it: the borrowed setuptools builds
    source = context(tmp_path / "source")
    for name, rest in instructions():
        if name == "RUN" and not rest.startswith("apt-get"):
            line = re.sub(r"(?<![\w.])/wheels", str(tmp_path / "wheels"), rest)
            done = subprocess.run(
                ["sh", "-ec", line], cwd=source, env=alone, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
    example = ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt"
    for words in (["doctor"], ["to-hf", str(example), "-o", str(tmp_path / "base")]):
        done = subprocess.run(
            [venv / "bin/llmconv", *words], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (
        str(site)
        in subprocess.run(
            [venv / "bin/python", "-c", "import llmconv.convert; print(llmconv.convert.__file__)"],
            cwd=tmp_path,
            env=alone,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
