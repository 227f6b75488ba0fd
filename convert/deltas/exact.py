"""Exact deltas: planning the files of a difference, opening them, and applying them to the same base.

A folder with `delta.json` (`{"delta": "exact", "version": 1, "files": […], "tensors": n, "removed": […]}`), files of
frames, and the tuned model's `config.json` and side files. Order and dtype of the tensors are the tuned model's. A
file of the base without changes is copied, and the copy is checked.

The difference of two elements is the number of representable floats between them: bit patterns in the order of their
values are subtracted as integers, modulo 2ⁿ. It is reversible for any two patterns, NaN, infinities and -0 included.
Weights that training hardly moved give small integers, whose upper bytes are zeros and compress well.

A file has a zstd frame for each block of rows that changed, and an index at the end:

    frame, frame, …                       `zstd -d` unpacks them; `byte_planes`
    skippable frame (RFC 8878, 3.1.2)     0x184D2A5E, its size, the index as JSON, that one's size (8 bytes), `LLMDELTA`

The index: `{"tensors": {name: {dtype, shape, rows, blocks: [[bytes, crc32, crc32], …], base: {name, dtype, shape,
sha256}}}}`. `rows` is the height of a block; a block of 0 bytes equals the base; the first CRC-32 is that of the
tuned rows, the second that of the base's rows (0 if it has none); `base` is null for a difference from zeros, and its
sha256 is that of the whole tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import zstandard

from llmconv.background import prefetch
from llmconv.checkpoint import Checkpoint, read_json, read_side_files, sentence_files
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.head_and_dtype import HEAD, find_embedding
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short
from llmconv.files.safetensors_file import NAME_LIMIT, RANK_LIMIT, FileTensor
from llmconv.files.source_file import ChecksummedRange, combine, crc32, open_source, read_into
from llmconv.model_code import code_of
from llmconv.output.plan import Plan, Shard, json_bytes, plan_checkpoint
from llmconv.tensors import BLOCK_BYTES, BY_NAME, FLOATS, Array, DType, LazyTensor, Piece, as_bytes


def ulp_differences(tuned: Array, guess: Array) -> Array:
    """Differences of arrays of one kind, unsigned: 0, -1, +1, -2, … as 0, 1, 2, 3, … so that upper bits are zeros."""
    change, sign = _ordered(tuned), _ordered(guess)
    change -= sign
    _spread_sign(change, sign)
    change <<= 1
    change ^= sign
    return change.reshape(tuned.shape)


def with_differences(guess: Array, change: Array) -> Array:
    """The reverse of `ulp_differences`, bit for bit: the tuned array from `guess` and the differences."""
    steps = change.reshape(-1)
    sign = steps & 1
    np.negative(sign, out=sign)
    sign ^= steps >> 1
    sign += _ordered(guess)
    bits = sign if guess.dtype.kind in "iub" else _flipped(sign)  # as in `_ordered`: the sign bit does not change
    return bits.view(guess.dtype).reshape(guess.shape)


def _ordered(values: Array) -> Array:
    """Bit patterns as unsigned integers; those of floats in the order of their values: negative ones are inverted."""
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    return bits.copy() if values.dtype.kind in "iub" else _flipped(bits)


def _flipped(bits: Array) -> Array:
    """Inverts all bits but the highest where the highest is set."""
    flip = np.empty_like(bits)
    _spread_sign(bits, flip)
    flip >>= 1
    flip ^= bits
    return flip


def _spread_sign(bits: Array, target: Array) -> None:
    """target = all ones where the highest bit of `bits` is set, else zero."""
    signed = f"i{bits.itemsize}"
    np.right_shift(bits.view(signed), 8 * bits.itemsize - 1, out=target.view(signed))


def byte_planes(change: Array) -> Array:
    """uint8, itemsize×elements: the highest bytes of all integers first, the lowest last; zeros lie together."""
    steps, size = change.reshape(-1), change.itemsize
    content = np.empty((size, len(steps)), np.uint8)
    for number, plane in enumerate(content):
        np.right_shift(steps, 8 * (size - 1 - number), out=plane, casting="unsafe")
    return content


def can_predict(base: LazyTensor, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether a tuned tensor can be stored as a difference from `base`: equal row shape, equal dtype or both float."""
    same_rows = len(base.shape) == len(shape) and base.shape[1:] == shape[1:]
    return same_rows and (base.dtype == dtype or (base.dtype.name in FLOATS and dtype.name in FLOATS))


