"""Credentials are in no message, object, command line or task: all of them are searched for a canary."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmconv.convert import to_hf
from llmconv.output.work import Workers
from tests.builders.delta_models import save_pair
from tests.stores.bucket import Bucket
from tests.stores.server import KEY, SECRET

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"


def start(*command: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, "-m", "llmconv", *command], text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def objects(bucket: Bucket) -> str:
    """All that is in the bucket of a test, as text."""
    found = (path.read_bytes() for path in (bucket.folder / bucket.prefix).rglob("*") if path.is_file())
    return "".join(content.decode(errors="replace") for content in found)


def require_no_secret(text: str) -> None:
    assert text, "there is something to look at"
    assert SECRET not in text and KEY not in text


def to_hf_command(folder: Path) -> list[str]:
    return ["to-hf", str(EXAMPLE / "ep4-ba2400-rank0.pt"), "--max-shard-size", "50KB"]


def merge_command(folder: Path) -> list[str]:
    return ["merge-lora", str(_base(folder)), str(EXAMPLE / "adapter"), "--max-shard-size", "50KB"]


def from_hf_command(folder: Path) -> list[str]:
    return ["from-hf", str(_base(folder)), "--to", "meta"]


def delta_command(folder: Path) -> list[str]:
    return ["delta", "extract", *map(str, save_pair(folder))]


def export_command(folder: Path) -> list[str]:
    return ["export", str(_base(folder))]


def _base(folder: Path) -> Path:
    to_hf(EXAMPLE / "ep4-ba2400-rank0.pt", folder / "base")
    return folder / "base"


WORKERS = ("--workers", "2")


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (to_hf_command, ()),
        (to_hf_command, WORKERS),
        (to_hf_command, ("--part", "0/2")),
        (merge_command, ()),
        (merge_command, WORKERS),
        (from_hf_command, ()),
        (delta_command, ()),
        (export_command, ()),
    ],
)
def test_no_credential_is_shown_or_kept_by_a_run_that_is_refused_or_succeeds(
    command: Callable[[Path], list[str]], options: tuple[str, ...], bucket: Bucket, tmp_path: Path
) -> None:
    line = [*command(tmp_path), "-o", f"{bucket}/out", "-v", *options]
    bucket.set_faults(revoked=9)
    with start(*line) as process:
        denied, _ = process.communicate()
    assert process.returncode == 4 and "Traceback" in denied, denied
    bucket.set_faults(busy=0.1)
    resumes = (
        "--resume"
        in subprocess.run(
            [sys.executable, "-m", "llmconv", *line[:2], "-h"], capture_output=True, text=True, check=False
        ).stdout
    )
    with start(*line, *(["--resume"] if resumes else [])) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    require_no_secret(denied + said)
    require_no_secret(objects(bucket))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), pytest.param(WORKERS, marks=pytest.mark.slow)], ids=["alone", "workers"])
def test_no_credential_is_in_the_journal_or_a_command_line(
    options: tuple[str, ...], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.set_faults(hold=16 if options else 9)
    with start(*to_hf_command(tmp_path), "-o", f"{bucket}/out", *options) as process:
        assert bucket.wait_until_held(process)
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        lines = [Path(f"/proc/{number}/cmdline").read_text() for number in (process.pid, *found.stdout.split())]
        process.kill()
    assert len(lines) == (3 if options else 1)
    require_no_secret("".join(lines))
    assert ".llmconv/claim.json" in bucket.files() and any("done/" in name for name in bucket.files())
    require_no_secret(objects(bucket))


@pytest.mark.slow
def test_no_credential_is_in_the_tasks_of_workers(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ntee -a {tmp_path}/tasks | {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    to_hf(EXAMPLE / "ep4-ba2400-rank0.pt", f"{bucket}/out", work=Workers(1))
    tasks = (tmp_path / "tasks").read_text()
    assert '"shard": "model' in tasks
    require_no_secret(tasks)
