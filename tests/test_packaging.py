"""The three rooms at the top level import only as llmconv.*, and the wheel holds them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import llmconv

ROOT = Path(__file__).parents[1]
ROOMS = ("convert", "export", "verify")


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, in the root of the repository."""
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_its_bare_name_in_the_root_of_the_repository(room: str) -> None:
    done = python(f"import {room}")
    assert done.returncode == 1
    assert f"ImportError: import llmconv.{room}: `{room}` is not a top-level package" in done.stderr


@pytest.mark.slow
def test_the_bare_names_are_unknown_to_an_installed_user() -> None:
    for room in ROOMS:
        assert f"No module named '{room}'" in python(f"import {room}", "-I").stderr
        assert python(f"import importlib.util as u; assert u.find_spec('llmconv.{room}')", "-I").returncode == 0


@pytest.mark.parametrize("room", ROOMS)
def test_the_link_of_a_room_is_relative(room: str) -> None:
    assert os.readlink(ROOT / "llmconv" / room) == f"../{room}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_links_are_committed_as_links() -> None:
    links = [f"llmconv/{room}" for room in ROOMS]
    listing = subprocess.run(["git", "ls-files", "-s", *links], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listing.stdout.splitlines()] == ["120000"] * 3


def test_every_module_is_in_a_package() -> None:
    folders = {path.parent for room in ("llmconv", *ROOMS) for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_version_is_the_top_entry_of_the_changelog() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == llmconv.__version__


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pinned = {plain(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)}
    assert {plain(re.split("[<>=;]", requirement)[0].strip()) for requirement in wanted} <= pinned


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_the_wheel_made_from_the_sdist_holds_the_tree_and_works_alone() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.wheel"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


REMOTES = {
    "https://example.org/org/llmconv.git": "https://example.org/org/llmconv",
    "https://user:token@example.org/org/llmconv": "https://example.org/org/llmconv",
    "git@example.org:org/llmconv.git": "https://example.org/org/llmconv",
    "/srv/llmconv": None,
    "": None,
}


def urls(folder: Path) -> dict[str, str]:
    """The addresses that setup.py gives to setuptools in a folder."""
    code = (
        "import json, runpy, setuptools; setuptools.setup = lambda **given: print(json.dumps(given['project_urls'])); "
    )
    line = [sys.executable, "-c", f"{code}runpy.run_path('setup.py')"]
    shutil.copy(ROOT / "setup.py", folder)
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("remote", REMOTES)
def test_the_address_of_the_package_is_the_one_that_it_was_cloned_from(remote: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=tmp_path, check=True)
    assert urls(tmp_path).get("Source") == REMOTES[remote]


@pytest.mark.slow
def test_an_sdist_keeps_its_address(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(
        "Name: llmconv\nProject-URL: Source, https://example.org/org/llmconv\n\nProject-URL: No, this is the readme\n"
    )
    assert urls(tmp_path) == {"Source": "https://example.org/org/llmconv"}
