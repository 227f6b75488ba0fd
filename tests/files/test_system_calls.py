"""The commands on a Unix without the system calls of Linux: removed in a child process."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.output.local_folder import RENAME_EXCHANGE, RENAME_NOREPLACE, rename_at

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt"
ADAPTER = ROOT / "examples/tiny-llama/adapter"

SHIM = """
import builtins, ctypes, io, mmap, os, platform

for name in (
    "fdatasync sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate copy_file_range memfd_create splice "
    "sendfile getxattr setxattr O_TMPFILE O_DIRECT O_PATH POSIX_FADV_WILLNEED POSIX_FADV_DONTNEED"
).split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE"):
    if hasattr(mmap, name):
        delattr(mmap, name)
platform.libc_ver = lambda *args, **kwargs: ("", "")


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in {"renameat2", "fallocate", "mallopt", "malloc_trim", "memfd_create", "copy_file_range"}:
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library


def without_proc(function, place=0):
    def guarded(*args, **kwargs):
        if len(args) > place and isinstance(args[place], (str, os.PathLike)):
            path = os.fspath(args[place])
            if isinstance(path, str) and (path + "/").startswith("/proc/"):
                raise FileNotFoundError(2, "No such file or directory", path)
        return function(*args, **kwargs)
    return guarded


for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    setattr(os, name, without_proc(getattr(os, name)))
os.symlink = without_proc(os.symlink)
builtins.open = io.open = without_proc(io.open)
"""
"""`sitecustomize.py` of the child."""


@pytest.fixture
def llmconv(tmp_path: Path) -> Callable[..., str]:
    """`llmconv(*words)`: what a command prints; it has to succeed."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim/sitecustomize.py").write_text(SHIM)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "shim"), "TMPDIR": str(tmp_path)}

    seen = "import os, ctypes; print(hasattr(os, 'fdatasync'), hasattr(ctypes.CDLL(None), 'renameat2'))"
    assert subprocess.check_output([sys.executable, "-c", seen], env=env, text=True) == "False False\n"

    def run(*words: str | Path) -> str:
        command = [sys.executable, "-m", "llmconv", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_conversions_need_no_system_call_of_linux(llmconv: Callable[..., str], tmp_path: Path) -> None:
    llmconv("to-hf", CHECKPOINT, "-o", "base", "--max-shard-size", "200KB")
    llmconv("merge-lora", "base", ADAPTER, "-o", "merged", "--check")
    llmconv("merge-lora", "base", ADAPTER, "-o", "merged", "--overwrite")
    llmconv("delta", "extract", "base", "merged", "-o", "delta")
    llmconv("delta", "apply", "base", "delta", "-o", "again")
    for shard in (tmp_path / "merged").glob("*.safetensors"):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_packed_checkpoint_is_unpacked_and_removed(llmconv: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "packed.pt.gz").write_bytes(gzip.compress(CHECKPOINT.read_bytes(), 1))
    assert json.loads(llmconv("inspect", "packed.pt.gz", "--json"))["format"] == "composer"
    assert not list(tmp_path.glob("llmconv-*"))


@pytest.mark.slow
def test_graphs_need_no_system_call_of_linux(llmconv: Callable[..., str], tmp_path: Path) -> None:
    llmconv("to-hf", CHECKPOINT, "-o", "base")
    llmconv("export", "base")
    assert json.loads(llmconv("verify", "base", "--json"))["verdict"] == "pass"
    assert llmconv("generate", "base", "--prompt", "Once there was", "--max-new-tokens", "4")
    assert json.loads(llmconv("bench", "base", "--lengths", "8", "--new-tokens", "4", "--repeat", "1", "--json"))


class NoRename:
    """A C library with neither `renameat2` nor `renamex_np`."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


def test_paths_are_swapped_in_steps_without_an_atomic_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", NoRename)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename_at(tmp_path / "new", tmp_path / "old", RENAME_EXCHANGE)
    assert (tmp_path / "old/new").exists() and (tmp_path / "new/old").exists()
    with pytest.raises(FileExistsError):
        rename_at(tmp_path / "new", tmp_path / "old", RENAME_NOREPLACE)
    rename_at(tmp_path / "new", tmp_path / "fresh", RENAME_NOREPLACE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "old"]
