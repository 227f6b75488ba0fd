"""The compression formats of checkpoints: how each is detected and decoded, and the size that its headers declare.

Layouts: RFC 1952 (gzip), RFC 8878 (zstd), lz4 `doc/lz4_Frame_format.md`, xz `doc/xz-file-format.txt` and
`doc/lzma-file-format.txt`.

Unpacks a compressed file, or a tar archive of one file, once per process, as a stream to a temporary file.

The temporary file has no name on the disk, so that it is gone however the process ends; a link to its descriptor, with
the name of the packed file, is returned. Without such links (macOS) it keeps its name and is removed when the process
ends, or by the next one if it was killed. TMPDIR chooses the disk.

Layout of tar (POSIX `pax`, ustar interchange format; GNU tar `tar.h`): 512-byte headers, each before its data, padded
to 512; zeros at the end. Composer's archives contain `composer_states.pt`, after a folder whose name is empty. Nothing
is extracted under a name from the archive. `tarfile.open` does not suffice: it treats a damaged or missing header as
the end of the archive, ignores trailing bytes, reads pax headers of any size into memory, and takes an invalid pax size
as 0.

Compressed files are detected by their first bytes. Several frames may follow each other, as command line tools allow;
any other bytes after the last one are refused. The stream classes of the libraries do not suffice: `BZ2File` and
`LZMAFile` ignore trailing bytes, zstd's reader ends silently in a truncated frame, `GzipFile` accepts reserved flags
and reads padding byte by byte.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, word
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder
from llmconv.files.source_file import Version, open_source, version_of
from llmconv.progress import bytes_bar

HEAD = 32  # bytes that contain the part of a frame's header read here
DECODER_MEMORY = 512 << 20  # memory limit of an xz or lzma decoder; `xz -9` needs 65 MiB
INDEX_LIMIT = 1 << 20


class FrameDecoder(Protocol):
    """Decompresses one frame, with the interface of the standard library's `bz2` and `lzma` decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@dataclass(frozen=True)
class Codec:
    """One compression format."""

    name: str  # for messages
    magic: bytes  # the first bytes of a frame
    decoder: Callable[[], FrameDecoder]  # makes a decoder of one frame
    # from the first `HEAD` bytes of a frame to its unpacked size; None if not declared
    frame_size: Callable[[bytes], int | None] = lambda head: None
    # from a file and its size to the minimum unpacked size that it declares; 0 if none
    least: Callable[[BinaryIO, int], int] = lambda file, size: 0
    fed: int = 64 << 10  # compressed bytes per call of the decoder
    padded: bool = False  # whether zeros may follow a frame

    def begins(self, data: bytes) -> bool:
        if self.name != "lzma" or not data.startswith(self.magic):
            return data.startswith(self.magic)
        # it has no magic number; the fields of the header are checked instead, as the format description advises
        dictionary, size = int.from_bytes(data[1:5], "little"), _lzma_size(data)
        return len(data) >= 13 and dictionary >= 4096 and dictionary.bit_count() <= 2 and (size or 0) < 1 << 48

    def declared(self, file: BinaryIO) -> int:
        """The minimum unpacked size in bytes that the file declares."""
        file.seek(0)
        return max(self.frame_size(file.read(HEAD)) or 0, self.least(file, os.fstat(file.fileno()).st_size))


class _Gzip:
    """Decodes one gzip member; zlib checks its CRC and length."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflate.decompress(data or self._inflate.unconsumed_tail, max_length)


class _Zstd:
    """Decodes one zstd frame; ignores `max_length`, so input is limited: at worst 4 bytes unpack to 128 KiB."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415 - imported where it is needed

        self._error = zstandard.ZstdError
        self._decoder = zstandard.ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._decoder.decompress(data) if data else b""
        except self._error as error:
            raise ValueError(error) from error


def _lz4() -> FrameDecoder:
    import lz4.frame  # noqa: PLC0415 - as above

    decoder: FrameDecoder = lz4.frame.LZ4FrameDecompressor()
    return decoder


def _gzip_size(file: BinaryIO, size: int) -> int:
    """The last four bytes: the length of the last member modulo 2^32."""
    file.seek(max(0, size - 4))
    return int.from_bytes(file.read(4), "little")


def _zstd_size(head: bytes) -> int | None:
    import zstandard  # noqa: PLC0415 - as above

    try:
        size = zstandard.frame_content_size(head)
    except zstandard.ZstdError:
        return None
    return None if size < 0 else size


def _lz4_size(head: bytes) -> int | None:
    """Bit 3 of the flags declares that eight bytes with the size follow."""
    return struct.unpack_from("<Q", head, 6)[0] if len(head) >= 14 and head[4] & 8 else None


