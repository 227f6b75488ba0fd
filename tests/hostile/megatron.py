"""Megatron's runs: arguments that are code or bombs, ranks that lead out of the folder, numbers without end."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.builders.megatron_saves import Shape, hugging_face_state, save_megatron, with_engine
from tests.hostile.case import Case

SHAPE = Shape(layers=2, tensor=2, experts=2, expert=2)
OPTIONS = {"config": ["fields.json"]}
FILE = "iter_0000007/mp_rank_{}/model_optim_rng.pt"
FIRST = FILE.format("00_000")


class Attack:
    """Runs a command when it is unpickled by anything else than llmconv."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/attacked",)


def run(folder: Path, **changes: Any) -> Path:
    """An honest run of two tensor ranks and two expert ranks."""
    (folder / "fields.json").write_text(json.dumps({"vocab_size": SHAPE.words}))
    return save_megatron(folder / "run", SHAPE, hugging_face_state(SHAPE), with_engine, **changes)


def changed(change: Callable[[Path], object], refused: str | None) -> Case:
    """A run, after something was done to its folder."""

    def build(folder: Path) -> Path:
        path = run(folder)
        change(path)
        return path

    return Case(build, refused, OPTIONS)


def argued(refused: str, **changes: Any) -> Case:
    """A run with other arguments, on all ranks."""
    return Case(lambda folder: run(folder, **changes), refused, OPTIONS)


def content(refused: str, **more: Any) -> Case:
    """A run whose first rank has other values."""

    def change(path: Path) -> None:
        file = path / FIRST
        torch.save({**torch.load(file, weights_only=False), **more}, file)

    return changed(change, refused)


def linked(path: Path) -> None:
    """A rank's folder that leads to that of another."""
    place = path / "iter_0000007"
    (place / "mp_rank_01_000").rename(path.parent / "elsewhere")
    (place / "mp_rank_01_000").symlink_to(path.parent / "elsewhere")


def many_ranks(path: Path) -> None:
    """A thousand more ranks, all the same file."""
    for number in range(100, 1100):
        home = path / "iter_0000007" / f"mp_rank_{number}_000"
        home.mkdir()
        (home / "model_optim_rng.pt").symlink_to(path / FIRST)


def deep(levels: int) -> dict[str, Any]:
    """A state dict with many levels."""
    inner: dict[str, Any] = {"weight": torch.ones(1)}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


COUNT = "positive number|many|expected|rank|layers|does not match"
HONEST = {"megatron": Case(run, None, OPTIONS)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "arguments that are a call": content("nothing was run", args=Attack()),
    "a version that is a call": content("nothing was run", checkpoint_version=Attack()),
    "arguments without end": argued("positive integer", num_layers=1 << 60),
    "as many layers as a number holds": argued(COUNT, num_layers=(1 << 31) - 1),
    "as many experts as a number holds": argued(COUNT, num_experts=(1 << 31) - 1),
    "heads of a billion rows": argued(COUNT, kv_channels=1 << 30, rotary_interleaved=True, qk_layernorm=True),
    "a billion tensor ranks": argued(COUNT, tensor_model_parallel_size=1 << 30),
    "a billion expert ranks": argued(COUNT, expert_model_parallel_size=1 << 30, num_experts=1 << 30),
    "a frequency of experts for a billion layers": argued(COUNT, num_layers=1 << 30, moe_layer_freq=2),
    "a version of infinity": content("unknown `checkpoint_version`", checkpoint_version=float("inf")),
    "a tracker that leads out": changed(
        lambda path: (path / "latest_checkpointed_iteration.txt").write_text("../../etc"), "not a save in it"
    ),
    "a million characters in the tracker": changed(
        lambda path: (path / "latest_checkpointed_iteration.txt").write_text("7" * (1 << 20)), "not a save in it"
    ),
    "a link in place of a rank": changed(linked, None),
    "a thousand ranks": changed(many_ranks, "rank|parts"),
    "a state dict of a hundred levels": content("parts|unexpected keys|rank", model=deep(100)),
    "a stage that is not numbered": content("not all of its virtual stages", model5={"a.b": torch.ones(1)}),
    "arguments of another class": content("different saves|arguments|config", args=Namespace(num_layers=object)),
}
