"""Temporary folders are removed, also those of processes that were killed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmconv.files.safe_folder import PREFIX, YOUNG, make_temporary_folder, remove_temporary_folder

MAKE = """
import sys
from llmconv.files.safe_folder import make_temporary_folder
folder = make_temporary_folder()
(folder / "weights").write_bytes(b"1")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def folder_of_another(end: signal.Signals | None) -> Path:
    """What another process has made long ago; the process has got the signal `end`, or still runs."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MAKE], text=True, **pipes)  # type: ignore[call-overload]
    folder = Path(process.stdout.readline().strip()).parent
    OTHERS.append(process)
    if end:
        process.send_signal(end)
        process.wait()
    long_ago = time.time() - 2 * YOUNG
    os.utime(folder, (long_ago, long_ago))
    return folder


OTHERS: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def end_others() -> Iterator[None]:
    yield
    for process in OTHERS:
        process.communicate("")
    OTHERS.clear()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(home: Path) -> None:
    left = folder_of_another(signal.SIGKILL)
    assert left.is_dir()
    mine = make_temporary_folder()
    assert [*home.iterdir()] == [mine.parent]
    remove_temporary_folder(mine)
    assert not [*home.iterdir()]


def test_the_folder_of_a_running_process_stays(home: Path) -> None:
    left = folder_of_another(None)
    remove_temporary_folder(make_temporary_folder())
    assert [*home.iterdir()] == [left] and [*left.glob("*/weights")]


def test_a_process_that_ends_removes_its_own(home: Path) -> None:
    folder_of_another(None)
    OTHERS.pop().communicate("")
    assert not [*home.iterdir()]


def test_a_link_with_such_a_name_is_not_followed(home: Path) -> None:
    (home / "precious").mkdir()
    (home / f"{PREFIX}link").symlink_to(home / "precious")
    os.utime(home / f"{PREFIX}link", (0, 0), follow_symlinks=False)
    remove_temporary_folder(make_temporary_folder())
    assert (home / "precious").is_dir() and (home / f"{PREFIX}link").is_symlink()


def test_a_fork_that_ends_leaves_the_folder_to_its_parent(home: Path) -> None:
    script = MAKE.replace(
        "sys.stdin.read()", "import os\nif os.fork() == 0: sys.exit()\nos.wait(); print(folder.exists())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "True" and not [*home.glob(f"{PREFIX}*")]


def test_many_folders_take_one_descriptor() -> None:
    folders = [make_temporary_folder() for _ in range(50)]
    before = len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").is_dir() else 0
    more = [make_temporary_folder() for _ in range(50)]
    assert not before or len([*Path("/proc/self/fd").iterdir()]) == before
    for folder in folders + more:
        remove_temporary_folder(folder)
