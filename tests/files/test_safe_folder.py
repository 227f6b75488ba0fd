"""Folder: files are written into the folder that was opened, whatever is there already or is put in the way."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files import safe_folder
from llmconv.files.safe_folder import Folder, Link, is_inner, replace_file, temporary_name


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file elsewhere, which nobody may change."""
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_text("dear")
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty folder."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a link to it": lambda path, victim: path.symlink_to(victim),
    "a relative link to it": lambda path, victim: path.symlink_to(os.path.relpath(victim, path.parent)),
    "a hard link": lambda path, victim: os.link(victim, path),
    "a link to nothing": lambda path, victim: path.symlink_to(victim.parent / "new"),
    "a link to itself": lambda path, victim: path.symlink_to(path.name),
    "a file": lambda path, victim: path.write_text("old"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_an_existing_entry_is_replaced_and_never_followed(kind: str, home: Path, victim: Path) -> None:
    PLANTED[kind](home / "decode.onnx", victim)
    with Folder.open(home) as folder:
        folder.write("decode.onnx", b"graph")
    assert (home / "decode.onnx").read_bytes() == b"graph" and not (home / "decode.onnx").is_symlink()
    assert os.listdir(home) == ["decode.onnx"]
    assert victim.read_text() == "dear" and os.listdir(victim.parent) == ["victim"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("content", [b"graph", Link("x")])
def test_a_pipe_or_a_folder_in_the_way_is_refused(make: Any, content: Any, home: Path) -> None:
    make(home / "decode.onnx")
    with Folder.open(home) as folder, pytest.raises(InputRefused, match=r"decode\.onnx` is a (pipe|folder), which"):
        folder.write_together({"decode.onnx": content})
    assert os.listdir(home) == ["decode.onnx"]


def test_an_inner_folder_that_is_a_link_is_refused(home: Path, victim: Path) -> None:
    (home / "onnx").symlink_to(victim.parent)
    with Folder.open(home) as folder, pytest.raises(MalformedInput, match="`.*onnx` is a link or a file"):
        folder.write("onnx/model.onnx", b"graph")
    assert os.listdir(victim.parent) == ["victim"]


def test_where_the_platform_cannot_refuse_links_they_are_found_by_comparison(
    home: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_folder, "NOFOLLOW", 0)
    monkeypatch.setattr(safe_folder, "READ", os.O_RDONLY)
    (home / "onnx").symlink_to(victim.parent)
    (home / "journal").symlink_to(victim)
    with Folder.open(home) as folder:
        with pytest.raises(MalformedInput, match="is a link or a file"):
            folder.inner("onnx")
        assert folder.read("journal", 100) is None


def test_a_folder_swapped_for_a_link_while_it_is_open_changes_nothing(home: Path, victim: Path) -> None:
    with Folder.open(home) as folder, folder.begin("decode.onnx") as new:
        new.write(b"graph")
        home.rename(home.parent / "moved")
        home.symlink_to(victim.parent)
        new.sync()
        new.place()
        assert not folder.is_at(home)
    assert (home.parent / "moved/decode.onnx").read_bytes() == b"graph"
    assert os.listdir(victim.parent) == ["victim"]


def test_several_files_appear_together_or_not_at_all(home: Path) -> None:
    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    (home / "a").write_text("old")
    with Folder.open(home) as folder, pytest.raises(OSError, match="No space left") as caught:
        folder.write_together({"a": b"new", "onnx/b": Link("../a"), "c": fail})
    assert caught.value.filename == str(home / "c")
    assert os.listdir(home) == ["a"] and (home / "a").read_text() == "old"


def test_the_mode_of_a_file_follows_the_umask(home: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(home / "figures.csv", b"1,2")
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / "figures.csv").stat().st_mode) == 0o640


def test_files_of_a_killed_run_are_removed_and_those_of_a_running_one_stay(home: Path) -> None:
    left, written = home / temporary_name(), home / temporary_name()
    left.write_text("half")
    (home / temporary_name()).symlink_to("/etc/hostname")
    with open(written, "w") as file, Folder.open(home) as folder:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder.sweep()
        assert os.listdir(home) == [written.name]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "device"])
def test_a_file_that_the_user_names_is_a_plain_one(kind: str, home: Path, victim: Path) -> None:
    path = home / "figures.csv"
    if kind == "device":
        path = Path("/dev/null")
    else:
        make: dict[str, Callable[[], object]] = {
            "link": lambda: path.symlink_to(victim),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
        }
        make[kind]()
    with pytest.raises(InputRefused, match="so it is not written to"):
        replace_file(path, b"1,2")
    assert victim.read_text() == "dear"


def test_a_file_with_a_second_name_is_not_appended_to(home: Path, victim: Path) -> None:
    os.link(victim, home / "out.jsonl")
    with Folder.open(home) as folder, pytest.raises(InputRefused, match="hard link"):
        folder.open_to_append("out.jsonl")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname"), Path.mkdir])
def test_only_a_regular_file_is_read(make: Any, home: Path) -> None:
    make(home / "journal.jsonl")
    with Folder.open(home) as folder:
        assert folder.read("journal.jsonl", 1000) is None
        assert folder.read("missing", 1000) is None


def test_a_larger_file_is_not_read(home: Path) -> None:
    (home / "journal.jsonl").write_text("x" * 11)
    with Folder.open(home) as folder:
        assert folder.read("journal.jsonl", 10) is None
        assert folder.read("journal.jsonl", 11) == b"x" * 11


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "x/..", "/etc", "/", "a//b", "a/b/c", "a\0b", "x/", "x" * 300, "é" * 200]
)
def test_a_name_that_leads_elsewhere_is_not_inner(name: str) -> None:
    assert not is_inner(name)


@pytest.mark.parametrize("name", ["a", "a/b", "..a", "a b", "rank_0/model.ckpt"])
def test_a_name_in_the_folder_or_one_below_is_an_inner_one(name: str) -> None:
    assert is_inner(name)
