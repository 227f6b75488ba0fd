"""Crash safety: killed, or out of space at any step, OUT is absent or complete, and `--resume` finishes it."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.errors import InputRefused, OutputFailed
from llmconv.files import copying
from llmconv.files.copying import copy_file
from llmconv.files.safe_folder import Link
from llmconv.output import local_folder
from llmconv.output.local_folder import LocalFolder, StagedFolder, rename_at
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import check_output, write_checkpoint
from llmconv.tensors import BY_NAME, LazyTensor, in_memory
from tests.builders.slow_rows import slow_but

F32 = BY_NAME["float32"]
STEPS = ("write", "fsync", "fdatasync", "copy_file_range", "replace", "rename", "unlink", "mkdir", "rmdir")
Files = dict[str, bytes]


def sample(offset: int = 0, count: int = 3) -> Checkpoint:
    """Tensors of 80 bytes each, one per shard."""
    tensors = {f"t{i}": in_memory(np.arange(20, dtype=np.float32) + i + offset, F32) for i in range(count)}
    side_files = {"tokenizer.json": b"{}", "inner/notes.json": b"[]"}
    return Checkpoint(Path("sample"), "test", tensors, {"model_type": "llama"}, side_files)


def write(folder: Path, checkpoint: Checkpoint | None = None, **options: Any) -> Files:
    """Writes three shards and a folder with a file, and returns the content of every file."""
    plan = plan_checkpoint(checkpoint or sample(), 100)
    check_output(plan, folder, options.get("overwrite", False), [], resume=options.get("resume", False))
    write_checkpoint(plan, folder, steps=[], sources=[], **options)
    return content(folder)


def content(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked child and returns its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def killing_at(step: int, work: Callable[[], object], *, after: bool) -> Callable[[], object]:
    """`work`, killed with signal 9 just before (or after) its system call number `step`."""
    numbers = itertools.count(1)  # `next` gives no two threads the same

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            number = next(numbers)
            if number == step and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **options)
            if number == step and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    def patched() -> object:
        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        local_folder.rename_at = counted(rename_at)
        return work()

    return patched


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("overwrite", slow_but([False, True], False), ids=["new", "overwrite"])
def test_killed_at_any_step_out_is_old_or_new_and_resume_completes_it(
    overwrite: bool, after: bool, tmp_path: Path
) -> None:
    new = write(tmp_path / "reference")
    for step in range(1, 1000):
        out = tmp_path / str(step) / "out"
        out.parent.mkdir()
        old = write(out, sample(7)) if overwrite else None
        status = in_child(killing_at(step, partial(write, out, overwrite=overwrite), after=after))
        if not os.WIFSIGNALED(status):
            break
        seen = content(out) if out.exists() else None
        assert seen in (old, new)
        if seen != new or overwrite:
            assert write(out, overwrite=overwrite, resume=True) == new
            assert os.listdir(out.parent) == ["out"]
        shutil.rmtree(out.parent)
    assert status == 0
    assert step > 35


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_of_copying_out_is_absent_or_whole_and_resume_completes_it(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "COPY_BYTES", 100)
    checkpoint = partly_changed(write_and_path(tmp_path / "base"))
    new = write(tmp_path / "reference", checkpoint)
    for step in range(1, 1000):
        out = tmp_path / str(step) / "out"
        out.parent.mkdir()
        status = in_child(killing_at(step, partial(write, out, checkpoint), after=after))
        if not os.WIFSIGNALED(status):
            break
        assert not out.exists() or content(out) == new
        if not out.exists():
            assert write(out, checkpoint, resume=True) == new
            assert os.listdir(out.parent) == ["out"]
    assert status == 0
    assert step > 30


def partly_changed(base: Path) -> Checkpoint:
    """A checkpoint of three files, of which the second is not as in the base."""
    checkpoint = open_checkpoint(base)
    tensors = {**checkpoint.tensors, "t1": in_memory(np.zeros(20, np.float32), F32)}
    return replace(checkpoint, tensors=tensors)


def test_resume_keeps_a_copy_that_is_whole_and_makes_others_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(start: int, stop: int) -> Any:
        raise OSError(5, "Input/output error")

    def noted(source: Path, *more: Any) -> Any:
        copied.append(source.name)
        return copy_file(source, *more)

    copied: list[str] = []
    monkeypatch.setattr(copying, "FICLONE", 0)
    checkpoint = partly_changed(write_and_path(tmp_path / "base"))
    broken = replace(checkpoint, tensors={**checkpoint.tensors, "t1": LazyTensor(F32, (20,), fail)})
    with pytest.raises(OutputFailed):
        write(tmp_path / "out", broken)
    monkeypatch.setattr(local_folder, "copy_file", noted)
    files = write(tmp_path / "out", checkpoint, resume=True)
    assert copied == ["model-00003-of-00003.safetensors"]
    assert files == write(tmp_path / "reference", checkpoint)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_resume_does_not_compute_finished_shards_again(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    checkpoint = counting(sample(), reads)
    for step in range(1, 1000):
        if not os.WIFSIGNALED(in_child(killing_at(step, lambda: write(tmp_path / "out", checkpoint), after=True))):
            break
        if (tmp_path / ".out.llmconv-partial" / "model-00002-of-00003.safetensors").exists():
            break
        shutil.rmtree(tmp_path / ".out.llmconv-partial", ignore_errors=True)
    reads.unlink()
    write(tmp_path / "out", checkpoint, resume=True)
    assert reads.read_text() in ("t2 ", "t1 t2 ")


def counting(checkpoint: Checkpoint, log: Path) -> Checkpoint:
    """The same checkpoint; each read adds the tensor's name to `log`."""

    def logged(name: str, tensor: LazyTensor) -> LazyTensor:
        def load(start: int, stop: int) -> Any:
            with open(log, "a") as file:
                file.write(f"{name} ")
            return tensor.rows(start, stop)

        return LazyTensor(tensor.dtype, tensor.shape, load)

    tensors = {name: logged(name, tensor) for name, tensor in checkpoint.items()}
    return Checkpoint(checkpoint.path, "test", tensors, checkpoint.config, checkpoint.side_files)


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """OUT of a run that failed in its second shard, so that the first is kept for `--resume`."""

    def fail(start: int, stop: int) -> Any:
        raise OSError(5, "Input/output error")

    tensors = {**sample().tensors, "t1": LazyTensor(F32, (20,), fail)}
    broken = Checkpoint(Path("sample"), "test", tensors, sample().config, sample().side_files)
    with pytest.raises(OutputFailed, match="Input/output error"):
        write(tmp_path / "out", broken)
    return tmp_path / "out"


