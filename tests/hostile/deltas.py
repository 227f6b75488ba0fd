"""Exact deltas whose frames and indices lie, and paths that are not models to extract a delta from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import zstandard

from llmconv.convert import extract_delta
from tests.builders.delta_models import frames, reindex, retell, write_index
from tests.hostile.case import Case
from tests.hostile.files import instead_of
from tests.hostile.honest import CONFIG, safetensors, weights
from tests.hostile.pickles import PYTHON

NAME = "model.embed_tokens.weight"
HUGE = 10**400
LONG = "a" * 100_000
ON = {"base": Path("base")}
Change = Callable[[Path], object]
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.int32: "I32"}


def model(path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A Hugging Face folder."""
    path.mkdir()
    header, data = dict[str, Any](), b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().numpy().tobytes()
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += content
    (path / "model.safetensors").write_bytes(safetensors(header, data))
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def tuned() -> dict[str, torch.Tensor]:
    """What was made of the base."""
    return {name: tensor * 1.001 for name, tensor in weights().items()}


def exact(refused: str | None, change: Change | None = None, more: Mapping[str, torch.Tensor] | None = None) -> Case:
    """An exact delta, of a tuned model with more tensors, after something was done to its folder."""

    def build(folder: Path) -> Path:
        base = model(folder / "base", weights())
        extract_delta(base, model(folder / "tuned", {**tuned(), **(more or {})}), folder / "delta")
        if change:
            change(folder / "delta")
        return folder / "delta"

    return Case(build, refused, ON, "delta")


def instead(name: str, put: Change, refused: str) -> Case:
    return exact(refused, instead_of(name, put))


def indexed(content: bytes | Mapping[str, Any], refused: str, before: bytes = b"") -> Case:
    """An exact delta with this index."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return exact(refused, lambda folder: write_index(folder, before, data))


def entry(refused: str, before: bytes = b"", name: str = NAME, **fields: Any) -> Case:
    """An exact delta of one tensor that the base does not have, and these bytes of frames."""
    written = {"dtype": "float32", "shape": [8, 4], "rows": 8, "blocks": [[len(before), 0, 0]], "base": None, **fields}

    def change(folder: Path) -> None:
        write_index(folder, before, json.dumps({"tensors": {name: written}}).encode())
        retell(tensors=1)(folder)

    return exact(refused, change)


def changed(refused: str, **fields: Any) -> Case:
    """An exact delta whose first tensor has other fields."""
    return exact(refused, reindex(**fields))


def told_from(**fields: Any) -> dict[str, Any]:
    return {"name": NAME, "dtype": "float32", "shape": [8, 4], "sha256": "", **fields}


def bomb(size: int) -> bytes:
    """A frame of this number of zeros."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    step = bytes(1 << 24)
    parts = [packer.compress(step[: min(len(step), size - done)]) for done in range(0, size, len(step))]
    return b"".join(parts) + packer.flush()


def without_size(size: int) -> bytes:
    """The same, which does not say how many they are."""
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(size))


def lying(size: int, declared: int) -> bytes:
    """The same, with another number of bytes in its header."""
    frame = bytearray(bomb(size))
    at = bytes(frame).index(size.to_bytes(4, "little"), 4, 16)
    frame[at : at + 4] = declared.to_bytes(4, "little")
    return bytes(frame)


def extracted(
    refused: str | None, tensors: Mapping[str, torch.Tensor] | None = None, change: Change | None = None, **options: Any
) -> Case:
    """A tuned model with other tensors, after something was done to its folder, to extract a delta of."""

    def build(folder: Path) -> Path:
        model(folder / "base", weights())
        path = model(folder / "tuned", {**tuned(), **(tensors or {})})
        if change:
            change(path)
        return path

    return Case(build, refused, {**ON, **options}, "extract")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


LAYER, NANS = "model.layers.0", torch.full((4, 4), float("nan"))
NO_INDEX = "no index at its end"
NO_FILE = "missing|no index|not a regular file|cannot be read|damaged"
WRITTEN = {
    "exact": exact(None),
    "one with new tensors": exact(None, more={"new.weight": torch.ones(3, 4)}),
    "extract": extracted(None),
}
HONEST = {**WRITTEN, "extract with a rank": extracted(None, rank=2)}

