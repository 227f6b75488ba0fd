"""PaddleNLP's weights: `.pdparams`, read lazily and written as a stream, and safetensors; whole, sharded, per rank.

Layout (paddle `framework/io.py`, `framework/io_utils.py`): one pickle of a dict of name to numpy array, of protocol 2
to 4, and under `StructuredToParameterName@@` a table of names that is not needed. bfloat16 is stored as uint16.
Protocol 2 stores bytes as UTF-8 text (`_codecs.encode(text, "latin1")`), where those from 0x80 on take two, so
positions are found by counting characters; counts are kept per chunk. Files are written as one pickle of protocol 4,
whose arrays may have any size. numpy 1 and 2 both find `numpy.core.multiarray`.

Names from paddlenlp `utils/env.py` and `transformers/model_utils.py`: `model_state.pdparams`,
`model_state-00001-of-00005.pdparams` with an index, `model_state.tp00_pp00.pdparams`, and the safetensors ones:
`model.safetensors`, shards with an index, `model.tp00_pp00.safetensors`.
"""

from __future__ import annotations

import mmap
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.checkpoint import INDEX, SINGLE, indexed_shards
from llmconv.convert.algebra import concat, replicated, reshaped
from llmconv.convert.formats.paddle.names import FAMILIES
from llmconv.convert.state_dicts.files import header_of, joined, numbered, open_safetensors
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import STRING_LIMIT, PickleHooks, PickleMachine, Stub, text
from llmconv.files.pickle_reader import HOOKS, RANK_LIMIT, Global, interpret
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.files.shard_index import require_listed
from llmconv.files.source_file import FileProblem, open_source, read_into
from llmconv.files.torch_writer import PickledCall, PickledName, pickle_pieces
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, Piece

KEPT_BYTES = 1024  # longer values are not read; only their position is kept
HEAD_BYTES = 1 << 20
PARAMETER_NAMES = "StructuredToParameterName@@"
# Before protocol 4 arrays over 2^30 - 1 bytes are split: `{name: {"OriginShape": sizes, "slices": [names]}}`
SPLIT_ARRAYS = "UnpackBigParamInfor@@"
TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

NUMPY_CODES = {dtype.numpy.str[1:]: dtype for dtype in BY_NAME.values() if dtype.numpy.kind in "fiub"}
NUMPY_CODES["u2"] = BY_NAME["bfloat16"]

MARKS = (b"multiarray", b"_frombuffer")
RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")


@dataclass(frozen=True, eq=False)
class BytesAt:
    """A long value that was left in the file; `encoded` if it is UTF-8 text, one character per byte (protocol 2)."""

    position: int
    size: int
    encoded: bool


class _FilePickleMachine(PickleMachine):
    """A pickle machine over a mapped file that skips long values."""

    def sized(self, count: int, decode: Callable[[bytes], Any], limit: int) -> Any:
        if count <= KEPT_BYTES or limit < STRING_LIMIT:
            return super().sized(count, decode, limit)
        value = BytesAt(self.position, count, decode is text)
        self.position += count
        self.skipped += count
        if self.position > len(self.data):
            raise FileProblem(f"is truncated: it ends at byte {len(self.data)}")
        return value


def is_pdparams(path: Path) -> bool:
    """Whether `path` is a pickle (protocol 2 to 5) with numpy arrays at its beginning."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        head = file.read(HEAD_BYTES)
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return is_pickle and not head.startswith(TORCH_MAGIC) and any(mark in head for mark in MARKS)


def open_pdparams(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file that `paddle.save` wrote, in file order, without its other values; reads no tensor data.

    Raises MalformedInput if it is truncated, hostile or contradictory, UnsupportedInput for an element type or byte
    order that safetensors does not have.
    """
    if path.stat().st_size == 0:
        raise MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        content = interpret(_FilePickleMachine(data, PickleHooks(_name, _call, HOOKS.refer)), path.name)
    if not isinstance(content, dict):
        raise MalformedInput(
            f"`{path.name}` is not a state dict", hint="save the model's `state_dict()` with `paddle.save`"
        )
    tensors: dict[str, LazyTensor] = {}
    for key, value in content.items():
        name = key if isinstance(key, str) else f"({type(key).__name__})"
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
            value = value[1]  # (name, array), as in nested objects
        if _made_by(value) in (*RECONSTRUCT, *FROM_BUFFER):
            tensors[name] = _tensor(path, name, value)
    return _joined(path, tensors, content.get(SPLIT_ARRAYS, {}))


