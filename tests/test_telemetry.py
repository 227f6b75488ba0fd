"""onnxruntime's wheels report to their maker from the import on, unless a variable says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "ORT_DISABLE_TELEMETRY"


def traces_of(code: str, folder: Path, **variables: str) -> set[str]:
    """The names that a Python leaves in its temporary folder and in its home."""
    (folder / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder), "XDG_CACHE_HOME": "", **variables}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_importing_llmconv_first_turns_the_reports_of_onnxruntime_off(tmp_path: Path) -> None:
    assert not traces_of("import llmconv, onnxruntime", tmp_path)


def test_a_worker_of_another_environment_inherits_the_setting() -> None:
    code = "import llmconv.interpreters as found; print(found.child_environment()['ORT_DISABLE_TELEMETRY'])"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


@pytest.mark.slow
def test_the_users_own_setting_stays(tmp_path: Path) -> None:
    found = traces_of("import llmconv, onnxruntime", tmp_path, **{VARIABLE: "0"})
    if not found:
        pytest.skip("this build of onnxruntime reports nothing, so there is nothing to see")
    assert ".ses" in found