def known_rows(base: LazyTensor | None, start: int, stop: int) -> Array | None:
    """The rows `start:stop` of `base`, as far as it has them; None if it has none of them."""
    last = min(stop, base.num_rows) if base else start
    return base.rows(start, last) if base and start < last else None


def predicted_rows(known: Array | None, dtype: DType, shape: tuple[int, ...]) -> Array:
    """What a difference is taken from: `known` rows of the base (or None) in `dtype`, and zeros beyond them."""
    if known is not None and known.dtype == dtype.numpy and known.shape == shape:
        return known
    rows = np.zeros(shape, dtype.numpy)
    if known is not None:
        rows[: len(known)] = _as_type(known, dtype)
    return rows


def _as_type(rows: Array, dtype: DType) -> Array:
    """Rounded to nearest even; NaN becomes 0, because the bits of a converted NaN depend on the machine."""
    if rows.dtype == dtype.numpy:
        return rows
    with np.errstate(all="ignore"):
        cast = rows.astype(dtype.numpy)
    cast[np.isnan(rows)] = 0
    return cast


VERSION = 1


def plan_exact(base: Checkpoint, tuned: Checkpoint, max_shard_size: str | int) -> Plan:
    """The files of an exact delta; reads no weights. UnsupportedInput if a new tensor's rows are too large to pack."""
    whole = plan_checkpoint(tuned, max_shard_size)
    predicted = {name: _predicted(name, tensor, base) for name, tensor in tuned.items()}
    # the tensors of a shard in groups that fit into one index
    shards = [list(shard.tensors.items()) for shard in whole.shards]
    groups = [
        dict(shard[first : first + TENSORS_LIMIT]) for shard in shards for first in range(0, len(shard), TENSORS_LIMIT)
    ]
    count = len(groups)
    names = ["delta.zst"] if count == 1 else [f"delta-{number:05}-of-{count:05}.zst" for number in range(1, count + 1)]
    container = partial(frame_pieces, predicted)
    files = tuple(Shard(name, group, container) for name, group in zip(names, groups, strict=True))
    content = {
        "delta": "exact",
        "version": VERSION,
        "base": base.path.absolute().name,
        "files": names,
        "tensors": len(tuned),
        "removed": sorted(name for name in base if name not in tuned),
    }
    small = {**tuned.side_files, "config.json": json_bytes(tuned.config), DELTA_FILE: json_bytes(content)}
    return Plan(tuned, files, small)


def _predicted(name: str, tensor: LazyTensor, base: Checkpoint) -> PredictedTensor:
    """A difference from the tensor of the same name; a new head from the embedding that it was tied to."""
    embedding = find_embedding(base)
    source = embedding if name == HEAD and name not in base and embedding else name
    if source in base and can_predict(base[source], tensor.dtype, tensor.shape):
        return PredictedTensor(tensor, source, base[source])
    if prod(tensor.shape[1:]) * tensor.dtype.itemsize > NEW_ROW_LIMIT:
        raise UnsupportedInput(
            f"`{name}` is new, and one row of it has more than {NEW_ROW_LIMIT:,} bytes",
            hint="publish the tuned model as it is",
        )
    return PredictedTensor(tensor)