def _lzma_size(head: bytes) -> int | None:
    size = int.from_bytes(head[5:13], "little")
    return None if size == (1 << 64) - 1 else size


def _xz_size(file: BinaryIO, size: int) -> int:
    """The sum of sizes in the index of the last stream, as far as it is within `INDEX_LIMIT`."""
    file.seek(max(0, size - 12))
    footer = file.read(12)
    if len(footer) < 12 or footer[10:] != b"YZ":
        return 0
    length = (struct.unpack_from("<I", footer, 4)[0] + 1) * 4
    if length > size - 12:
        return 0
    file.seek(size - 12 - length)
    numbers = _multibyte(file.read(min(length, INDEX_LIMIT))[1:-4])
    count = next(numbers, 0)
    return sum(number for place, number in enumerate(numbers) if place % 2 and place < 2 * count)


def _multibyte(data: bytes) -> Iterator[int]:
    """Integers with seven bits per byte, the lowest first."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield number
            number = shift = 0


CODECS = (
    Codec("gzip", b"\x1f\x8b\x08", _Gzip, least=_gzip_size, padded=True),
    Codec("bzip2", b"BZh", bz2.BZ2Decompressor),
    Codec(
        "xz",
        b"\xfd7zXZ\x00",
        partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, DECODER_MEMORY),
        least=_xz_size,
        padded=True,
    ),
    Codec("lzma", b"\x5d\x00\x00", partial(lzma.LZMADecompressor, lzma.FORMAT_ALONE, DECODER_MEMORY), _lzma_size),
    Codec("lz4", b"\x04\x22\x4d\x18", _lz4, _lz4_size),
    Codec("zstd", b"\x28\xb5\x2f\xfd", _Zstd, _zstd_size, fed=1 << 10),
)


DESCRIPTORS = Path("/proc/self/fd")  # links to all open files, `proc(5)`
CHECK_BYTES = 64 << 20  # bytes between two checks of the free space
RESERVE = 256 << 20  # bytes of the disk to leave free; at most a twentieth of the free space
RATIO_LIMIT = 200
# A file that grows by more than this factor, and beyond this size, is a bomb: weights hardly compress
RATIO_FROM = 1 << 30


def unpacked(path: Path) -> Path:
    """The path of the unpacked content of `path`; `path` itself if it is a folder or not packed.

    Raises MalformedInput for a damaged file or a bomb, UnsupportedInput for an unsupported compression, packed twice,
    or an archive of several files, InputRefused if no space is left.
    """
    if not path.is_file():
        return path
    return _unpacked(path.absolute(), version_of(path.stat())) or path


@cache
def _unpacked(path: Path, _version: Version) -> Path | None:
    with open_source(path) as file:
        codec = find_codec(file, path)
        file.seek(0)
        if codec is None and not is_tar(file.read(RECORD)):
            return None
    with open(path, "rb") as file:
        folder = make_temporary_folder()
        try:
            with open(folder / "unpacked", "w+b", buffering=0) as target:
                link = folder / path.name
                if DESCRIPTORS.is_dir():
                    (folder / "unpacked").unlink()
                _unpack(path.name, file, codec, target)
                if again := find_codec(target, path):
                    problem = f"the content of `{path.name}` is compressed again, with {again.name}"
                    raise UnsupportedInput(problem, hint="unpack it once by hand")
                if DESCRIPTORS.is_dir():
                    link.symlink_to(DESCRIPTORS / str(os.dup(target.fileno())))
                else:
                    (folder / "unpacked").rename(link)
            return link
        except BaseException:
            remove_temporary_folder(folder)
            raise


def _unpack(name: str, file: BinaryIO, codec: Codec | None, target: BinaryIO) -> None:
    space = _FreeSpace(name, target)
    size = os.fstat(file.fileno()).st_size
    space.require(codec.declared(file) if codec else size)
    file.seek(0)
    stream = io.BufferedReader(_Stream(_unpacked_blocks(codec, file, name)), BLOCK) if codec else file
    head = stream.read(RECORD)
    if is_tar(head):
        size, blocks = TarArchive(head, stream, name).only_file()
        space.require(size)
    else:
        blocks = chain([head], iter(lambda: stream.read(BLOCK), b""))
    written = read = checked = 0
    with bytes_bar(f"unpacking {name}", os.fstat(file.fileno()).st_size) as advance:
        for block in blocks:
            if written + len(block) > max(RATIO_FROM, RATIO_LIMIT * file.tell()):
                problem = f"`{name}` grows more than {RATIO_LIMIT} times when it is unpacked, which checkpoints do not"
                raise MalformedInput(problem, hint="it is an attack on the disk, or full of zeros; check its origin")
            if written - checked >= CHECK_BYTES:
                space.require(len(block))
                checked = written
            space.write(block)
            written += len(block)
            advance(file.tell() - read)
            read = file.tell()


class _FreeSpace:
    """The free space on the disk of the temporary file."""

    def __init__(self, name: str, target: BinaryIO) -> None:
        self._name, self._target = name, target
        self._reserve = min(RESERVE, self._free() // 20)

    def _free(self) -> int:
        disk = os.fstatvfs(self._target.fileno())
        return disk.f_bavail * disk.f_frsize

    def require(self, count: int) -> None:
        """Raises InputRefused unless `count` more bytes leave the reserve free."""
        free = self._free()
        if count > free - self._reserve:
            raise self._full(f"{count:,} more bytes are needed, {free:,} are free")

    def write(self, block: bytes) -> None:
        view = memoryview(block)
        try:
            while view:
                view = view[self._target.write(view) :]
        except OSError as error:
            raise self._full(error.strerror or str(error)) from error

    def _full(self, problem: str) -> InputRefused:
        message = f"no space left to unpack `{self._name}` in `{tempfile.gettempdir()}`: {problem}"
        return InputRefused(message, hint="set TMPDIR to a folder on a larger disk, or unpack it by hand")


RECORD = 512
BLOCK = 1 << 20
HEADER_LIMIT = 1000
EXTENDED_LIMIT = 1 << 20  # bytes of the data of an extended header, such as a long name
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


def is_tar(head: bytes) -> bool:
    """Whether `head`, the first bytes of a file, is the header of a tar archive (its checksum decides)."""
    try:
        tarfile.TarInfo.frombuf(head[:RECORD], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


class TarArchive:
    """A tar archive, read once from start to end; `head` is the first record, already read, and `stream` the rest."""

    def __init__(self, head: bytes, stream: BinaryIO, name: str) -> None:
        self._record: bytes | None = head
        self._stream, self._name = stream, name
        self._headers = 0

    def only_file(self) -> tuple[int, Iterator[bytes]]:
        """The size of the only file in the archive, and its content in blocks, to be read to the end.

        Raises UnsupportedInput for several files or none, as the content does; MalformedInput if it is truncated or
        damaged, or has a link, a device, or a name that leads out of the folder.
        """
        if (size := self._next_file()) is None:
            raise UnsupportedInput(f"the archive `{self._name}` contains no file", hint="give another checkpoint")
        return size, self._content(size)

    def _content(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            if not (block := self._stream.read(min(left, BLOCK))):
                raise self._malformed("is truncated")
            left -= len(block)
            yield block
        self._read(-size % RECORD)
        if self._next_file() is not None:
            folder = word(self._name.partition(".")[0] or "unpacked")
            problem = f"the archive `{self._name}` contains several files"
            command = f"mkdir {folder} && tar -xf {word(self._name)} -C {folder}"
            raise UnsupportedInput(problem, hint=f"unpack it where it is with `{command}`, and give that folder")

    def _next_file(self) -> int | None:
        """Skips to the data of the next file and returns its size; None at the end of the archive."""
        size: int | None = None
        while (record := self._take()).strip(b"\0"):
            self._headers += 1
            try:
                header = tarfile.TarInfo.frombuf(record, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as error:
                raise self._malformed("has a damaged header") from error
            if header.size < 0 or self._headers > HEADER_LIMIT:
                raise self._malformed("has a damaged header, or far too many headers")
            self._check_name(header.name)
            if header.type in EXTENDED:
                size = self._extended_size(self._small(header))
            elif header.type in NAMES:
                self._small(header)
            elif header.type in PLAIN:
                return header.size if size is None else size
            elif header.type != tarfile.DIRTYPE:
                raise self._malformed(f"contains `{header.name[:80]}`, which is a link, a device or a sparse file")
            else:
                size = None
        while block := self._stream.read(BLOCK):
            if block.strip(b"\0"):
                raise self._malformed("has bytes after its end")
        return None

    def _check_name(self, name: str) -> None:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise self._malformed(f"contains {name[:80]!r}, a name that leads out of the folder")

    def _small(self, header: tarfile.TarInfo) -> bytes:
        """The data of a header that describes the next one."""
        if header.size > EXTENDED_LIMIT:
            raise self._malformed(f"has a header of {header.size} bytes")
        data = self._read(header.size)
        self._read(-header.size % RECORD)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            self._check_name(data.rstrip(b"\0").decode("utf-8", "surrogateescape"))
        return data

    def _extended_size(self, data: bytes) -> int | None:
        """The `size` of a pax header, of records `LENGTH KEY=VALUE` and a newline, LENGTH counting all of it."""
        size = None
        while data:
            digits, _, rest = data.partition(b" ")
            length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
            key, _, value = data[len(digits) + 1 : length - 1].partition(b"=")
            if not rest or not len(digits) + 3 < length <= len(data):
                raise self._malformed("has a damaged header")
            if key.startswith(b"GNU.sparse"):
                raise self._malformed("contains a sparse file")
            if key == b"path":
                self._check_name(value.decode("utf-8", "surrogateescape"))
            if key == b"size":
                if not value.isdigit() or len(value) > 18:
                    raise self._malformed("has a damaged header")
                size = int(value)
            data = data[length:]
        return size

    def _take(self) -> bytes:
        record, self._record = self._record, None
        return self._read(RECORD) if record is None else record

    def _read(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise self._malformed("is truncated")
        return data

    def _malformed(self, problem: str) -> MalformedInput:
        message = f"the archive `{self._name}` {problem}"
        return MalformedInput(message, hint="it should contain one checkpoint file; copy or pack it again")


SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames that zstd and lz4 skip (`pzstd` begins with one)
LZOP_MAGIC = b"\x89LZO\x00\r\n\x1a\n"
LZ4_LEGACY_MAGIC = b"\x02\x21\x4c\x18"


def find_codec(file: BinaryIO, path: Path) -> Codec | None:
    """The compression format of `file`, None if not compressed; raises UnsupportedInput if it is unpacked by hand."""
    file.seek(0)
    head = file.read(HEAD)
    for magic, kind, command in ((LZOP_MAGIC, "lzop", "lzop -d"), (LZ4_LEGACY_MAGIC, "lz4's legacy format", "lz4 -d")):
        if head.startswith(magic):
            raise UnsupportedInput(
                f"`{path.name}` is compressed with {kind}", hint=f"unpack it first: `{command} {word(path)}`"
            )
    for _ in range(16):
        if (length := _skippable(head)) is None:
            break
        file.seek(length - len(head), os.SEEK_CUR)
        head = file.read(HEAD)
    return next((codec for codec in CODECS if codec.begins(head)), None)


def _skippable(head: bytes) -> int | None:
    """Length of the skippable frame that begins here, None if there is none."""
    if len(head) < 8:
        return None
    magic, length = struct.unpack_from("<2I", head)
    return 8 + int(length) if magic in SKIPPABLE else None


class _Stream(io.RawIOBase):
    """An iterator of blocks, presented as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (block := next(self._blocks, None)) is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _unpacked_blocks(codec: Codec, file: BinaryIO, name: str) -> Iterator[bytes]:
    """The unpacked bytes of all frames; refuses any other bytes."""
    data = file.read(codec.fed)
    while data:
        while (length := _skippable(data)) is not None:
            file.seek(length - len(data), os.SEEK_CUR)
            data = file.read(codec.fed)
        if data and not codec.begins(data):
            raise _damaged(name, codec, f"has bytes after its end that are not {codec.name}")
        data = (yield from _frame(codec, file, data, name)) if data else b""
        data = _without_padding(file, data) if codec.padded else data
        if len(data) < HEAD:
            data += file.read(codec.fed)