def staged(out: Path) -> Path:
    return out.parent / f".{out.name}.llmconv-partial"


def test_a_failed_run_leaves_no_out_and_its_finished_shard(interrupted: Path) -> None:
    assert not interrupted.exists()
    assert "model-00001-of-00003.safetensors" in os.listdir(staged(interrupted))
    assert not list(staged(interrupted).glob("model-*.part"))


def test_resume_reads_a_damaged_shard_again(interrupted: Path, tmp_path: Path) -> None:
    shard = staged(interrupted) / "model-00001-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert write(interrupted, resume=True) == write(tmp_path / "reference")


@pytest.mark.parametrize(
    "journal", ["", "{", "[]\n", '{"key": "other"}\n', "\x00\n", '{"key": 1}\n[]\n', '{"key": 1}\n{"file": 3}\n']
)
def test_resume_ignores_a_damaged_journal(journal: str, interrupted: Path, tmp_path: Path) -> None:
    path = staged(interrupted) / "journal.jsonl"
    key = path.read_text().splitlines()[0]
    path.write_text(journal.replace('{"key": 1}', key))
    assert write(interrupted, resume=True) == write(tmp_path / "reference")


def test_resume_of_another_input_starts_anew(interrupted: Path, tmp_path: Path) -> None:
    other = sample(count=4)
    assert write(interrupted, other, resume=True) == write(tmp_path / "reference", other)


def test_resume_of_another_configuration_starts_anew(interrupted: Path, tmp_path: Path) -> None:
    """Which says how rows are ordered, and may lie outside of the sources: a `--config`, or a file next to them."""
    other = replace(sample(offset=7), config={"model_type": "llama", "num_attention_heads": 8})
    assert write(interrupted, other, resume=True) == write(tmp_path / "reference", other)


def test_without_resume_a_partial_run_is_not_used(interrupted: Path, tmp_path: Path) -> None:
    assert write(interrupted) == write(tmp_path / "reference")
    assert not staged(interrupted).exists()


def test_an_output_that_exists_is_refused_and_untouched(tmp_path: Path) -> None:
    before = write(tmp_path / "out")
    with pytest.raises(InputRefused, match="already exists"):
        write(tmp_path / "out", sample(1))
    assert content(tmp_path / "out") == before


def test_a_complete_output_is_reported_and_nothing_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert write(tmp_path / "out", resume=True) == files
    assert "is complete: nothing to resume" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(InputRefused, match="`.*out` already exists and is complete"):
        write(tmp_path / "out")


