"""Pointer files: followed on the disk and in a bucket, never out of it and never in circles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from llmconv.errors import InputRefused, MalformedInput
from llmconv.files.sources import local_path


def write(path: Path, content: str = "weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket that was copied: a checkpoint and a pointer to it."""
    write(tmp_path / "copy/run/checkpoints/ep0.pt")
    write(tmp_path / "copy/run/checkpoints/latest.pt.symlink", "run/checkpoints/ep0.pt\n")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", ["latest.pt.symlink", "latest.pt"])
def test_a_pointer_is_followed_from_the_root_of_the_bucket(bucket: Path, name: str) -> None:
    assert local_path(bucket / "run/checkpoints" / name) == bucket / "run/checkpoints/ep0.pt"


def test_a_relative_path_of_a_pointer_is_followed(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bucket / "run/checkpoints")
    assert local_path("latest.pt").read_text() == "weights"


def test_a_file_that_is_there_wins_over_its_pointer(bucket: Path) -> None:
    there = write(bucket / "run/checkpoints/latest.pt")
    assert local_path(there) == there


def test_a_pointer_may_name_a_folder(bucket: Path) -> None:
    write(bucket / "run/ep1/.metadata")
    pointer = write(bucket / "run/latest.symlink", "run/ep1")
    assert local_path(pointer) == bucket / "run/ep1"


def test_a_pointer_to_a_pointer_is_followed(bucket: Path) -> None:
    pointer = write(bucket / "first.symlink", "run/checkpoints/latest.pt")
    assert local_path(pointer) == bucket / "run/checkpoints/ep0.pt"


def test_a_pointer_that_was_copied_with_its_checkpoint_alone_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "ep0.pt")
    assert local_path(write(tmp_path / "latest.pt.symlink", "run/checkpoints/ep0.pt")) == tmp_path / "ep0.pt"


def test_the_text_of_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "ep0.pt")
    assert local_path(write(tmp_path / "latest.pt", "ep0.pt")) == tmp_path / "ep0.pt"


def test_a_text_that_names_nothing_is_left_alone(tmp_path: Path) -> None:
    for text in ("ep0.pt", "..", "a\nb", "/etc/passwd", "", "notes"):
        path = write(tmp_path / "notes", text)
        assert local_path(path) == path


@pytest.mark.parametrize("text", ["/etc/passwd", "../secret", "run/../../secret", "s3://other/x", "a\\b"])
def test_a_pointer_out_of_the_bucket_is_refused(bucket: Path, text: str) -> None:
    write(bucket.parent / "secret")
    with pytest.raises(MalformedInput, match="outside of its bucket"):
        local_path(write(bucket / "run/x.symlink", text))


@pytest.mark.parametrize("text", ["", "a\x00b", "a" * 2000, "\x1b[2J", "a\nb"])
def test_a_pointer_that_holds_no_name_is_refused(bucket: Path, text: str) -> None:
    with pytest.raises(MalformedInput, match="is not a pointer"):
        local_path(write(bucket / "x.symlink", text))


def test_binary_data_is_not_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "x.symlink").write_bytes(b"\xff\xfe")
    with pytest.raises(MalformedInput, match="is not a pointer"):
        local_path(tmp_path / "x.symlink")


def test_pointers_in_a_circle_are_refused(bucket: Path) -> None:
    write(bucket / "a.symlink", "b")
    write(bucket / "b.symlink", "a")
    with pytest.raises(MalformedInput, match="circle of pointers"):
        local_path(bucket / "a")


def test_a_long_chain_of_pointers_is_refused(bucket: Path) -> None:
    for number in range(20):
        write(bucket / f"{number}.symlink", str(number + 1))
    with pytest.raises(MalformedInput, match="circle of pointers"):
        local_path(bucket / "0")


def test_the_error_for_a_missing_target_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"points to `run/ep9\.pt`, which does not exist") as refusal:
        local_path(write(tmp_path / "latest.symlink", "run/ep9.pt"))
    assert "name the checkpoint itself" in refusal.value.hint


def test_a_symbolic_link_is_followed_and_a_broken_one_is_named(bucket: Path) -> None:
    (bucket / "good").symlink_to("run/checkpoints/ep0.pt")
    (bucket / "bad").symlink_to("run/ep9.pt")
    (bucket / "circle").symlink_to("circle")
    assert local_path(bucket / "good").read_text() == "weights"
    for name in ("bad", "circle"):
        with pytest.raises(InputRefused, match="is a link to"):
            local_path(bucket / name)


# In a bucket


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that downloads go to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.fixture
def remote(temporary: Path) -> Iterator[str]:
    """The address of a bucket in memory."""
    files = fsspec.filesystem("memory")
    files.pipe("/b/run/checkpoints/ep0.pt", b"weights")
    files.pipe("/b/run/checkpoints/latest.pt.symlink", b"run/checkpoints/ep0.pt")
    files.pipe("/b/run/broken.symlink", b"run/ep9.pt")
    files.pipe("/b/run/out.symlink", b"../x")
    yield "memory://b/run/"
    files.rm("/b", recursive=True)


@pytest.mark.parametrize("name", ["checkpoints/latest.pt.symlink", "checkpoints/latest.pt", "checkpoints/ep0.pt"])
def test_a_pointer_is_followed_in_the_bucket(remote: str, name: str) -> None:
    found = local_path(remote + name)
    assert (found.name, found.read_text()) == ("ep0.pt", "weights")


@pytest.mark.parametrize(
    ("name", "reason"), [("broken", "does not exist"), ("out", "outside"), ("none", "cannot fetch")]
)
def test_a_pointer_that_leads_nowhere_in_the_bucket_is_refused(
    remote: str, temporary: Path, name: str, reason: str
) -> None:
    with pytest.raises(InputRefused, match=reason):
        local_path(remote + name)
    assert not [*temporary.iterdir()]


def test_a_pointer_on_a_local_file_system_address_is_followed(bucket: Path, temporary: Path) -> None:
    assert local_path(f"file://{bucket}/run/checkpoints/latest.pt").read_text() == "weights"


def test_downloads_are_removed_at_the_end_of_the_process(bucket: Path, temporary: Path) -> None:
    code = "import sys; from llmconv.files.sources import local_path as f; f(sys.argv[1])"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    uri = f"file://{bucket}/run/checkpoints/latest.pt"
    subprocess.run([sys.executable, "-c", code, uri], env=environment, check=True)
    assert not [*temporary.iterdir()]
