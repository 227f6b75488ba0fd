"""Runs of verl's kind: pickles of ranks that call, meshes and placements that lie, shards that do not fit."""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.builders.rank_saves import FIXTURES
from tests.hostile.case import Case
from tests.hostile.honest import repacked
from tests.hostile.pickles import PYTHON, SHELL, call, text

MESH, GROUP, GRID = "fsdp2_uneven", "fsdp1_group", "tensor_parallel"
ATTACK = "nothing was run"
Edit = Callable[[bytes], bytes]


def rank_file(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return next(folder.glob(f"model_world_size_*_rank_{rank}.pt"))


def members_of(file: Path) -> dict[str, bytes]:
    """The members of a torch file, below the folder `x`."""
    with zipfile.ZipFile(file) as archive:
        return {"x/" + name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def with_pickles(folder: Path, edit: Edit, ranks: range = range(9)) -> Path:
    """A run after the pickles of some of its ranks were edited."""
    for rank in ranks:
        for file in folder.glob(f"model_world_size_*_rank_{rank}.pt"):
            parts = members_of(file)
            changed = edit(parts["x/data.pkl"])
            assert changed != parts["x/data.pkl"], "nothing was edited"
            repacked(folder, parts | {"x/data.pkl": changed}, file.name)
    return folder


def edited(run: str, edit: Edit, refused: str | None, ranks: range = range(9)) -> Case:
    """A genuine run with edited pickles."""
    return Case(lambda folder: with_pickles(honest(folder, run), edit, ranks), refused)


def honest(folder: Path, run: str = MESH) -> Path:
    """A genuine run."""
    shutil.copytree(FIXTURES / run, folder / "actor")
    return folder / "actor"


def number(value: int) -> bytes:
    """Pushes an integer."""
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def field(name: str, value: bytes, *, old: bytes) -> Edit:
    """Another value for the first attribute `name`, which is `old`."""

    def edit(data: bytes) -> bytes:
        start = data.index(text(name))
        at = data.index(old, start + len(text(name)))
        return data[:at] + value + data[at + len(old) :]

    return edit


def first(old: bytes, new: bytes) -> Edit:
    """The first `old` replaced."""
    return lambda data: data.replace(old, new, 1)


def added(value: bytes, refused: str | None) -> Case:
    """A state dict with one more entry, made by these opcodes."""
    return edited(MESH, lambda data: data[:-1] + text("evil") + value + b"s.", refused)


def files(change: Callable[[Path], object], refused: str | None) -> Case:
    """A run, after something was done to its folder."""

    def build(folder: Path) -> Path:
        change(honest(folder))
        return folder / "actor"

    return Case(build, refused)


def _pipe(folder: Path) -> None:
    rank_file(folder, 1).unlink()
    os.mkfifo(folder / "model_world_size_3_rank_1.pt")


def _emptied(folder: Path) -> None:
    rank_file(folder, 1).write_bytes(b"")


def _many(folder: Path) -> None:
    rank_file(folder, 0).rename(folder / "model_world_size_9999999_rank_0.pt")
    for rank in (1, 2):
        rank_file(folder, rank).unlink()


def _text_for_numbers(folder: Path) -> None:
    (folder / "fsdp_config.json").write_text('{"world_size": "three", "FSDP_version": "2"}')


def _huge_config(folder: Path) -> None:
    (folder / "fsdp_config.json").write_text("[" * 5_000 + "]" * 5_000)


NOT_A_STATE = "contains no state dict|keys that are not names|truncated|inconsistent"
MADE = b"\x80\x02"
HONEST: dict[str, Case] = {run: Case(lambda folder, run=run: honest(folder, run), None) for run in (MESH, GROUP, GRID)}  # type: ignore[misc]
CASES: dict[str, Case] = {
    "a call beside the weights": added(call("os", "system", text(SHELL)), ATTACK),
    "python beside the weights": added(call("builtins", "exec", text(PYTHON)), ATTACK),
    "an attribute that calls": edited(
        MESH, field("_hash", call("posix", "system", text(SHELL)), old=b"\x8a"), f"{ATTACK}|truncated|inconsistent"
    ),
    "a getter instead of a group": edited(
        GROUP, lambda data: data.replace(b"c__builtin__\ngetattr", b"c__builtin__\neval"), ATTACK
    ),
    "a list for a state dict": edited(MESH, lambda _: MADE + b"].", NOT_A_STATE),
    "numbers for names": edited(MESH, lambda _: MADE + b"}K\x01K\x02s.", NOT_A_STATE),
    "a state dict of other names": edited(
        MESH, first(text("lm_head.weight"), text("lm_head.weighs")), "not both of", range(1, 2)
    ),
    "placement: a dim of no tensor": edited(
        MESH, field("dim", number(7), old=b"K\x00"), "sharded along a dim that it does not have"
    ),
    "placement: a negative dim": edited(
        MESH, field("dim", number(-1), old=b"K\x00"), "sharded along a dim that it does not have"
    ),
    "placement: a text for a dim": edited(
        MESH, field("dim", text("0"), old=b"K\x00"), "sharded along a dim that it does not have"
    ),
    "placement: another dim": edited(MESH, field("dim", b"K\x01", old=b"K\x00"), "contradict each other"),
    "placement: a factor that nothing has": edited(
        GRID, field("split_factor", number(10**15), old=b"K\x02"), "`_StridedShard` with the factor"
    ),
    "placement: a factor of zero": edited(
        GRID, field("split_factor", b"K\x00", old=b"K\x02"), "`_StridedShard` with the factor"
    ),
    "placement: a class of its own": edited(
        MESH, lambda data: data.replace(b"placement_types\nShard\n", b"placement_types\nSpill\n"), "placement `Spill`"
    ),
    "placement: a sum": edited(
        MESH, lambda data: data.replace(b"placement_types\nShard\n", b"placement_types\nPartial\n"), "not finished"
    ),
    "mesh: a size of 10^9": edited(
        MESH, field("shape", number(10**9) + b"\x85", old=b"K\x03\x85"), "a mesh of more than 3 ranks"
    ),
    "mesh: a size beyond 64 bits": edited(
        MESH, field("shape", number(1 << 90) + b"\x85", old=b"K\x03\x85"), "a mesh of more than 3 ranks"
    ),
    "mesh: a negative size": edited(
        MESH, field("shape", number(-3) + b"\x85", old=b"K\x03\x85"), "an impossible layout"
    ),
    "mesh: a stride of zero": edited(MESH, field("stride", b"K\x00\x85", old=b"K\x01\x85"), "an impossible layout"),
    "mesh: a text for a size": edited(MESH, field("shape", text("3") + b"\x85", old=b"K\x03\x85"), "impossible layout"),
    "mesh: two ranks": edited(
        MESH, field("shape", b"K\x02\x85", old=b"K\x03\x85"), "was not saved by rank|not its own"
    ),
    "mesh: numbers beyond their storage": edited(
        MESH, field("_rank_map", b"K\x7f", old=b"K\x00"), "larger than its storage"
    ),
    "shard: a shape that overflows": edited(
        GROUP, lambda data: data.replace(b"K\x0dK\x08", number(1 << 61) + number(1 << 61)), "without its shards|piece"
    ),
    "shard: a negative offset": edited(GROUP, field("shard_offsets", number(-1), old=b"K\x00"), "without a place"),
    "shard: a text for an offset": edited(GROUP, field("shard_offsets", text("0"), old=b"K\x00"), "without a place"),
    "shard: an offset beyond the tensor": edited(
        GROUP, field("shard_offsets", number(1 << 61), old=b"K\x00"), "not its own"
    ),
    "shard: an offset into another": edited(
        GROUP, field("shard_offsets", b"K\x01", old=b"K\x00"), "overlap, leave a gap", range(1)
    ),
    "shard: of another rank": edited(
        GROUP, field("global_rank", b"K\x01", old=b"K\x00"), "was not saved by rank 0 of 2", range(1)
    ),
    "shard: of a larger world": edited(
        GROUP, field("global_world_size", number(10**12), old=b"K\x02"), "was not saved by rank"
    ),
    "a file that is a pipe": files(_pipe, "lacks the part of rank 1"),
    "an empty file": files(_emptied, "rank_1.pt` is not a torch file"),
    "ten million ranks": files(_many, "lacks the part of rank 1"),
    "settings: a text for the number of ranks": files(_text_for_numbers, "is of three ranks"),
    "settings: nested 5,000 deep": files(_huge_config, "not valid JSON|nested"),
    "a truncated storage": Case(
        lambda folder: _short_storage(honest(folder)), "declares|larger than its storage|has no data"
    ),
}


def _short_storage(folder: Path) -> Path:
    file = rank_file(folder, 1)
    parts = members_of(file)
    largest = max((name for name in parts if name.startswith("x/data/")), key=lambda name: len(parts[name]))
    repacked(folder, parts | {largest: struct.pack("<f", 0.0)}, file.name)
    return folder