@pytest.mark.parametrize("change", ["options", "shards", "a small file", "values"])
def test_a_complete_output_of_something_else_is_not_resumed(change: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.touch()
    plan = plan_checkpoint(sample(), 100)
    steps: list[dict[str, Any]] = [{"command": "to-hf", "options": {"names": ("a", "b")}}]
    write_checkpoint(plan, tmp_path / "out", steps=steps, sources=[source])
    write_checkpoint(plan, tmp_path / "out", steps=steps, sources=[source], resume=True)
    if change == "options":
        steps = [{"command": "to-hf", "options": {}}]
    elif change == "shards":
        plan = plan_checkpoint(sample(), 200)
    elif change == "a small file":
        plan = replace(plan, small_files={**plan.small_files, "config.json": b"{}"})
    else:
        plan = plan_checkpoint(sample(1), 100)
    with pytest.raises(InputRefused, match="is complete, but it was made from another") as caught:
        write_checkpoint(plan, tmp_path / "out", steps=steps, sources=[source], resume=True)
    assert "--overwrite" in caught.value.hint


@pytest.mark.parametrize("more", [{"decode.onnx": b"other"}, {"config.json": b"{}"}, {"decode.onnx": Link("there")}])
def test_a_complete_output_of_other_graphs_is_not_resumed(more: dict[str, Any], tmp_path: Path) -> None:
    graphs = {"decode.onnx": b"graph"}
    write(tmp_path / "out", more_files=graphs)
    write(tmp_path / "out", more_files=graphs, resume=True)
    with pytest.raises(InputRefused, match="made from another input or with other options"):
        write(tmp_path / "out", more_files=graphs | more, resume=True)


@pytest.mark.parametrize("damage", ["a lost file", "a cut file", "no manifest", "a strange manifest", "an open run"])
def test_an_incomplete_output_is_not_reported_as_complete(damage: str, tmp_path: Path) -> None:
    write(tmp_path / "out")
    shard, manifest = tmp_path / "out/model-00001-of-00003.safetensors", tmp_path / "out/llmconv.json"
    if damage == "a lost file":
        shard.unlink()
    elif damage == "a cut file":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "a strange manifest":
        manifest.write_text('{"files": {"config.json": 3}}')
    else:
        staged(tmp_path / "out").mkdir()
    with pytest.raises(InputRefused, match="already exists(?m:$)"):
        write(tmp_path / "out", resume=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["out", "deep/er/out", "link/out"])
def test_an_output_in_an_input_is_refused(place: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "in" / "link").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in" / "link")
    output = tmp_path / place if place.startswith("link") else tmp_path / "in" / place
    with pytest.raises(InputRefused, match="is inside the input `.*in`") as caught:
        LocalFolder(output).require_free(overwrite, [tmp_path / "other", tmp_path / "in"])
    assert "`-o`" in caught.value.hint


def test_an_output_next_to_an_input_file_is_free(tmp_path: Path) -> None:
    (tmp_path / "x.pt").touch()
    LocalFolder(tmp_path / "out").require_free(False, [tmp_path / "x.pt", tmp_path / "outer"])


def test_overwrite_leaves_nothing_of_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "out", sample(count=9))
    assert write(tmp_path / "out", overwrite=True) == write(tmp_path / "reference")
    assert sorted(os.listdir(tmp_path)) == ["out", "reference"]


def test_a_folder_that_appears_at_out_during_a_run_is_kept(tmp_path: Path) -> None:
    def appear(start: int, stop: int) -> Any:
        (tmp_path / "out").mkdir(exist_ok=True)
        return np.zeros(stop - start, np.float32)

    tensors = {**sample().tensors, "t1": LazyTensor(F32, (20,), appear)}
    with pytest.raises(OutputFailed, match="appeared while"):
        write(tmp_path / "out", Checkpoint(Path("sample"), "test", tensors, sample().config, {}))
    assert not list((tmp_path / "out").iterdir())


