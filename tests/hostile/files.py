"""Files of the wrong kind: pipes, devices, links, foreign formats, and headers of safetensors, MindSpore and Paddle."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.case import CANARY, Case
from tests.hostile.configs import accessory_like
from tests.hostile.honest import (
    composer,
    members,
    message,
    meta,
    mindspore,
    mindspore_value,
    paddle,
    repacked,
    safetensors,
    varint,
)
from tests.hostile.pickles import call, text

Place = Callable[[Path], object]


def replaced(name: str, put: Place, refused: str, make: Callable[[Path], Path] = meta) -> Case:
    """A folder in which something else stands at the place of one file."""

    def build(folder: Path) -> Path:
        source = make(folder)
        (folder / name).unlink(missing_ok=True)
        put(folder / name)
        return source

    return Case(build, refused)


def alone(put: Place, refused: str, name: str = "x.pt") -> Case:
    """A path that is something else than a file of a checkpoint."""

    def build(folder: Path) -> Path:
        put(folder / name)
        return folder / name

    return Case(build, refused)


def instead_of(name: str, put: Place) -> Callable[[Path], None]:
    """Puts something else at the place of one file of a folder."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        put(folder / name)

    return change


def content(data: bytes, refused: str, name: str = "x.pt") -> Case:
    """A file of these bytes."""
    return alone(lambda path: path.write_bytes(data), refused, name)


