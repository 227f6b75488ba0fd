"""Deltas of FastChat, Stanford Alpaca and LLaMA2-Accessory: pickles that call, shapes and checksums that lie."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import CANARY, Case
from tests.hostile.deltas import LONG, NAME, ON, Change, model
from tests.hostile.files import instead_of
from tests.hostile.honest import CONFIG, members, repacked, save, weights
from tests.hostile.pickles import PYTHON, SHELL, call, text

ATTACK = "nothing was run"
State = Mapping[Any, Any]


def difference(refused: str | None, state: State | None = None, change: Change | None = None, **config: Any) -> Case:
    """A delta of FastChat in a torch file, with more tensors, after something was done to its folder."""

    def build(folder: Path) -> Path:
        model(folder / "base", weights())
        path = folder / "delta"
        path.mkdir()
        small = {name: (tensor * 0.001).half() for name, tensor in weights().items()}
        save(path, {**small, **(state or {})}, "pytorch_model.bin")
        (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
        if change:
            change(path)
        return path

    return Case(build, refused, ON, "delta")


def pickled(change: Callable[[bytes], bytes], refused: str | None) -> Case:
    """A delta of FastChat whose pickle was changed."""

    def rewrite(path: Path) -> None:
        parts = members({name: tensor.half() for name, tensor in weights().items()})
        repacked(path, {**parts, "x/data.pkl": change(parts["x/data.pkl"])}, "pytorch_model.bin")

    return difference(refused, change=rewrite)


def more(value: bytes, refused: str | None) -> Case:
    """One with one more value, made by these opcodes."""
    return pickled(lambda data: data[:-1] + text("evil") + value + b"s.", refused)


def stanford(refused: str | None, checksum: bytes = b"1", rows: int = 9, dtype: torch.dtype = torch.float32) -> Case:
    """A delta of Stanford, with this checksum next to it, and this number of tokens."""

    def build(folder: Path) -> Path:
        model(folder / "base", weights())
        small = {name: tensor * 0.001 for name, tensor in weights().items()}
        small |= {name: torch.zeros(rows, 4) for name in (NAME, "lm_head.weight")}
        path = model(folder / "delta", {name: tensor.to(dtype) for name, tensor in small.items()}, vocab_size=rows)
        (path / "checksum_psum.txt").write_bytes(checksum)
        return path

    return Case(build, refused, ON, "delta")


ACCESSORY = {
    "llma.norm.weight": torch.zeros(4),
    "llma.layers.0.attention.wq.weight": torch.full((4, 4), 0.001),
    "llma.output.weight": torch.zeros(8, 4),
}


def accessory(
    refused: str | None, state: State | None = None, change: Change | None = None, count: int = 1, **config: Any
) -> Case:
    """A delta of Accessory with more tensors, after something was done to its folder."""

    def build(folder: Path) -> Path:
        model(folder / "base", weights(), **{"max_position_embeddings": 32, "rms_norm_eps": 1e-6, **config})
        path = folder / "delta"
        path.mkdir()
        for number in range(count):
            name = f"consolidated.{number:02}-of-{count:02}.model-diff.pth"
            save(path, {"model": {**ACCESSORY, **(state or {})}}, name)
        if change:
            change(path)
        return path

    return Case(build, refused, ON, "delta")


SHARD = "consolidated.00-of-01.model-diff.pth"


def accessory_pickled(value: bytes, refused: str) -> Case:
    """One with one more value among its tensors, made by these opcodes."""

    def rewrite(path: Path) -> None:
        parts = members({"model": ACCESSORY})
        data = parts["x/data.pkl"]
        repacked(path, {**parts, "x/data.pkl": data[:-1] + text("evil") + value + b"s."}, SHARD)

    return accessory(refused, change=rewrite)


HONEST = {
    "fastchat": difference(None),
    "stanford": stanford(None),
    "accessory": accessory(None),
}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "fastchat: os.system": more(call("os", "system", text(SHELL)), ATTACK),
    "fastchat: eval": more(call("builtins", "eval", text(PYTHON)), ATTACK),
    "fastchat: another call": more(call("evil", "Evil", text(CANARY)), "is an object, not a plain tensor"),
    "fastchat: a nested pickle": more(call("pickle", "loads", b"C\x04cos\n"), "is an object, not a plain tensor"),
    "fastchat: a list": pickled(lambda _: pickle.dumps([1], 2), "no state dict"),
    "fastchat: cut": difference(
        "truncated|not a torch file", change=lambda path: os.truncate(path / "pytorch_model.bin", 300)
    ),
    "fastchat: a pipe": difference(
        "not a delta|not a torch|no regular file|cannot",
        change=instead_of("pytorch_model.bin", lambda path: os.mkfifo(path)),
    ),
    "fastchat: another shape": difference("shape mismatch", {NAME: torch.ones(8, 5).half()}),
    "fastchat: fewer tokens": difference("shape mismatch", {NAME: torch.ones(7, 4).half()}),
    "fastchat: a scalar": difference("shape mismatch", {NAME: torch.tensor(1.0).half()}),
    "fastchat: one more tensor": difference("missing keys in the base", {"../../evil": torch.ones(1)}),
    "fastchat: a name with an escape sequence": difference("missing keys in the base", {"\x1b[2J\n": torch.ones(1)}),
    "fastchat: whole numbers": difference("unsupported dtype int64", {NAME: torch.ones(8, 4).long()}),
    "fastchat: not a number": difference(None, {NAME: torch.full((8, 4), float("nan")).half()}),
    "fastchat: infinite": difference(None, {NAME: torch.full((8, 4), float("inf")).half()}),
    "fastchat: a view of 2^40": difference("larger than its storage", {NAME: torch.ones(1).half().expand(8, 1 << 40)}),
    "fastchat: code": difference(None, auto_map={"AutoModel": "evil.Evil"}),
    "fastchat: quantized": difference("quantized", quantization_config={"bits": 4}),
    "fastchat: config of another kind": difference(None, text_config="evil", tie_word_embeddings=LONG),
    "stanford: a checksum of 8 GB": stanford(None, b"9" * 1_000_000),
    "stanford: a checksum of 400 digits": stanford(None, b"9" * 90),
    "stanford: a checksum that is not a number": stanford(None, b"\xff\x00evil"),
    "stanford: a checksum with an escape sequence": stanford(None, b"\x1b[2J\n"),
    "stanford: whole numbers": stanford("unsupported dtype int32", dtype=torch.int32),
    "stanford: 100,000 tokens more": stanford(None, rows=100_000),
    "accessory: os.system": accessory_pickled(call("os", "system", text(SHELL)), ATTACK),
    "accessory: eval": accessory_pickled(call("builtins", "eval", text(PYTHON)), ATTACK),
    "accessory: cut": accessory("truncated|not a torch file", change=lambda path: os.truncate(path / SHARD, 300)),
    "accessory: a pipe": accessory(
        "not a torch|not a regular|cannot|missing", change=instead_of(SHARD, lambda path: os.mkfifo(path))
    ),
    "accessory: a folder": accessory("not a torch|not a regular|cannot|missing", change=instead_of(SHARD, Path.mkdir)),
    "accessory: a link to itself": accessory(
        "not a torch|not a regular|cannot|missing|does not exist",
        change=instead_of(SHARD, lambda path: path.symlink_to(path.name)),
    ),
    "accessory: no model": accessory("model|state", change=lambda path: save(path, {"evil": 1}, SHARD)),
    "accessory: 99 shards, one there": accessory(
        "mixes shards", change=lambda path: save(path, {"model": {}}, "consolidated.00-of-99.model-diff.pth")
    ),
    "accessory: another shape": accessory("shape mismatch", {"llma.norm.weight": torch.ones(7)}),
    "accessory: a scalar": accessory("shape mismatch|no rule|axes", {"llma.norm.weight": torch.tensor(1.0)}),
    "accessory: an unknown part": accessory("no rule places", {"llma.evil.weight": torch.ones(2)}),
    "accessory: a name with an escape sequence": accessory("no rule|names", {"\x1b[2J\n": torch.ones(2)}),
    "accessory: a name that is a number": accessory("no rule|names|text|state dict", {7: torch.ones(2)}),
    "accessory: whole numbers": accessory("unsupported dtype int64", {"llma.norm.weight": torch.ones(4).long()}),
    "accessory: not a number": accessory(None, {"llma.norm.weight": torch.full((4,), float("nan"))}),
    "accessory: layer 2^60": accessory("no rule", {f"llma.layers.{1 << 60}.attention.wq.weight": torch.ones(4, 4)}),
    "accessory: a base of another family": accessory("../../evil|no family|known|model_type", model_type="../../evil"),
}