@dataclass(frozen=True)
class ExactDelta:
    """An opened exact delta: the tuned model's tensors, in order, config and side files, and the base's folder name."""

    path: Path
    stored: Mapping[str, DeltaTensor]
    base_name: str
    config: dict[str, object]
    side_files: Mapping[str, bytes]

    def over(self, base: Checkpoint) -> Checkpoint:
        """The tuned model; InputRefused for keys, shapes, dtypes of another base, whose rows are checked later."""
        sources = self._sources()
        if missing := [name for name in sources if name not in base]:
            raise self.other_base(f"{len(missing)} missing keys: {listing(missing)}")
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in base.items()}
        if odd := [name for name, source in sources.items() if kinds[name] != (source.dtype, source.shape)]:
            raise self.other_base(f"{len(odd)} tensors have another shape or dtype: {listing(odd)}")
        tensors = {
            name: one.over(base[one.base.name] if one.base else None, self.other_base)
            for name, one in self.stored.items()
        }
        code = without_code(self.config)[1]
        contained = any(name.endswith(".py") for name in self.side_files)
        note = f"the configuration refers to code, in {listing(code)}; the delta contains none"
        warnings = (note,) if code and not contained else ()
        return replace(
            base, format="hf", tensors=tensors, config=self.config, side_files=self.side_files, warnings=warnings
        )

    def check_base(self, base: Checkpoint, *, whole: bool) -> None:
        """InputRefused, listing tensors with another sha256: of all (`whole`), or those partly read by `over`."""
        sources = self._sources()
        if not whole:
            cut = {one.base.name for one in self.stored.values() if one.base and one.shape[:1] < one.base.shape[:1]}
            sources = {name: sources[name] for name in cut}
        # the names of the base's tensors with another sha256
        digests = prefetch(partial(_sha256, base[name]) for name in sources)
        if different := [name for name, digest in zip(sources, digests, strict=True) if digest != sources[name].sha256]:
            raise self.other_base(f"{len(different)} of {len(sources)} tensors have other values: {listing(different)}")

    def _sources(self) -> dict[str, BaseTensor]:
        return {one.base.name: one.base for one in self.stored.values() if one.base}

    def other_base(self, problem: str) -> InputRefused:
        """The error for a base that is not the delta's."""
        return InputRefused(
            f"the base is not the one that `{self.path.absolute().name}` was made from: {problem}",
            hint=f"give the model that the delta was extracted from (its folder was called `{self.base_name}`)",
        )


def _sha256(tensor: LazyTensor) -> str:
    digest = hashlib.sha256()
    for block in tensor.blocks():
        digest.update(as_bytes(tensor.rows(*block)))
    return digest.hexdigest()


def open_exact(folder: Path) -> ExactDelta:
    """Opens an exact delta by its indices; UnsupportedInput: a later version, MalformedInput: damaged or mixed."""
    content = read_json(folder / DELTA_FILE)
    if content.get("delta") != "exact" or content.get("version") != VERSION:
        raise UnsupportedInput(
            f"`{folder.name}` is a delta of version {short(content.get('version'))!r}, this llmconv reads {VERSION}",
            hint="apply it with a later llmconv",
        )
    files, stored = content.get("files"), dict[str, DeltaTensor]()
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise MalformedInput(f"`{DELTA_FILE}` does not list its files", hint="copy the delta again")
    for name in files:
        if not (folder / name).is_file():
            raise MalformedInput(f"`{name}` is missing from `{folder}`", hint="copy the delta again")
        more = open_frames(folder / name)
        if doubled := sorted(stored.keys() & more.keys()):
            raise MalformedInput(f"duplicate keys in `{name}`: {listing(doubled)}", hint="copy the delta again")
        stored |= more
    if len(stored) != content.get("tensors"):
        raise MalformedInput(
            f"`{folder.name}` contains {len(stored)} tensors, expected {short(content.get('tensors'), 20)}",
            hint="files of different deltas are mixed; copy the delta again",
        )
    if not (folder / "config.json").is_file():
        raise MalformedInput(f"`config.json` is missing from `{folder}`", hint="copy the delta again")
    base_name = str(content.get("base"))[:200]
    config, side_files = read_json(folder / "config.json"), {**read_side_files(folder), **sentence_files(folder)}
    with suppress(MalformedInput):  # code that is elsewhere, or not to be copied
        side_files |= code_of(folder, config, side_files)
    return ExactDelta(folder, stored, base_name, config, side_files)


