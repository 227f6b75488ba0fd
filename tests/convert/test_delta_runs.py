"""Deltas, the way they are written: dry runs, overwriting, a kill, a full disk, and what the commands say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta
from llmconv.errors import InputRefused
from tests.convert.delta_models import frames, same, save_pair


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and what was tuned from it."""
    return save_pair(tmp_path)


def test_a_dry_run_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert extract_delta(*pair, tmp_path / "delta", dry_run=True).nbytes is None
    extract_delta(*pair, tmp_path / "delta")
    applied = apply_delta(pair[0], tmp_path / "delta", tmp_path / "back", dry_run=True)
    assert applied.kind == "exact" and not (tmp_path / "back").exists()


def test_an_output_is_replaced_on_demand_only(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    with pytest.raises(InputRefused, match="already exists"):
        extract_delta(*pair, tmp_path / "delta")
    extract_delta(pair[1], pair[0], tmp_path / "delta", overwrite=True)
    apply_delta(pair[1], tmp_path / "delta", tmp_path / "back")
    assert same(tmp_path / "back", pair[0])


def test_the_manifest_tells_the_steps_and_the_same_bytes_come_out_twice(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for number in ("1", "2"):
        extract_delta(*pair, tmp_path / number)
    assert frames(tmp_path / "1").read_bytes() == frames(tmp_path / "2").read_bytes()
    (done,) = json.loads((tmp_path / "1/llmconv.json").read_text())["steps"]
    assert (done["command"], done["source"], done["options"]) == ("delta-extract", "base", {"tuned": "tuned"})


KILLED = """
import os, signal, sys
from llmconv.convert import apply_delta, extract_delta
calls, sync = [], os.fsync
def counted(fd):
    sync(fd)
    calls.append(fd)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = counted
{"apply": apply_delta, "extract": extract_delta}[sys.argv[1]](*sys.argv[2:], max_shard_size=100)
"""
"""Dies when the second or third file is being finished."""


@pytest.mark.parametrize("way", ["extract", "apply"])
def test_a_killed_run_goes_on_where_it_was(way: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta", max_shard_size=100)
    sides = [str(side) for side in (pair if way == "extract" else (pair[0], tmp_path / "delta"))]
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, way, *sides, out], check=False)
    first = next((tmp_path / ".out.llmconv-partial").glob("*-00001-of-*"))
    before = first.stat().st_mtime_ns
    assert done.returncode == -signal.SIGKILL and not out.exists()
    function: Any = extract_delta if way == "extract" else apply_delta
    function(*sides, out, max_shard_size=100, resume=True)
    assert (out / first.name).stat().st_mtime_ns == before
    if way == "extract":
        apply_delta(pair[0], out, tmp_path / "back")
    assert same(tmp_path / "back" if way == "extract" else out, pair[1])


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["delta", *map(str, arguments)])


def test_the_commands_say_what_they_did(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = run("extract", *pair, "-o", tmp_path / "delta")
    assert made.exit_code == 0 and "as exact delta" in made.stdout
    size = (tmp_path / "delta/delta.zst").stat().st_size
    told = json.loads(run("extract", *pair, "-o", tmp_path / "again", "--json").stdout)
    assert (told["kind"], told["delta_bytes"], told["tensors"]) == ("exact", size, 3)
    shown = run("apply", pair[0], tmp_path / "delta", "-o", tmp_path / "back", "--dry-run")
    assert "would write" in shown.stdout and "model.norm.weight" in shown.stdout
    back = json.loads(run("apply", pair[0], tmp_path / "delta", "-o", tmp_path / "back", "--json").stdout)
    assert (back["kind"], back["written"], back["files"]) == ("exact", True, ["model.safetensors"])


def test_a_wrong_base_is_a_refusal_with_a_hint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run("extract", *pair, "-o", tmp_path / "delta")
    done = run("apply", pair[1], tmp_path / "delta", "-o", tmp_path / "back")
    assert done.exit_code == 3
    assert done.stderr.startswith("error: the base is not the one") and "\n\nhint: " in done.stderr
