"""Files of before torch 1.6: each of the five pickles changed, storages and views that lie."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile.case import Case
from tests.hostile.honest import CONFIG, weights
from tests.hostile.pickles import SHELL, call, text
from tests.hostile.states import ATTACK, EMBEDDING, UNKNOWN

SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def legacy(change: Callable[[list[bytes], bytes], bytes], refused: str | None, content: Any = None) -> Case:
    """A file of before torch 1.6 after `change(pickles, storages)`."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        stream = io.BytesIO()
        torch.save(weights() if content is None else content(), stream, _use_new_zipfile_serialization=False)
        data, ends = stream.getvalue(), [0]
        for _ in range(5):
            ends.append(ends[-1] + _length(data[ends[-1] :]))
        pickles = [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]
        (folder / "x.bin").write_bytes(change(pickles, data[ends[-1] :]))
        return folder / "x.bin"

    return Case(build, refused)


def _length(data: bytes) -> int:
    """Of the pickle that `data` begins with."""
    return next(place for opcode, _, place in pickletools.genops(data) if opcode.name == "STOP") + 1  # type: ignore[operator]


def joined(number: int, make: Callable[[bytes], bytes]) -> Callable[[list[bytes], bytes], bytes]:
    """One of the five pickles changed."""

    def change(pickles: list[bytes], storages: bytes) -> bytes:
        pickles[number] = make(pickles[number])
        return b"".join(pickles) + storages

    return change


def view(key: str, offset: int, size: int, again: tuple[str, int, int] | None = None) -> Callable[..., bytes]:
    """A file of one matrix of eight numbers, of whose storage the tensor has a view."""

    def reference(found: tuple[str, int, int]) -> bytes:
        name, start, count = found
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x08"
        own = b"(" + text(name) + b"\x8a\x08" + struct.pack("<q", start) + b"\x8a\x08" + struct.pack("<q", count) + b"t"
        rebuilt = storage + own + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)R"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + rebuilt + b"tR"

    found = [(key, offset, size), *([again] if again else [])]
    value = b"\x80\x02}" + b"".join(
        text(EMBEDDING if not number else "model.norm.weight") + reference(one) + b"s"
        for number, one in enumerate(found)
    )

    def change(pickles: list[bytes], _: bytes) -> bytes:
        keys = pickle.dumps(["0"], 2)
        return b"".join([*pickles[:3], value + b".", keys]) + struct.pack("<q", 8) + bytes(32)

    return change


def sized(count: int) -> Callable[[list[bytes], bytes], bytes]:
    """The first storage declares this number of elements."""
    return lambda pickles, storages: b"".join(pickles) + struct.pack("<q", count) + storages[8:]


HONEST = {"legacy": legacy(lambda pickles, storages: b"".join(pickles) + storages, None)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "os.system in the first pickle": legacy(
        joined(0, lambda data: b"\x80\x02" + call("os", "system", text(SHELL)) + b"." + data), UNKNOWN
    ),
    **{
        f"os.system in pickle {number + 1}": legacy(
            joined(number, lambda data: data[:2] + call("os", "system", text(SHELL)) + b"0" + data[2:]), ATTACK
        )
        for number in (1, 2, 3, 4)
    },
    **{
        f"another call in pickle {number + 1}": legacy(
            joined(number, lambda _: b"\x80\x02" + call("evil", "Evil") + b"."),
            "protocol|big-endian|unused storage|not a list|no list|" + UNKNOWN,
        )
        for number in (1, 2, 3, 4)
    },
    **{
        f"pickle {number + 1} is empty": legacy(
            joined(number, lambda _: b""), "not a storage|which checkpoints do not use"
        )
        for number in (1, 2, 3, 4)
    },
    "a protocol of 400 digits": legacy(joined(1, lambda _: pickle.dumps(10**150, 2)), "protocol|over the limit"),
    "a protocol that is a list": legacy(joined(1, lambda _: pickle.dumps([[]], 2)), "protocol"),
    "of a big-endian machine": legacy(
        joined(2, lambda _: pickle.dumps({**SYSTEM, "little_endian": False}, 2)), "big-endian"
    ),
    "keys in another order": legacy(
        joined(4, lambda data: pickle.dumps(pickle.loads(data)[::-1], 2)), "declares both|truncated|duplicate"
    ),
    "a key twice": legacy(joined(4, lambda data: pickle.dumps(pickle.loads(data)[:1] * 12, 2)), "duplicate"),
    "no keys": legacy(joined(4, lambda _: pickle.dumps([], 2)), "continues after|no data for"),
    "keys that are numbers": legacy(joined(4, lambda _: pickle.dumps([1, []], 2)), "no list of storage keys"),
    "a key with an escape sequence": legacy(joined(4, lambda _: pickle.dumps(["\x1b[2J\n"], 2)), "unused storage"),
    "a million keys": legacy(joined(4, lambda _: pickle.dumps([str(n) for n in range(300_000)], 2)), "unused storage"),
    "a storage of 2^61 elements": legacy(sized(1 << 61), "declares both"),
    "a storage of -1 elements": legacy(sized(-1), "declares both"),
    "bytes after the end": legacy(lambda pickles, storages: b"".join(pickles) + storages + b"x", "continues after"),
    "cut": legacy(lambda pickles, storages: b"".join(pickles) + storages[: len(storages) // 2], "truncated"),
    "without storages": legacy(lambda pickles, storages: b"".join(pickles), "truncated"),
    "a view": legacy(view("v", 2, 4), "configuration|lacks|head|layer"),
    "a view past the end": legacy(view("v", 6, 4), "outside its storage|" + UNKNOWN),
    "a view before the start": legacy(view("v", -1, 4), "outside its storage|" + UNKNOWN),
    "a view of 2^62": legacy(view("v", 0, 1 << 62), "outside its storage|" + UNKNOWN),
    "contradictory descriptions of a view": legacy(view("v", 0, 4, ("v", 4, 4)), "contradictory|" + UNKNOWN),
    "a pickle of a gigabyte of marks": legacy(
        joined(3, lambda data: data[:2] + b"(" * 100_000 + data[2:]), "nested deeper|" + UNKNOWN
    ),
}