def test_overwrite_keeps_a_folder_with_a_file_that_llmconv_did_not_make(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out/notes.md").write_text("dear")
    with pytest.raises(InputRefused, match=r"notes\.md"):
        write(tmp_path / "out", overwrite=True)


def test_overwrite_keeps_a_folder_that_contains_an_input(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(InputRefused, match="contains an input") as caught:
        LocalFolder(tmp_path / "out").require_free(True, [tmp_path / "out/model-00001-of-00003.safetensors"])
    assert caught.value.hint == "choose another `-o`"


@pytest.mark.parametrize("kind", ["file", "link", "folder of something else"])
def test_overwrite_replaces_only_model_folders(kind: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    out = {"file": home / "letter.txt", "link": tmp_path / "link", "folder of something else": home}[kind]
    if kind == "link":
        out.symlink_to(write_and_path(tmp_path / "model"))
    with pytest.raises(InputRefused, match="not overwritten"):
        write(out, overwrite=True)
    assert (home / "letter.txt").read_text() == "dear"


def write_and_path(folder: Path) -> Path:
    write(folder)
    return folder


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"key": "k", "overwrite": False, "resume": False}
    with (
        pytest.raises(OutputFailed, match="another run"),
        StagedFolder(tmp_path / "out", **options),
        StagedFolder(tmp_path / "out", **options),
    ):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_size_limit_is_an_output_error_that_resume_completes(tmp_path: Path) -> None:
    large = sample()
    large = Checkpoint(
        large.path, "test", {**large.tensors, "t2": in_memory(np.ones(5000, np.float32), F32)}, large.config
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        with pytest.raises(OutputFailed, match="File too large"):
            write(tmp_path / "out", large)

    assert in_child(limited) == 0
    assert not (tmp_path / "out").exists()
    assert staged(tmp_path / "out").exists()
    assert write(tmp_path / "out", large, resume=True) == write(tmp_path / "reference", large)


def test_a_disk_that_fills_up_is_an_output_error_that_resume_completes(small_disk: Path, tmp_path: Path) -> None:
    other = small_disk / "other"

    def fill(start: int, stop: int) -> Any:
        with open(other, "wb") as file, pytest.raises(OSError, match="No space"):
            file.write(bytes(2 << 20))
        return np.ones(stop - start, np.float32)

    last = LazyTensor(F32, (5000,), fill)
    filling = Checkpoint(Path("sample"), "test", {**sample().tensors, "t2": last}, {})
    with pytest.raises(OutputFailed, match="No space left") as caught:
        write(small_disk / "out", filling)
    assert "--resume" in caught.value.hint
    assert os.listdir(small_disk) == [".out.llmconv-partial", "other"] or not (small_disk / "out").exists()
    other.unlink()
    whole = Checkpoint(
        Path("sample"), "test", {**sample().tensors, "t2": in_memory(np.ones(5000, np.float32), F32)}, {}
    )
    assert write(small_disk / "out", whole, resume=True) == write(tmp_path / "reference", whole)


def test_a_disk_too_small_from_the_start_is_refused(small_disk: Path) -> None:
    vast = Checkpoint(Path("sample"), "test", {"t": in_memory(np.ones(1 << 20, np.float32), F32)}, {})
    with pytest.raises(InputRefused, match=r"needs 4,194,304 bytes"):
        write(small_disk / "out", vast)
    assert not os.listdir(small_disk)


def test_a_partial_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    staged(tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputRefused, match="is a link or a file where a folder should be"):
        write(tmp_path / "out")
    assert not os.listdir(tmp_path / "elsewhere") and not (tmp_path / "out").exists()


def test_a_partial_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    staged(tmp_path / "out").mkdir(mode=0o777)
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    os.chown(staged(tmp_path / "out"), 12345, 12345)
    with pytest.raises(InputRefused, match="belongs to another user"):
        write(tmp_path / "out")
    assert not os.listdir(staged(tmp_path / "out")) and not (tmp_path / "out").exists()


def test_a_partial_folder_moved_while_it_is_written_is_not_published(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def swap(start: int, stop: int) -> Any:
        if not (tmp_path / "moved").exists():
            staged(tmp_path / "out").rename(tmp_path / "moved")
            staged(tmp_path / "out").symlink_to(elsewhere)
        return np.zeros(stop - start, np.float32)

    tensors = {**sample().tensors, "t1": LazyTensor(F32, (20,), swap)}
    with pytest.raises(OutputFailed, match="was moved or replaced while"):
        write(tmp_path / "out", Checkpoint(Path("sample"), "test", tensors, sample().config, {}))
    assert not os.listdir(elsewhere) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "journal.jsonl", "lock", "inner", "llmconv.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_planted_in_the_partial_folder_of_an_interrupted_run_leads_nothing_elsewhere(
    name: str, resume: bool, interrupted: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" / "victim"
    planted = staged(interrupted) / name
    victim.write_bytes(planted.read_bytes() if planted.is_file() else b"dear")
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim.parent if name == "inner" else victim)
    before = victim.read_bytes()
    assert write(interrupted, resume=resume) == write(tmp_path / "reference")
    assert victim.read_bytes() == before and os.listdir(victim.parent) == ["victim"]
    assert not any(path.is_symlink() for path in interrupted.rglob("*"))
