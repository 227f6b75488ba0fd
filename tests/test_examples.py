"""The family from outside: its README and the page about families are done word by word, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, assert_shown, blocks

EXAMPLE = ROOT / "examples/custom-family"
PACKAGES = "packages"
"""The folder that plays the part of site-packages."""

WORDS = {
    "python": [sys.executable],
    "llmconv": [sys.executable, "-m", "llmconv"],
    "pip": [sys.executable, "-m", "pip"],
}
OFFLINE = ["--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-index", "--quiet", "--target", PACKAGES]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """An empty folder but for the example."""
    shutil.copytree(EXAMPLE, tmp_path / "examples/custom-family")
    (tmp_path / "home").mkdir()
    return tmp_path


def run(command: list[str], desk: Path, exit_code: int = 0) -> str:
    """What a person sees who has this home and these packages, and no network."""
    options = OFFLINE if command[:2] == ["pip", "install"] else []
    paths = {"PYTHONPATH": f"{desk / PACKAGES}:{ROOT}", "HOME": str(desk / "home"), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [*WORDS[command[0]], *command[1:], *options],
        cwd=desk,
        env={**environment, **paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_readme_of_the_family_from_outside_is_what_happens(desk: Path) -> None:
    session = "".join(blocks(EXAMPLE / "README.md", "console"))
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        assert_shown(shown, run(shlex.split(command), desk, exit_code=3 if "hint: " in shown else 0))
    assert {path.name for path in desk.iterdir()} == {"examples", "home", PACKAGES, "magpie"}
    assert not list((desk / "magpie").glob("__pycache__"))
    assert not list((desk / "home").rglob("*magpie*"))


def test_the_readme_shows_the_row_and_the_entry_point() -> None:
    (row,), (entry,) = blocks(EXAMPLE / "README.md", "python"), blocks(EXAMPLE / "README.md", "toml")
    assert row in (EXAMPLE / "llmconv_magpie.py").read_text()
    assert entry in (EXAMPLE / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_python_of_the_page_about_families_adds_one(desk: Path) -> None:
    (code,) = blocks(ROOT / "docs/adding-a-family.md", "python")
    run(["python", "examples/custom-family/make_checkpoint.py", "magpie"], desk)
    run(["python", "-c", code], desk)
    assert (desk / "magpie/decode.onnx").is_file()
