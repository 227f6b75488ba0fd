"""Zips whose parts contradict each other, and members that are not regular files."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.honest import composer, members, repacked

WEIGHT = "x/data/0"
DAMAGED = "truncated or damaged"


@dataclass(frozen=True)
class Member:
    """One member; fields other than None replace the true values, in the local header or in the directory."""

    name: str
    data: bytes
    flags: int = 0
    method: int = 0
    attributes: int = 0
    disk: int = 0
    local_name: str | None = None
    local_size: int | None = None
    local_flags: int | None = None
    size: int | None = None
    packed: int | None = None
    crc: int | None = None
    offset: int | None = None
    extra: bytes = b""


def encode(parts: Iterable[Member], end: Callable[[int, int, int], bytes] | None = None, front: bytes = b"") -> bytes:
    """The bytes of a zip; `end(count, directory size, directory position)` writes its last record."""
    body, directory, count = bytearray(front), bytearray(), 0
    for part in parts:
        place, name = len(body), part.name.encode()
        crc = zlib.crc32(part.data) if part.crc is None else part.crc
        size = len(part.data) if part.size is None else part.size
        packed = size if part.packed is None else part.packed
        local = (part.local_name or part.name).encode()
        shown = len(part.data) if part.local_size is None else part.local_size
        flags = part.flags if part.local_flags is None else part.local_flags
        header = (20, flags, part.method, 0, 0x21, crc, shown, shown, len(local), 0)
        body += struct.pack("<4s5H3L2H", b"PK\x03\x04", *header) + local + part.data
        entry = (
            20,
            20,
            part.flags,
            part.method,
            0,
            0x21,
            crc,
            packed,
            size,
            len(name),
            len(part.extra),
            0,
            part.disk,
            0,
        )
        where = place if part.offset is None else part.offset
        directory += struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *entry, part.attributes, where) + name + part.extra
        count += 1
    finish = end or (lambda count, size, start: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, start, 0))
    return bytes(body + directory + finish(count, len(directory), len(body)))


def honest_members() -> list[Member]:
    """The members of a Composer run."""
    return [Member(name, data) for name, data in members(composer()).items()]


def changed(name: str, refused: str | None, **lies: object) -> Case:
    """A run, one member of which lies."""
    parts = [replace(part, **lies) if part.name == name else part for part in honest_members()]  # type: ignore[arg-type]
    return written(encode(parts), refused)


def written(data: bytes, refused: str | None) -> Case:
    """A file of these bytes."""

    def build(folder: Path) -> Path:
        (folder / "x.pt").write_bytes(data)
        return folder / "x.pt"

    return Case(build, refused)


def added(refused: str | None, *more: Member) -> Case:
    """A run with more members."""
    return written(encode([*honest_members(), *more]), refused)


def ended(refused: str | None, end: Callable[[int, int, int], bytes]) -> Case:
    """A run with another last record."""
    return written(encode(honest_members(), end), refused)


def flipped(refused: str, member: str, position: int) -> Case:
    """A run with one bit changed in the data of a member."""

    def build(folder: Path) -> Path:
        parts = honest_members()
        data = bytearray(encode(parts))
        place = data.index(next(part.data for part in parts if part.name == member)) + position
        data[place] ^= 0x10
        (folder / "x.pt").write_bytes(data)
        return folder / "x.pt"

    return Case(build, refused)


def compressed(folder: Path) -> Path:
    """A bomb: a pickle of 200 MB that deflates to little."""
    with zipfile.ZipFile(folder / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"N" * (200 << 20))
    return folder / "x.pt"


def huge_directory(folder: Path) -> Path:
    """A sparse file that claims a directory of 8 GB."""
    path = folder / "x.pt"
    with open(path, "wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(8 << 30)
        file.seek(8 << 30)
        start, size = 4, (8 << 30) - 4
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, start))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, 8 << 30, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    return path


def many_members(folder: Path) -> Path:
    """60,000 empty members."""
    (folder / "x.pt").write_bytes(encode([*honest_members(), *(Member(f"x/{n}", b"") for n in range(60_000))]))
    return folder / "x.pt"


def quine(folder: Path) -> Path:
    """A member that is the directory's own bytes: what follows the data is read as a member."""
    inner = encode(honest_members())
    return repacked(folder, {"x/data.pkl": inner, "x/data/0": inner})


def zip64_of(size: int) -> bytes:
    """An extra field with 64-bit sizes."""
    return struct.pack("<2H2Q", 1, 16, size, size)