def _name(module: str, name: str) -> Any:
    if name == "eval" and module in ("builtins", "__builtin__"):
        return Global(module, name)  # inert; `_call` checks its arguments
    return HOOKS.name(module, name)


def _call(function: Any, args: tuple[Any, ...]) -> Any:
    """As `HOOKS.call`, plus the two calls with which paddle stores tensors inside other objects."""
    match str(function) if isinstance(function, Global) else "", args:
        case (("builtins.eval" | "__builtin__.eval"), ("data", {"data": Stub() as array})):
            return array  # paddle's spelling of a static tensor: the array itself
        case (("builtins.eval" | "__builtin__.eval"), _):
            return HOOKS.name("builtins", "eval")  # raises
        case (("builtins.tuple" | "__builtin__.tuple"), ((tuple() | list()) as items,)):
            return tuple(items)
        case "_codecs.encode", (BytesAt() as value, "latin1"):
            return value
    return HOOKS.call(function, args)


def _made_by(value: Any) -> str:
    """The name of the function that a Stub would have called; empty for anything else."""
    return str(value.function) if isinstance(value, Stub) and isinstance(value.function, Global) else ""


def _tensor(path: Path, name: str, array: Stub) -> LazyTensor:
    if _made_by(array) in FROM_BUFFER:
        state = (*array.args, None, None, None)
        data, kind, shape, column_major = state[0], state[1], state[2], state[3] == "F"
    else:
        match array.state:
            case (_, shape, kind, column_major, data):
                pass
            case _:
                _refuse(path, f"contains no data for `{name}`")
    dtype = _dtype(path, name, kind)
    if not isinstance(shape, tuple) or not _are_sizes(shape):
        _refuse(path, f"has an invalid shape for `{name}`")
    if column_major and len(shape) > 1:
        raise UnsupportedInput(
            f"`{name}` in `{path.name}` is stored in column-major order, which is unsupported",
            hint="save it with `np.ascontiguousarray`",
        )
    expected = prod(shape) * dtype.itemsize
    if isinstance(data, str):
        data = data.encode("latin1", "replace")
    if isinstance(data, BytesAt) and data.encoded:
        if not expected <= data.size <= 2 * expected:
            _refuse(path, f"has {data.size} characters for `{name}`, expected {expected} bytes for its shape")
        return Utf8Bytes(path, data.position, data.size).tensor(dtype, shape)
    size = data.size if isinstance(data, BytesAt) else len(data) if isinstance(data, bytes) else -1
    if size != expected:
        _refuse(path, f"has {size} bytes for `{name}`, expected {expected} for its shape")
    if isinstance(data, BytesAt):
        return FileTensor(path, data.position, dtype, shape)
    rows = np.frombuffer(data, dtype.numpy).reshape(shape or (1,))
    return LazyTensor(dtype, shape, lambda start, stop: rows[start:stop])


def _are_sizes(values: Any) -> bool:
    return len(values) <= RANK_LIMIT and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _dtype(path: Path, name: str, kind: Any) -> DType:
    code, order = None, "|"
    if _made_by(kind) == "numpy.dtype" and kind.args:
        code = kind.args[0]
        order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else order
    if not isinstance(code, str) or code not in NUMPY_CODES or order not in ("<", "|"):
        shown = f"`{order}{code}`" if isinstance(code, str) and isinstance(order, str) else "a compound type"
        raise UnsupportedInput(
            f"`{name}` in `{path.name}` has an unsupported element type: {shown[:40]}",
            hint="only little-endian floats, integers and bools can be converted",
        )
    return NUMPY_CODES[code]


def _joined(path: Path, tensors: dict[str, LazyTensor], table: Any) -> dict[str, LazyTensor]:
    """Joins the tensors that were split (`name@@.0`, `name@@.1`, …)."""
    joined = dict(tensors)
    for name, entry in table.items() if isinstance(table, dict) else ():
        match entry:
            case {"OriginShape": (tuple() | list()) as sizes, "slices": (tuple() | list()) as pieces} if _are_sizes(
                sizes
            ):
                parts = [joined.pop(piece, None) for piece in pieces if isinstance(piece, str)]
                present = [part for part in parts if part is not None and len(part.shape) == 1]
                if not parts or len(present) != len(parts):
                    _refuse(path, f"lacks parts of `{name}`, which is split into {len(parts)}")
                flat, needed = concat(present, 0), prod(sizes)
                if flat.shape[0] != needed:
                    _refuse(path, f"has {flat.shape[0]} elements for `{name}`, expected {needed} for its shape")
                joined[str(name)] = reshaped(flat, tuple(sizes))
            case _:
                _refuse(path, f"has no valid description of the parts of `{name}`")
    return joined


