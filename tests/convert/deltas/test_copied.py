"""delta apply copies the files that an exact delta leaves alone, and still notices another base in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, extract_delta
from llmconv.errors import InputRefused, OutputFailed
from llmconv.files.copying import copy_file
from llmconv.output import local_folder
from llmconv.output.plan import plan_checkpoint
from llmconv.output.writer import write_checkpoint
from llmconv.tensors import BY_NAME
from tests.builders.delta_models import Arrays, same, save, weights

CHANGED = "model.norm.weight"


def save_shards(folder: Path, arrays: Arrays) -> Path:
    """A model of one file for each tensor."""
    checkpoint = open_checkpoint(save(folder.with_name(f"{folder.name}-whole"), arrays))
    write_checkpoint(plan_checkpoint(checkpoint, 100), folder, steps=[], sources=[])
    return folder


def changed_by_one(*names: str) -> Arrays:
    arrays = weights()
    for name in names:
        arrays[name][1][-1] += 1
    return arrays


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base of three files, beside the delta of a tuned model that differs in the middle one."""
    tuned = save_shards(tmp_path / "tuned", changed_by_one(CHANGED))
    base = save_shards(tmp_path / "base", weights())
    extract_delta(base, tuned, tmp_path / "delta")
    return base


def test_files_that_it_leaves_alone_are_copied_and_the_model_is_the_tuned_one(base: Path, tmp_path: Path) -> None:
    applied = apply_delta(base, tmp_path / "delta", tmp_path / "back")
    written = [name for shard in applied.plan.shards if not shard.copy_of for name in shard.tensors]
    assert written == [CHANGED] and len(applied.plan.shards) == 3
    assert same(tmp_path / "back", tmp_path / "tuned")


@pytest.mark.parametrize("size", ["keep", "5GB"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_another_base_in_what_it_leaves_alone_is_refused_and_leaves_nothing(
    name: str, size: str, base: Path, tmp_path: Path
) -> None:
    other = save_shards(tmp_path / "other", changed_by_one(name))
    before = set(tmp_path.iterdir())
    with pytest.raises(
        InputRefused, match=rf"^the base is not the one that `delta` was .*`{name}` has other values(?m:$)"
    ):
        apply_delta(other, tmp_path / "delta", tmp_path / "back", max_shard_size=size)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("cloned", [False, True])
def test_it_is_the_copy_that_is_checked(
    cloned: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(source: Path, made: BinaryIO, advance: Any) -> Any:
        entry = copy_file(source, made, advance)
        made.seek(-1, os.SEEK_END)
        made.write(b"\xff")
        return {"bytes": entry["bytes"], "clone_of": source.name} if cloned else entry

    monkeypatch.setattr(local_folder, "copy_file", spoiled)
    with pytest.raises(InputRefused, match="has other values"):
        apply_delta(base, tmp_path / "delta", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_copy_that_was_interrupted_is_resumed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def failing(fd: int) -> None:
        calls.append(fd)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OutputFailed):
        patch.setattr(os, "fsync", failing)
        apply_delta(base, tmp_path / "delta", tmp_path / "back")
    assert list((tmp_path / ".back.llmconv-partial").glob("*-00001-of-*"))
    apply_delta(base, tmp_path / "delta", tmp_path / "back", resume=True)
    assert same(tmp_path / "back", tmp_path / "tuned")


def test_a_tensor_without_elements_is_no_obstacle(tmp_path: Path) -> None:
    empty = {"empty": ("float32", np.zeros((0, 4), BY_NAME["float32"].numpy))}
    base = save(tmp_path / "base", weights() | empty)
    extract_delta(base, base, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", base)