def _frame(codec: Codec, file: BinaryIO, data: bytes, name: str) -> Generator[bytes, None, bytes]:
    """Yields the content of one frame; returns the compressed bytes read beyond it."""
    declared = codec.frame_size(data[:HEAD])
    decoder = codec.decoder()
    done = 0
    while not decoder.eof:
        fresh = data or (file.read(codec.fed) if decoder.needs_input else b"")
        ended = decoder.needs_input and not fresh
        try:
            block = decoder.decompress(fresh, BLOCK)
        except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError) as error:
            raise _damaged(name, codec, f"cannot be unpacked: {error}") from error
        data = b""
        if ended and not block and not decoder.eof:
            raise _damaged(name, codec, "is truncated")
        done += len(block)
        if declared is not None and done > declared:
            raise _damaged(name, codec, f"declares {declared} bytes and contains more")
        yield block
    return decoder.unused_data or b""


def _without_padding(file: BinaryIO, data: bytes) -> bytes:
    while not (rest := data.lstrip(b"\0")) and (data := file.read(BLOCK)):
        continue
    return rest


def _damaged(name: str, codec: Codec, problem: str) -> MalformedInput:
    message = f"`{name}` (compressed with {codec.name}) {problem}"
    return MalformedInput(message, hint="copy it again from its source, or unpack it by hand")
