"""A merge that is killed: `--resume` makes the bytes of a run that was not, for every kind of adapter."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.lora_matrix import train

CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "dora": ("llama, tied", "dora", ()),
    "experts": ("mixtral", "experts", ()),
    "loha": ("qwen2", "loha", ()),
    "a resized vocabulary": ("gpt2", "resized, saved both", ()),
    "drawn": ("llama", "all", ("--combine=dare_ties", "--density=0.5")),
}


def command(base: Path, adapter: Path, out: Path, *options: str) -> list[str]:
    """A merge into many files."""
    own = ["-o", str(out), "--max-shard-size=9KB", "-q", *options]
    return [sys.executable, "-m", "llmconv", "merge-lora", str(base), str(adapter), *own]


def killed(run: list[str], after: float) -> bool:
    """Whether the run was killed so many seconds after it began, rather than that it ended before."""
    with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        time.sleep(after)
        process.kill()
        return process.wait() != 0


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which tells the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "llmconv.json"}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_killed_merge_goes_on_where_it_was(case: str, tmp_path: Path) -> None:
    family, kind, options = CASES[case]
    trained = train(family, kind, tmp_path, torch.float32)
    whole = command(trained.base, trained.adapter, tmp_path / "whole", *options)
    began = time.monotonic()
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
    took, expected = time.monotonic() - began, content(tmp_path / "whole")
    assert len(expected) > 5
    draw, kills = random.Random(case), 0
    for attempt in range(6):
        out = tmp_path / f"out{attempt}"
        run = command(trained.base, trained.adapter, out, *options)
        kills += killed(run, took * draw.uniform(0.5, 1.0))
        assert not out.exists() or content(out) == expected
        if not out.exists():
            subprocess.run([*run, "--resume"], check=True, stdout=subprocess.DEVNULL)
        assert content(out) == expected
        assert not list(tmp_path.glob(".*partial"))
    assert kills


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--weight=0.5",), ("--dtype=bfloat16",), ("--combine=ties", "--density=0.5")])
def test_a_merge_with_other_options_starts_anew(options: tuple[str, ...], tmp_path: Path) -> None:
    trained = train("llama", "dora", tmp_path, torch.float32)
    other = command(trained.base, trained.adapter, tmp_path / "other", *options)
    subprocess.run(other, check=True, stdout=subprocess.DEVNULL)
    out = tmp_path / "out"
    interrupt(command(trained.base, trained.adapter, out), out)
    run = command(trained.base, trained.adapter, out, *options, "--resume")
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    assert content(out) == content(tmp_path / "other")


def interrupt(run: list[str], out: Path) -> None:
    """Kills the run once a shard is finished."""
    partial: Any = out.parent / f".{out.name}.llmconv-partial"
    for _ in range(20):
        with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not list(partial.glob("model-*.safetensors")):
                time.sleep(0.001)
            process.kill()
        if not out.exists() and list(partial.glob("model-*.safetensors")):
            return
    pytest.fail("every run ended before it could be killed, so nothing was shown")