def listen(path: Path) -> None:
    """A socket; bound by its name only, as paths of sockets are short."""
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def sparse(size: int) -> Place:
    """A file of zeros that takes no space."""

    def put(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return put


def with_tokenizer(folder: Path) -> Path:
    """Accessory's folder with the tokenizer of a Hugging Face model, whose files are copied as they are."""
    (folder / "tokenizer.json").write_text("{}")
    return accessory_like(folder)


def linked_pipe(path: Path) -> None:
    """A symbolic link to a pipe without a writer."""
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


def linked(target: str) -> Place:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def header(
    fields: dict[str, Any] | bytes, refused: str = r"safetensors", data: bytes = bytes(8), length: int | None = None
) -> Case:
    """A safetensors file; `inspect` refuses it for its header, to-hf because nothing claims it."""
    return content(safetensors(fields, data, length), "not of a training format", "x.safetensors")


def tensor(**changes: Any) -> dict[str, Any]:
    """A header of one tensor of two floats."""
    return {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def protobuf(more: bytes, refused: str | None) -> Case:
    """A MindSpore file with more bytes after an honest model."""
    return Case(lambda folder: mindspore(folder, more), refused, {"config": ["run.yaml"]})


def arrays(change: Callable[[bytes], bytes], refused: str | None) -> Case:
    """A Paddle folder whose pickle was changed."""
    return Case(lambda folder: paddle(folder, change), refused)


def more_arrays(value: bytes, refused: str | None) -> Case:
    """A Paddle state dict with one more value, made by these opcodes."""
    return arrays(lambda data: data[:-1] + text("evil") + value + b"s.", refused)


def index(content: Any, refused: str) -> Case:
    """A Paddle folder of safetensors with this index."""

    def build(folder: Path) -> Path:
        paddle(folder)
        (folder / "model_state.pdparams").rename(folder / "model_state-00001-of-00001.pdparams")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "model_state.pdparams.index.json").write_text(text)
        return folder

    return Case(build, refused)


def hugging_face(shards: Any) -> Case:
    """A Hugging Face folder whose index names odd shards; only `inspect` reads it."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "x.safetensors").write_bytes(safetensors(tensor(), bytes(8)))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        return folder

    return Case(build, "already is a Hugging Face model folder")


FEW = np.ones(2, np.float32)
NO_FILE = "not a regular file|not a torch file|not of a training format"
SHARD = "consolidated.00.pth"
UNKNOWN = "not of a training format"
LONG = struct.pack("<Q", 1 << 62)

CASES: dict[str, Case] = {
    "a pipe for a shard": replaced(SHARD, lambda path: os.mkfifo(path), NO_FILE),
    "a link to a pipe for a shard": replaced(SHARD, linked_pipe, NO_FILE),
    "a folder for a shard": replaced(SHARD, Path.mkdir, NO_FILE),
    "a socket for a shard": replaced(SHARD, listen, NO_FILE),
    "a link to /dev/zero for a shard": replaced(SHARD, linked("/dev/zero"), NO_FILE),
    "a link to /etc/passwd for a shard": replaced(SHARD, linked("/etc/passwd"), NO_FILE),
    "a link to nothing for a shard": replaced(SHARD, linked("nothing"), "cannot be read"),
    "a link to itself for a shard": replaced(SHARD, linked(SHARD), "cannot be read"),
    "an empty shard": replaced(SHARD, Path.touch, "not a torch file|empty"),
    "a pipe for params.json": replaced(
        "params.json", lambda path: os.mkfifo(path), "no `params.json`|not a regular file"
    ),
    "a folder for params.json": replaced("params.json", Path.mkdir, "no `params.json`|not a regular file"),
    "a link to /dev/zero for params.json": replaced(
        "params.json", linked("/dev/zero"), "no `params.json`|not a regular file"
    ),
    "params.json of 8 GB": replaced("params.json", sparse(8 << 30), "too large|not valid JSON"),
    "a tokenizer of 8 GB": replaced("tokenizer.model", sparse(8 << 30), "too large"),
    "a link to a key among the tokenizer's files": replaced(
        "vocab.txt", lambda path: path.symlink_to("/etc/hostname"), "leads out of the folder", with_tokenizer
    ),
    "a pipe": alone(lambda path: os.mkfifo(path), NO_FILE),
    "a socket": alone(listen, NO_FILE),
    "a link to /dev/zero": alone(linked("/dev/zero"), NO_FILE),
    "a link to a folder of the system": alone(linked("/usr/share"), UNKNOWN),
    "an empty folder": alone(Path.mkdir, "is an empty folder"),
    "an empty file": content(b"", "is empty"),
    "one byte": content(b"P", UNKNOWN),
    "zeros, 8 GB": alone(sparse(8 << 30), UNKNOWN),
    "PK and zeros, 8 GB": Case(lambda folder: pk(folder), "damaged"),
    "text": content(b"#!/bin/sh\nexit 1\n", UNKNOWN),
    "an ELF program": content(b"\x7fELF" + bytes(200), "a program"),
    "GGUF": content(b"GGUF\x03\0\0\0" + b"\xff" * 16, "declares"),
    "HDF5": content(b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5 file"),
    "ONNX": content(b"\x08\x0a\x12\x07pytorch\x3a\x00", UNKNOWN),
    "a raw pickle": content(b"\x80\x02" + call("os", "system", text(f"touch {CANARY}")) + b".", UNKNOWN),
    "the torch format before 1.6, cut off": content(
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.", "truncated or damaged"
    ),
    "a tar": content(bytes(257) + b"ustar" + bytes(300), "tar"),
    "a name with an escape sequence": content(b"x", UNKNOWN, "\x1b[2Jx.pt"),
    "a name with line breaks": content(b"x", UNKNOWN, "x\nhint: all is well.pt"),
    "a name that is not text": alone(
        lambda path: Path(os.fsdecode(os.fsencode(path))).write_bytes(b"x"), UNKNOWN, "x\udcff.pt"
    ),
    "safetensors: no header": content(b"", "is empty", "x.safetensors"),
    "safetensors: a header of 2^63 bytes": header(tensor(), length=1 << 63),
    "safetensors: a header longer than the file": header(tensor(), length=10_000),
    "safetensors: a header of no bytes": header(b""),
    "safetensors: no JSON": header(b"{'a': 1}"),
    "safetensors: a list": header(b"[]"),
    "safetensors: 100,000 deep": header(b"[" * 100_000),
    "safetensors: not a number as size": header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
    "safetensors: an infinite size": header(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}'),
    "safetensors: the same name twice": header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "safetensors: overlapping": header({**tensor(), "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
    "safetensors: a gap": header(tensor(data_offsets=[4, 12]), data=bytes(12)),
    "safetensors: bytes behind": header(tensor(), data=bytes(100)),
    "safetensors: negative offsets": header(tensor(data_offsets=[-8, 0])),
    "safetensors: offsets the wrong way round": header(tensor(data_offsets=[8, 0])),
    "safetensors: offsets of 2^63": header(tensor(data_offsets=[1 << 63, (1 << 63) + 8])),
    "safetensors: an unknown dtype": header(tensor(dtype="F33")),
    "safetensors: a dtype that is a list": header(tensor(dtype=["F32"])),
    "safetensors: a shape that overflows": header(tensor(shape=[1 << 40, 1 << 40])),
    "safetensors: a thousand axes": header(tensor(shape=[1] * 1000)),
    "safetensors: more fields": header(tensor(url="file:///etc/passwd")),
    "safetensors: metadata that is not a map": header({**tensor(), "__metadata__": [1]}),
    "safetensors: a name with an escape sequence": header({"\x1b[2J": tensor()["a.weight"]}),
    "safetensors: 100,000 tensors": header(
        {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(100_000)}, data=b""
    ),
    "safetensors: a number of 5000 digits": header(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'
    ),
    "index: a shard outside": hugging_face({"a.weight": "../x.safetensors"}),
    "index: an absolute shard": hugging_face({"a.weight": "/etc/passwd"}),
    "index: a shard that is a number": hugging_face({"a.weight": 7}),
    "index: a shard that is a list": hugging_face({"a.weight": ["x.safetensors"]}),
    "index: shards of several kinds": hugging_face({"a.weight": 7, "b.weight": "x.safetensors"}),
    "index: a tensor that is not there": hugging_face({"b.weight": "x.safetensors"}),
    "paddle index: a shard outside": index(
        {"weight_map": {"a": "../model_state-00001-of-00001.pdparams"}}, "invalid shard name"
    ),
    "paddle index: an absolute shard": index({"weight_map": {"a": "/etc/passwd"}}, "invalid shard name"),
    "paddle index: a list": index({"weight_map": ["x"]}, "no `weight_map`"),
    "paddle index: 100,000 deep": index("[" * 100_000, "not valid JSON"),
    "honest: mindspore": protobuf(b"", None),
    "mindspore: a length of 2^62": protobuf(b"\x0a" + varint(1 << 62), "of 4611686018427387904 bytes"),
    "mindspore: a number without an end": protobuf(b"\x0a" + b"\xff" * 20, "invalid number"),
    "mindspore: a group": protobuf(b"\x0b" * 100, "wire type"),
    "mindspore: an unknown field": protobuf(message(9, 1), "that is not a tensor"),
    "mindspore: a hundred thousand axes": protobuf(
        message(
            1,
            message(1, b"a.weight")
            + message(2, message(1, 1) * 100_000 + message(2, b"Float32") + message(3, bytes(4))),
        ),
        "more than 16 axes",
    ),
    "mindspore: packed axes of 1 MB": protobuf(
        message(
            1,
            message(1, b"a.weight")
            + message(2, message(1, b"\1" * (1 << 20)) + message(2, b"Float32") + message(3, bytes(4))),
        ),
        "list of",
    ),
    "mindspore: a negative size": protobuf(
        message(
            1,
            message(1, b"a.weight")
            + message(2, message(1, (1 << 64) - 1) + message(2, b"Float32") + message(3, bytes(4))),
        ),
        "invalid shape",
    ),
    "mindspore: a huge shape": protobuf(
        message(
            1, message(1, b"a.weight") + message(2, message(1, 1 << 61) + message(2, b"Float32") + message(3, bytes(4)))
        ),
        "for its shape|for tensor",
    ),
    "mindspore: an unknown type": protobuf(mindspore_value("a.weight", FEW, "Evil64"), "unsupported type"),
    "mindspore: a name with an escape sequence": protobuf(mindspore_value("\x1b[2J.weight", FEW), "not text"),
    "mindspore: a name of a megabyte": protobuf(mindspore_value("a" * (1 << 20), FEW), "no valid name"),
    "mindspore: no name": protobuf(message(1, message(2, b"")), "without a name"),
    "mindspore: a hash map": protobuf(message(1, message(1, b"a.weight") + message(3, b"")), "hash map"),
    "mindspore: the same tensor twice": protobuf(
        mindspore_value("lm_head.weight", FEW) + mindspore_value("b.weight", FEW) + mindspore_value("b.weight", FEW),
        "duplicate|parts",
    ),
    "mindspore: a wrong checksum": protobuf(b"crc_num" + bytes(10), "checksum"),
    "mindspore: a million values": protobuf(message(1, b"") * 1_000_000, "without a name"),
    "mindspore: nothing but nesting": content(b"\x0a\x0a" * 5000, UNKNOWN, "x.ckpt"),
    "mindspore: encrypted": content(b"\xd8\x5e\x3a\x7f" + bytes(100), "encrypted", "x.ckpt"),
    "honest: paddle": arrays(bytes, None),
    "paddle: os.system": more_arrays(call("os", "system", text(f"touch {CANARY}")), "nothing was run"),
    "paddle: eval": more_arrays(call("builtins", "eval", text(f"open({CANARY!r}, 'w')")), "nothing was run"),
    "paddle: eval of another name": more_arrays(
        call("builtins", "eval", text("__import__('os')"), b"}" + text("data") + b"Ns"), "nothing was run"
    ),
    "paddle: an unknown object": more_arrays(call("evil", "Evil"), None),
    "paddle: numpy objects": more_arrays(
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tC\1btR(K\1(K\2tcnumpy\ndtype\n(X\2\0\0\0O8K\0K\1tR\x89]tb",
        "unsupported element type",
    ),
    "paddle: more bytes than the shape": more_arrays(
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tC\1btR(K\1(K\2tcnumpy\ndtype\n(X\2\0\0\0f4K\0K\1tR\x89C\x04abcdtb",
        "for its shape|for tensor",
    ),
    "paddle: a negative shape": more_arrays(
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tC\1btR(K\1(J\xff\xff\xff\xfftcnumpy\ndtype\n(X\2\0\0\0f4K\0K\1tR\x89C\x04abcdtb",
        "invalid shape",
    ),
    "paddle: bytes beyond the file": more_arrays(b"\x8e" + LONG, "truncated|over the limit"),
    "paddle: a pickle after the pickle": arrays(lambda data: data + b"cos\nsystem\n.", "after its end"),
    "paddle: slices of nothing": arrays(
        lambda _: pickle.dumps(
            {"a": np.zeros(3), "UnpackBigParamInfor@@": {"b": {"OriginShape": (1 << 40,), "slices": ["x"]}}}, 4
        ),
        "lacks parts",
    ),
    "paddle: cut": arrays(lambda data: data[: len(data) // 2], "truncated"),
    "paddle: a list": arrays(lambda _: pickle.dumps([np.zeros(3)], 4), "not a state dict"),
    "a shard that is a program": Case(lambda folder: program(folder), "plain state dict|TorchScript"),
}


def pk(folder: Path) -> Path:
    """A sparse file that begins as a zip."""
    with open(folder / "x.pt", "wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(8 << 30)
    return folder / "x.pt"


def program(folder: Path) -> Path:
    """Meta's folder with a Composer run for a shard."""
    meta(folder)
    parts = members(composer())
    repacked(folder, parts, SHARD)
    return folder