# Small differences are mostly noise: level 3 searches it for repeats, takes four times as long and packs less
LEVEL = 1
# Bytes of an index, which is read whole; tensors of a file, a number that keeps the index far smaller
INDEX_LIMIT, TENSORS_LIMIT = 32 << 20, 40_000
# Bytes of a row (an expert of a fused weight) that the base does not have: a frame could unpack to anything
NEW_ROW_LIMIT = 256 << 20
MAGIC, TAIL = 0x184D2A5E, b"LLMDELTA"
END = struct.Struct("<Q8s")


@dataclass(frozen=True)
class PredictedTensor:
    """A tensor of the tuned model, and the base's tensor (`name` empty: none) that it is a difference from."""

    tensor: LazyTensor
    name: str = ""
    base: LazyTensor | None = None


def frame_pieces(predicted: Mapping[str, PredictedTensor], tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a file with `tensors`, in order: frames, computed ahead by several threads, then the index."""
    entries = {name: _Entry(predicted[name]) for name in tensors}
    spans = [(name, *span) for name in tensors for span in predicted[name].tensor.blocks()]
    blocks = prefetch(partial(_packed, predicted[name], start, stop) for name, start, stop in spans)
    for name, _, _ in spans:
        yield partial(lambda name, crcs: entries[name].add(*next(blocks)), name)

    def index(_: object) -> bytes:
        text = json.dumps({"tensors": {name: entry.content() for name, entry in entries.items()}}).encode()
        frame = text + END.pack(len(text), TAIL)
        return struct.pack("<II", MAGIC, len(frame)) + frame

    yield index


class _Entry:
    """The index entry of a tensor, built while its blocks pass in order."""

    def __init__(self, predicted: PredictedTensor) -> None:
        tensor, base = predicted.tensor, predicted.base
        height = next(tensor.blocks(), (0, 1))[1]
        self._known = {"name": predicted.name, "dtype": base.dtype.name, "shape": list(base.shape)} if base else {}
        self._blocks: list[list[int]] = []
        self._digest = hashlib.sha256()
        self._base, self._rows = base, tensor.num_rows
        self._content = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "rows": height, "base": None}

    def add(self, frame: bytes, crcs: tuple[int, int], known: Array | None) -> bytes:
        """Records the next block, as `_packed` returns it, and returns its frame."""
        self._blocks.append([len(frame), *crcs])
        if known is not None:
            self._digest.update(as_bytes(known))
        return frame

    def content(self) -> dict[str, Any]:
        """The entry, once all blocks have passed; its sha256 includes rows of the base that the tuned model lacks."""
        if self._base is None:
            return {**self._content, "blocks": self._blocks}
        for start, stop in self._base.blocks():
            if stop > self._rows:
                self._digest.update(as_bytes(self._base.rows(max(start, self._rows), stop)))
        return {**self._content, "base": {**self._known, "sha256": self._digest.hexdigest()}, "blocks": self._blocks}


def _packed(predicted: PredictedTensor, start: int, stop: int) -> tuple[bytes, tuple[int, int], Array | None]:
    """A block: its frame, empty where nothing changed; CRC-32 of the tuned and the base's rows; the base's rows."""
    rows, known = predicted.tensor.rows(start, stop), known_rows(predicted.base, start, stop)
    guess = predicted_rows(known, predicted.tensor.dtype, rows.shape)
    crcs = crc32(as_bytes(rows)), crc32(as_bytes(known)) if known is not None else 0
    if np.array_equal(rows.reshape(-1).view(np.uint8), guess.reshape(-1).view(np.uint8)):
        return b"", crcs, known
    content = byte_planes(ulp_differences(rows, guess))
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(content.data), crcs, known


# Sizes of a block, which is held in memory; only blocks of one row may be larger, and of all rows smaller
BLOCK_LIMIT, BLOCK_LEAST = 16 * BLOCK_BYTES, BLOCK_BYTES // 4
SKIPPED = struct.Struct("<II")


OtherBase = Callable[[str], InputRefused]


@dataclass(frozen=True)
class BaseTensor:
    """The base's tensor that a difference is taken from: its name, and its expected dtype, shape and sha256."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a tensor: position and size of their frame in bytes, CRC-32 of the tuned rows and of the base's."""

    position: int
    size: int
    crc: int
    base_crc: int


@dataclass(frozen=True)
class DeltaTensor:
    """A tuned tensor in a delta file, as a difference from `base` (None: zeros), in `blocks` of `rows` rows each."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    rows: int
    blocks: tuple[RowBlock, ...]
    base: BaseTensor | None

    def over(self, base: LazyTensor | None, other_base: OtherBase) -> LazyTensor:
        """The tuned tensor; if no row changed, the base's own tensor with its expected checksum.

        `base` is the base's tensor `self.base.name`; `other_base` makes the error for a wrong base from a description.

        Raises (when rows are read):
            InputRefused: the base is not the one that the delta was made from.
            MalformedInput: a damaged frame, or a wrong checksum of the tuned rows.
        """
        if self.base and isinstance(base, FileTensor) and not base.record and self._keeps(base):
            refusal = partial(other_base, f"`{self.base.name}` has other values")
            record = ChecksummedRange(base.path, self.base.name, base.offset, base.nbytes, self._base_crc(), refusal)
            return FileTensor(base.path, base.offset, base.dtype, base.shape, record)
        return LazyTensor(self.dtype, self.shape, partial(self._load, base, other_base))

    def _keeps(self, base: LazyTensor) -> bool:
        """Whether there are rows, and all of them equal the base's."""
        with_differences = any(block.size or block.crc != block.base_crc for block in self.blocks)
        return bool(base.nbytes) and (self.dtype, self.shape) == (base.dtype, base.shape) and not with_differences

    def _base_crc(self) -> int:
        """CRC-32 of all rows of the base, which has as many."""
        row, height = prod(self.shape[1:]) * self.dtype.itemsize, self.shape[0] if self.shape else 1
        sizes = [min(self.rows, height - first) * row for first in range(0, height, self.rows)]
        blocks = zip((block.base_crc for block in self.blocks), sizes, strict=True)
        return reduce(lambda crc, block: combine(crc, *block), blocks, 0)

    def _load(self, base: LazyTensor | None, other_base: OtherBase, start: int, stop: int) -> Array:
        parts = []
        for number in range(start // self.rows, -(-stop // self.rows)):
            first = number * self.rows
            last = min(first + self.rows, self.shape[0] if self.shape else 1)
            known = known_rows(base, first, last)
            if known is not None and self.base and crc32(as_bytes(known)) != self.blocks[number].base_crc:
                raise other_base(f"`{self.base.name}` has other values")
            block = self._restored(self.blocks[number], known, (last - first, *self.shape[1:]))
            parts.append(block[max(0, start - first) : stop - first])
        if not parts:
            return np.empty((0, *self.shape[1:]), self.dtype.numpy)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _restored(self, block: RowBlock, known: Array | None, shape: tuple[int, ...]) -> Array:
        rows = predicted_rows(known, self.dtype, shape)
        if block.size:
            content = self._unpacked(block.position, block.size, prod(shape) * self.dtype.itemsize)
            # the reverse of `byte_planes`; the length of `content` is a multiple of `itemsize`
            first, *others = np.frombuffer(content, np.uint8).reshape(self.dtype.itemsize, -1)
            steps = first.astype(f"<u{self.dtype.itemsize}")
            for plane in others:
                steps <<= 8
                steps |= plane
            rows = with_differences(rows, np.asarray(steps))
        crc = block.base_crc if rows is known else crc32(as_bytes(rows))  # the base's rows are already checked
        if crc != block.crc:
            _refuse(self.path, "has a wrong checksum of the tuned rows")
        return rows

    def _unpacked(self, position: int, size: int, expected: int) -> bytes:
        frame = bytearray(size)
        read_into(self.path, memoryview(frame), position)
        try:
            if zstandard.frame_content_size(frame) != expected:
                _refuse(self.path, "has a frame of another size than its rows")
            return zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise MalformedInput(
                f"`{self.path.name}` has a damaged frame: {error}", hint="copy the delta again"
            ) from error


def open_frames(path: Path) -> dict[str, DeltaTensor]:
    """The tensors of one file of an exact delta, in order; reads only its index (MalformedInput if inconsistent)."""
    end, text = _index_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        _refuse(path, "has an index that is not valid JSON")
    entries = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        _refuse(path, "has an index without tensors")
    tensors: dict[str, DeltaTensor] = {}
    position = 0
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not name or len(name) > NAME_LIMIT or not name.isprintable():
            _refuse(path, f"has an impossible entry for {name[:40]!r}")
        tensors[name] = _stored(path, name, entry, position)
        position += sum(block.size for block in tensors[name].blocks)
    if position != end:
        _refuse(path, f"describes {position} bytes of frames, it has {end}")
    return tensors


def _index_text(path: Path) -> tuple[int, bytes]:
    """The position of the index, and its JSON."""
    size = path.stat().st_size
    with open_source(path) as file:
        file.seek(max(0, size - END.size))
        last = file.read(END.size)
        length, tail = END.unpack(last) if len(last) == END.size else (0, b"")
        begin = size - END.size - length - SKIPPED.size
        if tail != TAIL or length > INDEX_LIMIT or begin < 0:
            _refuse(path, "has no index at its end")
        file.seek(begin)
        if SKIPPED.unpack(file.read(SKIPPED.size)) != (MAGIC, length + END.size):
            _refuse(path, "has no index at its end")
        return begin, file.read(length)


def _stored(path: Path, name: str, entry: Mapping[str, Any], position: int) -> DeltaTensor:
    dtype, shape = _kind(path, name, entry)
    rows, blocks, base = entry.get("rows"), entry.get("blocks"), entry.get("base")
    if not _natural(rows) or not rows or not isinstance(blocks, list):
        _refuse(path, f"has no blocks for `{name}`")
    row, height = prod(shape[1:]) * dtype.itemsize, shape[0] if shape else 1
    if (rows > 1 and rows * row > BLOCK_LIMIT) or (base is None and row > NEW_ROW_LIMIT):
        _refuse(path, f"has blocks of {rows} rows for `{name}`, which is too large")
    if rows < height and rows * max(1, row) < BLOCK_LEAST:
        _refuse(path, f"has blocks of {rows} rows for `{name}`, which is too small")
    count = -(-height // rows)
    known = all(isinstance(block, list) and len(block) == 3 and all(map(_natural, block)) for block in blocks)
    if not known or len(blocks) != count:
        _refuse(path, f"has {len(blocks)} blocks for `{name}`, its shape needs {count}")
    starts = accumulate((block[0] for block in blocks), initial=position)
    placed = tuple(RowBlock(start, *block) for start, block in zip(starts, blocks, strict=False))
    return DeltaTensor(path, dtype, shape, rows, placed, _source(path, name, base, dtype, shape))


def _source(path: Path, name: str, base: Any, dtype: DType, shape: tuple[int, ...]) -> BaseTensor | None:
    if base is None:
        return None
    if not isinstance(base, dict) or not isinstance(base.get("name"), str) or not isinstance(base.get("sha256"), str):
        _refuse(path, f"has an invalid base tensor for `{name}`")
    source = BaseTensor(base["name"], *_kind(path, base["name"], base), base["sha256"])
    if not can_predict(LazyTensor(source.dtype, source.shape, lambda start, stop: np.empty(0)), dtype, shape):
        _refuse(path, f"stores `{name}` as the difference from a tensor of another kind")
    return source


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in BY_NAME:
        _refuse(path, f"stores `{name[:NAME_LIMIT]}` as unknown dtype {short(dtype)!r}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not all(map(_natural, shape)) or prod(shape) > 1 << 62:
        _refuse(path, f"gives `{name[:NAME_LIMIT]}` an impossible shape")
    return BY_NAME[dtype], tuple(shape)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="the delta is damaged; copy it again")