CASES: dict[str, Case] = {
    "a zip written by hand": written(encode(honest_members()), None),
    "a compressed pickle": Case(compressed, "compressed or encrypted"),
    "a flipped bit in the pickle": flipped("CRC-32", "x/data.pkl", 40),
    "a flipped bit at the start of a weight": flipped("CRC-32 mismatch in `data/0`", WEIGHT, 0),
    "a flipped bit at the end of a weight": flipped("CRC-32 mismatch in `data/0`", WEIGHT, 127),
    "a wrong checksum of a weight": changed(WEIGHT, "CRC-32", crc=1),
    "a wrong checksum of the byte order": changed("x/byteorder", "CRC-32", crc=1),
    "a big-endian file": changed("x/byteorder", "big-endian", data=b"big"),
    "an encrypted member": changed(WEIGHT, "compressed or encrypted", flags=1),
    "strong encryption": changed(WEIGHT, "compressed or encrypted", flags=0x41),
    "encrypted only in the local header": changed(WEIGHT, "contradictory headers", local_flags=1),
    "a masked directory": changed(WEIGHT, "compressed or encrypted", flags=0x2000),
    "a deflated weight": changed(WEIGHT, "compressed or encrypted", method=8),
    "an unknown method": changed(WEIGHT, "compressed or encrypted", method=99),
    "another name in the local header": changed(WEIGHT, "contradictory headers", local_name="x/data/9"),
    "another size in the local header": changed(WEIGHT, "contradictory headers", local_size=4),
    "no size in the local header": changed(WEIGHT, "contradictory headers", local_size=0),
    "sizes in a descriptor": changed(WEIGHT, None, local_size=0, flags=8),
    "a size that reaches into the next member": changed(WEIGHT, "contradictory headers|overlaps", size=400),
    "a size beyond the file": changed(WEIGHT, "contradictory headers|ends outside", size=1 << 30, local_size=1 << 30),
    "a 64-bit size beyond the file": changed(
        WEIGHT,
        "contradictory headers|ends outside|damaged",
        size=0xFFFFFFFF,
        local_size=0xFFFFFFFF,
        extra=zip64_of(1 << 60),
    ),
    "a 64-bit field that is too short": changed(
        WEIGHT, "truncated or damaged|contradictory headers", size=0xFFFFFFFF, extra=b"\1\0\2\0\0\0"
    ),
    "packed and unpacked sizes differ": changed(WEIGHT, "contradictory headers|compressed", packed=64),
    "two members at one place": changed(WEIGHT, "contradictory headers|overlaps|without members", offset=0),
    "a member in the directory": changed(WEIGHT, "contradictory headers|ends outside|damaged", offset=1 << 16),
    "a member on another disk": changed(WEIGHT, "misplaced", disk=3),
    "the same member twice": added("duplicate", Member(WEIGHT, b"1234")),
    "the pickle twice": added("duplicate", Member("x/data.pkl", b"N.")),
    "two pickles in two folders": added("misplaced", Member("y/data.pkl", b"N.")),
    "a symbolic link": added("misplaced", Member("x/data/99", b"/etc/passwd", attributes=(stat.S_IFLNK | 0o777) << 16)),
    "a device": added("misplaced", Member("x/data/99", b"", attributes=(stat.S_IFCHR | 0o666) << 16)),
    "a folder": added("misplaced", Member("x/data/", b"")),
    "a name that leads out": added("misplaced", Member("x/../../evil", b"")),
    "an absolute name": added("misplaced", Member("/etc/evil", b"")),
    "a name of Windows": added("misplaced", Member("x/..\\..\\evil", b"")),
    "a name with an escape sequence": added("misplaced", Member("x/\x1b[2J", b"")),
    "a name of 60,000 letters": added("damaged|contradictory headers", Member("x/" + "a" * 60_000, b"")),
    "TorchScript": added("TorchScript", Member("x/code/__torch__.py", b"pass")),
    "TorchScript constants": added("TorchScript", Member("x/constants.pkl", b"N.")),
    "unexpected members": added(None, Member("x/evil.py", b"import os")),
    "a comment": ended(
        DAMAGED, lambda n, size, at: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, size, at, 4) + b"evil"
    ),
    "an end inside the comment": ended(
        DAMAGED,
        lambda n, size, at: (
            struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, size, at, 22)
            + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, size, at, 0)
        ),
    ),
    "fewer members than the end record declares": ended(
        DAMAGED, lambda n, size, at: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n + 1, n + 1, size, at, 0)
    ),
    "several disks": ended(DAMAGED, lambda n, size, at: struct.pack("<4s4H2LH", b"PK\5\6", 1, 0, n, n, size, at, 0)),
    "a directory beyond the file": ended(
        DAMAGED, lambda n, size, at: struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, size, at + 1000, 0)
    ),
    "a directory of 8 GB": Case(huge_directory, DAMAGED),
    "bytes before the zip": written(
        encode(honest_members(), front=b"PK\x03\x04" + os.urandom(40)), "bytes before|" + DAMAGED
    ),
    "a shell script in front": written(
        encode(honest_members(), front=b"#!/bin/sh\n"), "not a torch file|not of a training format"
    ),
    "a zip in a zip": Case(quine, "checkpoints do not use|damaged|inconsistent|opcode"),
    "60,000 members": Case(many_members, None),
    "no members": written(encode([]), "without members|not of a training format|damaged"),
    "only a directory entry": written(
        struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0), "without members|damaged"
    ),
    "a missing pickle": written(
        encode(honest_members()[1:]), "contains no `data.pkl`|contradictory headers|no training"
    ),
    "a missing weight": written(encode([part for part in honest_members() if part.name != WEIGHT]), "has no data for"),
    "a weight with more bytes": changed(WEIGHT, "its record has", data=bytes(4096)),
}


def truncated(fraction: float) -> Case:
    """A run that was cut."""
    data = encode(honest_members())
    return written(data[: int(len(data) * fraction)], DAMAGED)


CASES |= {f"cut at {percent} %": truncated(percent / 100) for percent in (1, 30, 70, 99)}
