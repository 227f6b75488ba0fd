"""Deltas, the way they are written: dry runs, overwriting, a kill, a full disk, and what the commands say."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import apply_delta, extract_delta
from llmconv.errors import InputRefused, OutputFailed
from tests.builders.delta_models import frames, same, save, save_pair, weights


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
import os, shutil, signal, sys
from pathlib import Path
from llmconv.output import local_folder
from llmconv.convert import apply_delta, extract_delta
from llmconv.progress import set_quiet

way, base, other, out = {"apply": apply_delta, "extract": extract_delta}[sys.argv[1]], *map(Path, sys.argv[2:5])
call = lambda **options: way(base, other, out, max_shard_size=100, **options)
contents = lambda: {path.name: path.read_bytes() for path in out.iterdir() if path.name != "llmconv.json"}
set_quiet(True)

def die_at(step):
    count = 0
    def counted(function):
        def run(*args, **options):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)
        return run
    for name in ("fsync", "replace", "write"):
        setattr(os, name, counted(getattr(os, name)))
    local_folder.rename_at = counted(local_folder.rename_at)
    call()
    os._exit(0)

call()
whole = contents()
for step in range(1, 1000):
    shutil.rmtree(out)
    child = os.fork()
    if not child:
        die_at(step)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert not out.exists() or contents() == whole
    out.exists() or call(resume=True)
    assert contents() == whole and not list(out.parent.glob(".*"))
print(step)
"""
"""Dies before every write, fsync and rename in turn; OUT is whole then or not there, and a resumed run makes it."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["extract", "apply"])
def test_killed_at_any_step_it_leaves_nothing_and_resume_completes_it(
    way: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    extract_delta(*pair, tmp_path / "delta", max_shard_size=100)
    other = pair[1] if way == "extract" else tmp_path / "delta"
    command = [sys.executable, "-c", KILLED, way, pair[0], other, tmp_path / "out"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
    made = tmp_path / "out"
    if way == "extract":
        made = tmp_path / "back"
        apply_delta(pair[0], tmp_path / "out", made)
    assert same(made, pair[1])


def test_what_was_finished_before_a_kill_is_not_made_again(pair: tuple[Path, Path], tmp_path: Path) -> None:
    extract_delta(*pair, tmp_path / "delta")
    options: Any = {"max_shard_size": 100}
    calls: list[int] = []

    def failing(fd: int) -> None:
        calls.append(fd)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OutputFailed, match="No space left") as caught:
        patch.setattr(os, "fsync", failing)
        apply_delta(pair[0], tmp_path / "delta", tmp_path / "out", **options)
    assert "--resume" in caught.value.hint
    first = next((tmp_path / ".out.llmconv-partial").glob("*-00001-of-*"))
    before = first.stat().st_mtime_ns
    apply_delta(pair[0], tmp_path / "delta", tmp_path / "out", resume=True, **options)
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == before
    assert same(tmp_path / "out", pair[1])


def test_a_base_that_is_another_one_in_its_last_shard_leaves_nothing(tmp_path: Path) -> None:
    base, tuned = save_pair(tmp_path)
    extract_delta(base, tuned, tmp_path / "delta")
    arrays = weights()
    arrays["lm_head.weight"][1][5, 3] += 1
    other = save(tmp_path / "other", arrays)
    with pytest.raises(InputRefused, match=r"`lm_head.weight` has other values"):
        apply_delta(other, tmp_path / "delta", tmp_path / "out", max_shard_size=100)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "tuned", "other", "delta"}


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_output_that_is_an_input_is_never_replaced(dry_run: bool, pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    extract_delta(base, tuned, tmp_path / "delta")
    runs: list[tuple[Any, Path, Path]] = [(apply_delta, base, tmp_path / "delta"), (extract_delta, base, tuned)]
    for function, one, other in runs:
        for output in (one, other):
            with pytest.raises(InputRefused, match="contains an input, so it is not overwritten"):
                function(one, other, output, overwrite=True, dry_run=dry_run)
    assert same(base, save(tmp_path / "again", weights()))


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