EXACT: dict[str, Case] = {
    "frames: a pipe": instead("delta.zst", lambda path: os.mkfifo(path), NO_FILE),
    "frames: a link to /dev/zero": instead("delta.zst", lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "frames: a link to itself": instead("delta.zst", lambda path: path.symlink_to(path.name), NO_FILE),
    "frames: a folder": instead("delta.zst", Path.mkdir, NO_FILE),
    "frames: nothing": instead("delta.zst", Path.touch, NO_FILE),
    "frames: 8 TB of zeros": exact(NO_INDEX, lambda path: os.truncate(frames(path), 8 << 40)),
    "frames: cut in the middle": exact(NO_INDEX, lambda path: os.truncate(frames(path), 300)),
    "frames: no zstd": entry("damaged frame|another size", b"no zstd frame"),
    "frames: cut, and the index knows": entry("damaged frame", bomb(128)[:-3]),
    "frames: a bomb of 4 GB": entry("another size", bomb(1 << 32)),
    "frames: a bomb of 4 GB, and the index knows": entry("too large", bomb(1 << 32), shape=[1, 1 << 30], rows=1),
    "frames: a bomb that does not say its size": entry("another size", without_size(1 << 28)),
    "frames: a bomb that declares the right size": entry(
        "damaged frame", lying(1 << 28, 1 << 20), shape=[1 << 18], rows=1 << 18
    ),
    "frames: one more after the first": entry("wrong checksum", bomb(128) + bomb(128)),
    "frames: a skippable one": entry("another size|damaged", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"),
    "frames: other rows": entry("wrong checksum", bomb(128), blocks=[[len(bomb(128)), 7, 0]]),
    "frames: none for a tensor of zeros, as large as the disk": entry(
        "no space", shape=[1 << 40], rows=1 << 24, blocks=[[0, 0, 0]] * (1 << 16)
    ),
    "index: no JSON": indexed(b"{", "not valid JSON"),
    "index: 100,000 deep": indexed(b'{"tensors": ' + nested(100_000) + b"}", "not valid JSON"),
    "index: 30 MB of lists": indexed(b"[" + b"[]," * 10_000_000 + b"[]]", "without tensors"),
    "index: 40 MB": indexed(b"[" + b" " * 40_000_000 + b"]", NO_INDEX),
    "index: a number of 5000 digits": indexed(b'{"tensors": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "index: not a number": indexed(b'{"tensors": NaN}', "without tensors"),
    "index: no text": indexed(b"\xff\xfe\x00", "not valid JSON"),
    "index: nothing in it": exact(
        "contains 0 tensors, expected", lambda path: write_index(path, b"", b'{"tensors": {}}')
    ),
    "index: a length that lies": exact(
        NO_INDEX, lambda path: frames(path).write_bytes(b"x" * 99 + (1 << 63).to_bytes(8, "little") + b"LLMDELTA")
    ),
    "index: bytes between frames": indexed({"tensors": {}}, "describes 0 bytes", b"hidden"),
    "name: a path": entry("holds no|does not|wrong checksum|missing keys|shape", bomb(128), name="../../evil"),
    "name: an escape sequence": entry("impossible entry", name="\x1b[2J\n"),
    "name: nothing": entry("impossible entry", name=""),
    "name: 100,000 letters": entry("impossible entry", name=LONG),
    "name: half a surrogate": entry("impossible entry", name="\ud800"),
    "dtype: unknown": changed("unknown dtype", dtype=LONG),
    "dtype: a list": changed("unknown dtype", dtype=["float32"]),
    "shape: of 400 digits": changed("impossible shape", shape=[HUGE, 4]),
    "shape: 2^60": changed("too small|too large|blocks", shape=[1 << 60, 4]),
    "shape: 1,000 axes": changed("impossible shape", shape=[1] * 1000),
    "shape: a truth": changed("impossible shape", shape=[True, 4]),
    "shape: a half": changed("impossible shape", shape=[0.5]),
    "rows: none": changed("no blocks", rows=0),
    "rows: one, of a million": changed("too small", shape=[1 << 20, 4], rows=1, blocks=[[0, 0, 0]] * (1 << 20)),
    "rows: of 400 digits": changed("no blocks", rows=HUGE),
    "blocks: overlapping, by a negative size": changed("blocks", blocks=[[-5, 0, 0]]),
    "blocks: past the end": changed("describes", blocks=[[1 << 40, 0, 0]]),
    "blocks: of 400 digits": changed("blocks", blocks=[[HUGE, 0, 0]]),
    "blocks: a number": changed("no blocks", blocks=7),
    "blocks: pairs": changed("blocks", blocks=[[0, 0]]),
    "base: another tensor": changed(
        "another shape or dtype|missing|other values", base=told_from(name="lm_head.weight")
    ),
    "base: a path": changed("missing keys", base=told_from(name="../../etc/passwd")),
    "base: an escape sequence": changed("missing keys", base=told_from(name="\x1b[2J\n" + LONG)),
    "base: another shape": changed("another kind", base=told_from(shape=[8, 5])),
    "base: another dtype": changed("another kind", base=told_from(dtype="int8")),
    "base: a shape that is not a list": changed("impossible shape", base=told_from(shape=8)),
    "base: no sha256": changed("invalid base tensor", base={"name": NAME}),
    "base: a text": changed("invalid base tensor", base="evil"),
    "base: none, for what was told from it": changed("wrong checksum", base=None),
    "delta.json: 100,000 deep": exact(
        "not valid JSON", lambda path: (path / "delta.json").write_bytes(nested(100_000))
    ),
    "delta.json: a list": exact("not a JSON object", lambda path: (path / "delta.json").write_text("[]")),
    "delta.json: 8 GB": exact("too large", lambda path: os.truncate(path / "delta.json", 8 << 30)),
    "delta.json: a later version": exact("version", retell(version=LONG)),
    "delta.json: no version": exact("version", retell(version=None)),
    "delta.json: a file elsewhere": exact("does not list", retell(files=["../delta/delta.zst"])),
    "delta.json: a file of the system": exact("does not list", retell(files=["/etc/passwd"])),
    "delta.json: a file that is the folder": exact("does not list|missing", retell(files=["."])),
    "delta.json: a file above": exact("does not list|missing", retell(files=[".."])),
    "delta.json: a file without name": exact("does not list|missing", retell(files=[""])),
    "delta.json: a file with a zero in its name": exact("does not list|missing", retell(files=["delta.zst\0"])),
    "delta.json: a file of 100,000 letters": exact("does not list|missing|cannot be read", retell(files=[LONG])),
    "delta.json: files that are numbers": exact("does not list", retell(files=[7])),
    "delta.json: a file ten thousand times": exact("duplicate keys", retell(files=["delta.zst"] * 10_000)),
    "delta.json: a base with an escape sequence": exact(None, retell(base="\x1b[2J\n" + LONG)),
    "delta.json: another number of tensors": exact("contains 12 tensors, expected", retell(tensors=LONG)),
    "config: code": exact(
        None, lambda path: (path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "e.E"}}))
    ),
    "config: 100,000 deep": exact("not valid JSON", lambda path: (path / "config.json").write_bytes(nested(100_000))),
    "config: a list": exact("not a JSON object", lambda path: (path / "config.json").write_text("[]")),
    "tokenizer: a link to /etc/passwd": exact(
        "leads out", lambda path: (path / "tokenizer.json").symlink_to("/etc/passwd")
    ),
    "tokenizer: a pipe": exact(None, lambda path: os.mkfifo(path / "tokenizer.json")),
    "code next to it": exact(None, lambda path: (path / "modeling.py").write_text(PYTHON)),
}
EXTRACTED: dict[str, Case] = {
    "extract: weights that are cut": extracted(
        "safetensors|header|bytes", change=lambda path: os.truncate(path / "model.safetensors", 500)
    ),
    "extract: a pipe for weights": extracted(
        "not a regular file",
        change=instead_of("model.safetensors", lambda path: os.mkfifo(path)),
    ),
    "extract: config 100,000 deep": extracted(
        "not valid JSON", change=lambda path: (path / "config.json").write_bytes(nested(100_000))
    ),
    "extract: a name with a path": extracted(None, {"../../evil": torch.ones(2)}),
    "rank: names that the base lacks": extracted("only one of the two", {"../../evil": torch.ones(2)}, rank=2),
    "rank: not a number": extracted("not finite", {f"{LAYER}.self_attn.q_proj.weight": NANS}, rank=2),
    "rank: another shape": extracted("no adapter has", {"model.norm.weight": torch.ones(5)}, rank=2),
    "rank: whole numbers": extracted("no adapter has", {"model.norm.weight": torch.ones(4).int()}, rank=2),
}
CASES: dict[str, Case] = {**{f"honest: {name}": case for name, case in WRITTEN.items()}, **EXACT, **EXTRACTED}
