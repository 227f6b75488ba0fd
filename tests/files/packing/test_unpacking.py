"""Unpacking: the same bytes from every packing, one clear line for damage, and nothing left over."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import zstandard

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files import packing
from llmconv.files.packing import find_codec, unpacked

CONTENT = b"PK" + os.urandom(300_000) + bytes(5000)


def tar(*files: tuple[str, bytes], end: bytes = bytes(1024), **fields: Any) -> bytes:
    """An archive of `files`, as Python's own tarfile writes it; `fields` are those of each member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(content))
        length = archive.offset
    return buffer.getvalue()[:length] + end


def zstd_unsized(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(content)


def lzma_alone(content: bytes) -> bytes:
    return lzma.compress(content, lzma.FORMAT_ALONE)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lzma_alone,
    "lz4": lz4.frame.compress,
    "zstd": zstandard.compress,
}
SKIPPED = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"


@pytest.mark.slow_rows("xz", "lzma")
@pytest.mark.parametrize("codec", COMPRESS)
def test_a_compressed_file_is_unpacked_under_its_own_name(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.pt.packed"
    path.write_bytes(COMPRESS[codec](CONTENT))
    found = unpacked(path)
    assert (found.name, found.read_bytes(), found.stat().st_size) == (path.name, CONTENT, len(CONTENT))


@pytest.mark.slow_rows("xz", "lzma")
@pytest.mark.parametrize("codec", ["none", *COMPRESS])
def test_the_file_of_an_archive_is_unpacked(tmp_path: Path, codec: str) -> None:
    packed = tar(("composer_states.pt", CONTENT))
    (tmp_path / "a.tar").write_bytes(COMPRESS[codec](packed) if codec != "none" else packed)
    assert unpacked(tmp_path / "a.tar").read_bytes() == CONTENT


@pytest.mark.slow_rows("xz")
@pytest.mark.parametrize("codec", sorted(COMPRESS.keys() - {"lzma"}))
def test_frames_that_follow_each_other_are_one_file(tmp_path: Path, codec: str) -> None:
    compress = COMPRESS[codec]
    (tmp_path / "a").write_bytes(compress(CONTENT[:99]) + compress(CONTENT[99:100_000]) + compress(CONTENT[100_000:]))
    assert unpacked(tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("compress", [zstandard.compress, zstd_unsized, lz4.frame.compress])
def test_skippable_frames_are_skipped(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a").write_bytes(SKIPPED + compress(CONTENT[:9]) + SKIPPED + compress(CONTENT[9:]) + SKIPPED)
    assert unpacked(tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.quick_rows("gzip")
@pytest.mark.parametrize("codec", ["gzip", "xz"])
def test_zeros_after_the_end_are_padding(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a").write_bytes(COMPRESS[codec](CONTENT) + bytes(4096))
    assert unpacked(tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.slow_rows("compress2-random", "lzma_alone-random")
@pytest.mark.parametrize("content", [b"", b"x", bytes(70_000), CONTENT], ids=["none", "one", "zeros", "random"])
@pytest.mark.parametrize("compress", [*COMPRESS.values(), zstd_unsized])
def test_the_declared_size_is_never_more_than_the_content(
    tmp_path: Path, compress: Callable[[bytes], bytes], content: bytes
) -> None:
    (tmp_path / "a").write_bytes(compress(content))
    with open(tmp_path / "a", "rb") as file:
        codec = find_codec(file, Path("a"))
        assert codec is not None
        assert codec.declared(file) == (0 if compress in (bz2.compress, zstd_unsized, lzma_alone) else len(content))
    assert unpacked(tmp_path / "a").read_bytes() == content


def test_a_file_that_is_not_packed_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.pt.gz").write_bytes(CONTENT)
    assert unpacked(tmp_path / "a.pt.gz") == tmp_path / "a.pt.gz"
    assert unpacked(tmp_path) == tmp_path


def test_a_file_is_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(CONTENT))
    assert unpacked(tmp_path / "a") is unpacked(tmp_path / "a")
    (tmp_path / "a").write_bytes(gzip.compress(b"other"))
    assert unpacked(tmp_path / "a").read_bytes() == b"other"


def test_another_file_of_equal_size_and_time_is_unpacked_anew(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).write_bytes(tar((name, content)))
        os.utime(tmp_path / name, (10**9, 10**9))
    assert unpacked(tmp_path / "a").read_bytes() == b"one"
    (tmp_path / "b").replace(tmp_path / "a")
    assert unpacked(tmp_path / "a").read_bytes() == b"two"


# Archives


def test_a_folder_with_an_empty_name_may_come_first(tmp_path: Path) -> None:
    folder = tarfile.TarInfo("")
    folder.type = tarfile.DIRTYPE
    (tmp_path / "a").write_bytes(folder.tobuf() + tar(("composer_states.pt", CONTENT)))
    assert unpacked(tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_dialect_of_tar_is_read(tmp_path: Path, format: int) -> None:
    name = "checkpoints/" + "a" * (90 if format == tarfile.USTAR_FORMAT else 200)
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mtime = len(CONTENT), 1.5
        archive.addfile(member, io.BytesIO(CONTENT))
    assert unpacked(tmp_path / "a.tar").read_bytes() == CONTENT


def test_the_size_in_an_extended_header_counts(tmp_path: Path) -> None:
    data = b"12 size=700\n".ljust(512, b"\0")
    extended, member = tarfile.TarInfo("x"), tarfile.TarInfo("composer_states.pt")
    extended.type, extended.size = tarfile.XHDTYPE, 12
    packed = extended.tobuf() + data + member.tobuf() + CONTENT[:700].ljust(1024, b"\0") + bytes(1024)
    (tmp_path / "a").write_bytes(packed)
    assert unpacked(tmp_path / "a").read_bytes() == CONTENT[:700]


LINK = tarfile.TarInfo("composer_states.pt")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "/etc/passwd"
PAX = tarfile.TarInfo("x")
PAX.type, PAX.size = tarfile.XHDTYPE, 12
HUGE = tarfile.TarInfo("x")
HUGE.type, HUGE.size = tarfile.XHDTYPE, 1 << 40

ARCHIVES: dict[str, tuple[bytes, str]] = {
    "several files": (tar(("a.pt", b"1"), ("b.pt", b"2")), "contains several files"),
    "no file": (tar(("a", b""), type=tarfile.DIRTYPE), "contains no file"),
    "a path that climbs": (tar(("../a.pt", b"1")), "leads out of the folder"),
    "an absolute path": (tar(("/a.pt", b"1")), "leads out of the folder"),
    "a link": (LINK.tobuf() + bytes(1024), "a link, a device"),
    "a hard link": (tar(("a", b""), type=tarfile.LNKTYPE), "a link, a device"),
    "a device": (tar(("a", b""), type=tarfile.CHRTYPE), "a link, a device"),
    "a sparse file": (tar(("a", b""), type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "no end": (tar(("a.pt", b"1"), end=b""), "is truncated"),
    "half a file": (tar(("a.pt", CONTENT))[:5000], "is truncated"),
    "a tail": (tar(("a.pt", b"1")) + b"tail", "bytes after its end"),
    "a damaged second header": (tar(("a.pt", b"1"), end=b"x" * 512), "damaged header"),
    "a header without end": (HUGE.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "has a header of"),
    "a header of other length": (PAX.tobuf() + b"99 size=700\n".ljust(512, b"\0"), "damaged header"),
    "a size that is none": (PAX.tobuf() + b"12 size=-70\n".ljust(512, b"\0"), "damaged header"),
    "headers without end": (PAX.tobuf() + b"12 size=700\n".ljust(512, b"\0"), "far too many"),
}
ARCHIVES["headers without end"] = (ARCHIVES["headers without end"][0] * 1100, "far too many")


@pytest.mark.parametrize(("packed", "reason"), ARCHIVES.values(), ids=ARCHIVES.keys())
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["tar", "tar.gz"])
def test_an_odd_archive_is_refused(
    tmp_path: Path, packed: bytes, reason: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a").write_bytes(compress(packed))
    with pytest.raises(InputRefused, match=reason):
        unpacked(tmp_path / "a")


@pytest.mark.slow
def test_no_byte_of_an_archive_header_makes_it_crash(tmp_path: Path) -> None:
    packed = tar(("a" * 150, CONTENT[:100]))
    for place in range(0, len(packed), 7):
        for value in (0, 0x31, 0x80, 0xFF):
            (tmp_path / f"{place}-{value}").write_bytes(packed[:place] + bytes([value]) + packed[place + 1 :])
            try:
                unpacked(tmp_path / f"{place}-{value}")
            except InputRefused as refusal:
                assert "\n" not in refusal.message and refusal.hint


# Damage


@pytest.mark.slow_rows("0.2-xz", "0.2-lzma", "0.9-xz", "0.9-lzma", "0.9999-xz", "0.9999-lzma")
@pytest.mark.parametrize("codec", COMPRESS)
@pytest.mark.parametrize("kept", [0.2, 0.9, 0.9999])
def test_a_truncated_file_is_refused(tmp_path: Path, codec: str, kept: float) -> None:
    packed = COMPRESS[codec](CONTENT)
    (tmp_path / "a").write_bytes(packed[: int(len(packed) * kept)])
    with pytest.raises(MalformedInput, match=f"`a` .*{codec}.* is truncated"):
        unpacked(tmp_path / "a")


@pytest.mark.slow_rows("xz", "lzma")
@pytest.mark.parametrize("codec", COMPRESS)
def test_bytes_after_the_end_are_refused(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a").write_bytes(COMPRESS[codec](CONTENT) + b"tail")
    with pytest.raises(MalformedInput, match="bytes after its end"):
        unpacked(tmp_path / "a")


@pytest.mark.slow_rows("xz")
@pytest.mark.parametrize("codec", ["gzip", "bzip2", "xz", "zstd unsized"])
def test_a_changed_byte_is_refused(tmp_path: Path, codec: str) -> None:
    packed = bytearray({**COMPRESS, "zstd unsized": zstd_unsized}[codec](CONTENT))
    packed[len(packed) // 2] ^= 1
    (tmp_path / "a").write_bytes(packed)
    with pytest.raises(MalformedInput, match="cannot be unpacked|is truncated"):
        unpacked(tmp_path / "a")


@pytest.mark.slow
def test_a_file_that_is_compressed_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lzma.compress(gzip.compress(CONTENT)))
    with pytest.raises(UnsupportedInput, match="compressed again, with gzip"):
        unpacked(tmp_path / "a")


@pytest.mark.parametrize(("magic", "command"), [(b"\x89LZO\x00\r\n\x1a\n", "lzop -d"), (b"\x02\x21\x4c\x18", "lz4 -d")])
def test_the_error_for_an_unsupported_compression_has_the_command_to_unpack_it(
    tmp_path: Path, magic: bytes, command: str
) -> None:
    (tmp_path / "a.pt.lzo").write_bytes(magic + CONTENT)
    with pytest.raises(UnsupportedInput, match="is compressed with lz") as refusal:
        unpacked(tmp_path / "a.pt.lzo")
    assert f"{command} {tmp_path / 'a.pt.lzo'}" in refusal.value.hint


# Bombs, the disk, and what is left behind


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Bombs count from 1 MB on; the folder that temporary files go to."""
    monkeypatch.setattr(packing, "RATIO_FROM", 1_000_000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.mark.quick_rows("lz4", "zstd")
@pytest.mark.parametrize("codec", COMPRESS)
def test_a_bomb_is_refused_and_leaves_nothing(tmp_path: Path, small_limits: Path, codec: str) -> None:
    (tmp_path / "bomb").write_bytes(COMPRESS[codec](bytes(30_000_000)))
    with pytest.raises(InputRefused, match="grows more than 200 times"):
        unpacked(tmp_path / "bomb")
    assert not [*small_limits.iterdir()]


def test_a_declared_size_beyond_the_disk_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bytearray(gzip.compress(CONTENT))
    packed[-4:] = (0xFFFFFFFF).to_bytes(4, "little")
    (tmp_path / "a.gz").write_bytes(packed)
    monkeypatch.setattr(packing._FreeSpace, "_free", lambda space: 1 << 30)
    monkeypatch.setattr(packing._FreeSpace, "write", lambda space, block: pytest.fail("wrote"))
    with pytest.raises(InputRefused, match=r"no space left to unpack `a\.gz` .*4,294,967,295 more bytes") as refusal:
        unpacked(tmp_path / "a.gz")
    assert "TMPDIR" in refusal.value.hint


@pytest.mark.slow
def test_a_disk_that_fills_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_limits: Path) -> None:
    free = iter([1 << 30, 1 << 30, 1000])
    monkeypatch.setattr(packing, "CHECK_BYTES", 1)
    monkeypatch.setattr(packing._FreeSpace, "_free", lambda space: next(free))
    (tmp_path / "a.bz2").write_bytes(bz2.compress(CONTENT * 20))
    with pytest.raises(InputRefused, match="no space left"):
        unpacked(tmp_path / "a.bz2")
    assert not [*small_limits.iterdir()]


@pytest.mark.quick_rows("6-compress")
@pytest.mark.parametrize(("field", "compress"), [(6, lz4.frame.compress), (5, lzma_alone)])
def test_a_frame_larger_than_it_declares_is_refused(
    tmp_path: Path, field: int, compress: Callable[[bytes], bytes]
) -> None:
    packed = bytearray(compress(CONTENT))
    packed[field : field + 8] = (1000).to_bytes(8, "little")
    (tmp_path / "a").write_bytes(packed)
    with pytest.raises(MalformedInput, match="`a` .*compressed with"):
        unpacked(tmp_path / "a")


@pytest.mark.slow
def test_memory_follows_a_block_and_not_the_file(tmp_path: Path) -> None:
    assert packing.BLOCK <= 1 << 20
    (tmp_path / "a.zst").write_bytes(zstandard.compress(bytes(200_000_000)))
    code = (
        "import resource, sys; from pathlib import Path; from llmconv.files.packing import unpacked\n"
        "import zstandard\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "unpacked(Path(sys.argv[1]))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.zst"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64


@pytest.mark.quick_rows("1/0")
@pytest.mark.parametrize("end", ["", "raise KeyboardInterrupt", "1/0", "os.kill(os.getpid(), 15)", "os._exit(3)"])
def test_no_unpacked_byte_outlives_the_process(tmp_path: Path, end: str) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT))
    code = "import os, sys; from pathlib import Path; from llmconv.files.packing import unpacked\n"
    code += f"print(len(unpacked(Path(sys.argv[1])).read_bytes()), flush=True)\n{end}"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    arguments = [sys.executable, "-c", code, str(tmp_path / "a.gz")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{len(CONTENT)}\n"
    # a link that is left points to a descriptor of the dead process, not to one of this process with the same number
    assert not [file for file in (tmp_path / "temporary").rglob("*") if stat.S_ISREG(file.lstat().st_mode)]