def _refuse(path: Path, problem: str) -> NoReturn:
    raise MalformedInput(f"`{path.name}` {problem}", hint="the file is damaged or hostile; copy it again")


def as_bfloat16(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file; uint16 becomes bfloat16, as Paddle means it."""
    bfloat16 = BY_NAME["bfloat16"]
    return {
        name: FileTensor(tensor.path, tensor.offset, bfloat16, tensor.shape)
        if isinstance(tensor, FileTensor) and tensor.dtype.name == "uint16"
        else tensor
        for name, tensor in tensors.items()
    }


CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Utf8Bytes:
    """The text: `size` bytes of UTF-8 from `position` of a file."""

    path: Path
    position: int
    size: int

    def tensor(self, dtype: DType, shape: tuple[int, ...]) -> LazyTensor:
        """The bytes as a row-major tensor; their number is checked at the first read."""
        row = prod(shape[1:]) * dtype.itemsize

        def load(start: int, stop: int) -> Array:
            if self._counts[-1] != prod(shape) * dtype.itemsize:
                raise self._damaged()
            flat = np.frombuffer(self._range(start * row, stop * row), dtype.numpy)
            return flat.reshape(stop - start, *shape[1:])

        return LazyTensor(dtype, shape, load)

    @cached_property
    def _counts(self) -> list[int]:
        """Number of characters before each chunk, and in total."""
        chunks = (self._chunk(start, start + CHUNK_BYTES) for start in range(0, self.size, CHUNK_BYTES))
        # a character begins with any byte but 0x80 to 0xBF
        begin = ((np.frombuffer(chunk, np.uint8) & 0xC0) != 0x80 for chunk in chunks)
        return list(accumulate((int(np.count_nonzero(found)) for found in begin), initial=0))

    def _range(self, start: int, stop: int) -> bytes:
        """Bytes `start:stop` of the decoded text."""
        if start == stop:
            return b""
        first = bisect_right(self._counts, start) - 1
        last = bisect_right(self._counts, stop - 1)
        raw = self._chunk(first * CHUNK_BYTES, last * CHUNK_BYTES + 1)
        whole = raw[int(_continues(raw[:1])) : len(raw) - (last * CHUNK_BYTES < self.size and not _continues(raw[-1:]))]
        try:
            decoded = whole.decode().encode("latin1")
        except ValueError as error:
            raise self._damaged() from error
        return decoded[start - self._counts[first] : stop - self._counts[first]]

    def _chunk(self, start: int, stop: int) -> bytes:
        buffer = bytearray(min(stop, self.size) - start)
        read_into(self.path, memoryview(buffer), self.position + start)
        return bytes(buffer)

    def _damaged(self) -> MalformedInput:
        return MalformedInput(
            f"`{self.path.name}` has text at byte {self.position} that does not decode to the bytes of its tensor",
            hint="the file is damaged or hostile; copy it again",
        )


def _continues(data: bytes) -> bool:
    return bool(data) and data[0] & 0xC0 == 0x80


CODES = {dtype.name: code for code, dtype in NUMPY_CODES.items() if not dtype.name.startswith("float8")}
RECONSTRUCT_CALL = PickledName("numpy.core.multiarray", "_reconstruct")
EMPTY_ARRAY = (PickledName("numpy", "ndarray"), (0,), b"b")
VERSION = 1


def pdparams_pieces(tensors: Mapping[str, LazyTensor]) -> Iterator[Piece]:
    """The pieces of a `.pdparams` file, in order; UnsupportedInput if numpy (as paddle uses it) lacks a dtype."""
    arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
    # the table gives each parameter its name in the running program; only `paddle.load` reads it
    return pickle_pieces({**arrays, PARAMETER_NAMES: {name: name for name in tensors}}, protocol=4)


def _array(name: str, tensor: LazyTensor) -> PickledCall:
    """A numpy array, as numpy pickles it: `(version, shape, dtype, column_major, bytes)`."""
    if tensor.dtype.name not in CODES:
        raise UnsupportedInput(
            f"`{name}` is {tensor.dtype.name}, which is unsupported in Paddle's files", hint="give `--dtype bfloat16`"
        )
    order = "<" if tensor.dtype.itemsize > 1 else "|"
    dtype = PickledCall(
        PickledName("numpy", "dtype"), (CODES[tensor.dtype.name], False, True), (3, order, None, None, None, -1, -1, 0)
    )
    return PickledCall(RECONSTRUCT_CALL, EMPTY_ARRAY, (VERSION, tensor.shape, dtype, False, tensor))


WHOLE = "model_state.pdparams"
PADDLE_INDEX = "model_state.pdparams.index.json"
RANK = re.compile(
    r"(?:model_state\.(?=.*\.pdparams)|model\.(?=.*\.safetensors))"
    r"(?:tp(\d{2,3}))?_?(?:pp(\d{2,3}))?\.(?:pdparams|safetensors)"
)
SHARD = re.compile(r"model_state-\d+-of-\d+\.pdparams")
ADAPTER_FILES = re.compile(
    r"(lora|prefix)_model_state(?:\.[tp\d_]+|-\d+-of-\d+)?\.pdparams|peft_model(?:-\d+-of-\d+)?\.safetensors"
)

SAFETENSORS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors")

PREFIXES = tuple(family.prefix for family in FAMILIES.values())
OTHERS = ("model.", "transformer.")


def has_pdparams(folder: Path) -> bool:
    """Whether a folder contains weights, or an adapter, under PaddleNLP's file names."""
    kinds = (RANK, SHARD, ADAPTER_FILES)
    names = [entry.name for entry in folder.iterdir()]
    return any(name in (WHOLE, PADDLE_INDEX) or any(kind.fullmatch(name) for kind in kinds) for name in names)


def weight_files(path: Path) -> list[Path]:
    """The files with the weights (or an adapter): `path` itself, or those in the folder `path`."""
    if path.is_file():
        return [path]
    patterns = (RANK, SHARD, ADAPTER_FILES, SAFETENSORS)
    return [entry for entry in sorted(path.iterdir()) if any(pattern.fullmatch(entry.name) for pattern in patterns)]


def peek(path: Path) -> Mapping[str, LazyTensor]:
    """The tensors of every file under their own names; InputRefused if a file is malformed."""
    files = weight_files(path)
    read = {file.name: read_header(file).tensors for file in files if file.suffix == ".safetensors"}
    return joined({**read, **{file.name: open_pdparams(file) for file in files if file.name not in read}})


def names_paddle(path: Path) -> bool:
    """Whether safetensors have Paddle's names, or metadata `np` and its config; PaddleFormers' have neither."""
    # metadata and tensor names of a safetensors file, or the first in a folder; empty if none is readable
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
    file = next((entry for entry in files if entry.is_file()), None)
    try:
        header = header_of(file) if file else None
    except (LlmconvError, OSError):
        header = None
    metadata, names = (header.metadata, list(header.tensors)) if header else ({}, [])
    if any(name.startswith(PREFIXES) for name in names):
        return True
    if any(name.startswith(OTHERS) for name in names):
        return False
    config = (path if path.is_dir() else path.parent) / "config.json"
    return metadata.get("format") == "np" and config.is_file() and b'"paddlenlp_version"' in config.read_bytes()


def open_ranks(path: Path, config: Mapping[str, Any]) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each tensor-parallel rank, with pipeline stages joined; one mapping if nothing is split.

    `path` is a folder, or one `.pdparams` or safetensors file. Raises InputRefused if there are no weights, or more
    than one kind of weight files, MalformedInput as `open_rank_files`.
    """
    if path.is_file():
        if RANK.fullmatch(path.name) or SHARD.fullmatch(path.name):
            raise InputRefused(f"`{path.name}` is one of several files", hint="give the folder that contains all")
        return [_state(path)]
    ranks, safe_ranks = _rank_files(path, ".pdparams"), _rank_files(path, ".safetensors")
    kinds = {
        WHOLE: (path / WHOLE).is_file(),
        PADDLE_INDEX: (path / PADDLE_INDEX).is_file(),
        "files of ranks": bool(ranks),
        "safetensors files of ranks": bool(safe_ranks),
        "safetensors": (path / SINGLE).is_file() or (path / INDEX).is_file() or bool(numbered(path)),
    }
    present = [kind for kind, found in kinds.items() if found]
    if len(present) > 1:
        raise InputRefused(
            f"`{path.name}` contains its weights more than once: {', '.join(present)}",
            hint="move the files that you do not want to another folder",
        )
    if not present:
        raise _no_weights(path)
    if ranks or safe_ranks:
        return open_rank_files(path, ranks or safe_ranks, config)
    if kinds["safetensors"]:
        return [as_bfloat16(open_safetensors(path))]
    if kinds[WHOLE]:
        return [_state(path / WHOLE)]
    shards = indexed_shards(path, PADDLE_INDEX, lambda name: bool(SHARD.fullmatch(name)))
    files = {shard: _state(path / shard) for shard in shards}
    require_listed(shards, files, PADDLE_INDEX, lambda shard, name: files[shard][name])
    return [{name: files[shard][name] for shard, listed in shards.items() for name in listed}]


def _rank_files(folder: Path, suffix: str) -> dict[tuple[int, int], Path]:
    return {
        (int(match[1] or 0), int(match[2] or 0)): entry
        for entry in folder.iterdir()
        if (match := RANK.fullmatch(entry.name)) and (match[1] or match[2]) and entry.suffix == suffix
    }


def _no_weights(folder: Path) -> InputRefused:
    if any(SHARD.fullmatch(entry.name) for entry in folder.iterdir()):
        return MalformedInput(f"`{folder.name}` has shards, but no `{PADDLE_INDEX}`", hint="copy the index too")
    if list(folder.glob("master_weights*.safetensors")):
        return UnsupportedInput(
            f"`{folder.name}` contains only the optimizer's copies of the weights (`master_weights`)",
            hint="save the model without `skip_save_model_weight`",
        )
    return InputRefused(f"`{folder.name}` contains no weights of PaddleNLP", hint=f"it needs `{WHOLE}` or its shards")


def _state(file: Path) -> Mapping[str, LazyTensor]:
    """The tensors of one `.pdparams` or safetensors file."""
    if not file.is_file():
        raise MalformedInput(f"`{file.name}` is missing from `{file.parent.name}`", hint="copy the folder again")
    if file.suffix == ".safetensors":
        return as_bfloat16(read_header(file).tensors)
    if not is_pdparams(file):
        raise MalformedInput(
            f"`{file.name}` contains no arrays as `paddle.save` writes them",
            hint="copy it again from where it was saved",
        )
    tensors = open_pdparams(file)
    if any(name.endswith(("_moment1_0", "_moment2_0", "_pow_acc_0")) for name in tensors):
        raise UnsupportedInput(f"`{file.name}` is the state of an optimizer", hint=f"give the model's `{WHOLE}`")
    return tensors


def open_rank_files(
    folder: Path, files: Mapping[tuple[int, int], Path], config: Mapping[str, Any]
) -> list[Mapping[str, LazyTensor]]:
    """Name to tensor of each tensor-parallel rank, the same names in all, with pipeline stages joined.

    `files` is by tensor-parallel rank and pipeline stage; `config` is Paddle's, whose `tensor_parallel_degree` shows
    whether the last ranks are missing. Raises MalformedInput if one is, or the files belong to different runs.
    """
    degree = config.get("tensor_parallel_degree")
    count = max(max(tp for tp, _ in files) + 1, min(degree, 1000) if type(degree) is int else 1)
    stages = max(pp for _, pp in files) + 1
    if missing := [(tp, pp) for tp in range(count) for pp in range(stages) if (tp, pp) not in files]:
        tp, pp = missing[0]
        raise MalformedInput(
            f"`{folder.name}` lacks the files of {len(missing)} of {count * stages} ranks, the first is tensor-parallel"
            f" {tp}, pipeline {pp}",
            hint="copy the missing files; all ranks are needed",
        )
    ranks = [_stages([files[tp, pp] for pp in range(stages)]) for tp in range(count)]
    for tp, rank in enumerate(ranks):
        if different := sorted(set(rank) ^ set(ranks[0])):
            raise MalformedInput(
                f"`{files[tp, 0].name}` and `{files[0, 0].name}` differ in {len(different)} tensors: "
                + listing(different),
                hint="the files belong to different runs; copy the folder again",
            )
    return ranks


def _stages(files: list[Path]) -> Mapping[str, LazyTensor]:
    """The tensors of all pipeline stages; a tensor in two stages (a tied embedding) must be equal in both."""
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        for name, tensor in _state(file).items():
            difference = MalformedInput(
                f"`{name}` of `{file.name}` differs from that of an earlier stage",
                hint="the files belong to different runs; copy the folder again",
            )
            first = tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise difference
            if first is not tensor:
                tensors[name] = replicated([first, tensor], difference)
    return tensors
