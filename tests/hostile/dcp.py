"""Distributed checkpoints: pickles that call, places that lie, names that lead out, chunks that do not fit."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as layout

from tests.builders.dcp_folders import change, save, split
from tests.hostile.case import CANARY, Case
from tests.hostile.files import instead_of
from tests.hostile.honest import CONFIG, composer, weights
from tests.hostile.pickles import PYTHON, SHELL, call, named, text

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DATA = "__0_0.distcp"
ATTACK = "nothing was run"
NO_ITEM = "with an invalid|lists no items|truncated|inconsistent|not of a training format"
Edit = Callable[[Any], Any]


def folder_of(folder: Path, state: dict[str, Any] | None = None) -> Path:
    """An honest folder: a Llama below `model`, and a scheduler's state."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return save(folder, {"model": weights(), "step": [1], **(state or {})})


def sharded(folder: Path) -> Path:
    """An honest sharded Composer run."""
    return save(folder, composer())


def edited(edit: Edit, refused: str | None) -> Case:
    """A folder whose `.metadata` was changed."""
    return Case(lambda folder: change(folder_of(folder), edit), refused)


def metadata(make: Callable[[bytes], bytes], refused: str | None) -> Case:
    """A folder with other bytes for its `.metadata`."""

    def build(folder: Path) -> Path:
        file = folder_of(folder) / ".metadata"
        file.write_bytes(make(file.read_bytes()))
        return folder

    return Case(build, refused)


def added(value: bytes, refused: str | None) -> Case:
    """A `.metadata` whose object has one more field, made by these opcodes."""
    return metadata(lambda data: data[:-1] + b"}" + text("evil") + value + b"sb.", refused)


def place(refused: str, name: str = f"model.{EMBEDDING}", **fields: Any) -> Case:
    """A folder in which the chunk of one tensor lies elsewhere."""

    def edit(content: Any) -> None:
        index = next(index for index in content.storage_data if index.fqn == name)
        for field, value in fields.items():
            setattr(content.storage_data[index], field, value)

    return edited(edit, refused)


def item(refused: str, **fields: Any) -> Case:
    """A folder in which one tensor is described otherwise."""

    def edit(content: Any) -> None:
        for field, value in fields.items():
            setattr(content.state_dict_metadata[f"model.{EMBEDDING}"], field, value)

    return edited(edit, refused)


def boxes(refused: str, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Case:
    """A folder in which one tensor lies in these chunks."""
    return edited(lambda content: split(content, f"model.{EMBEDDING}", list(chunks)), refused)


def path_of(refused: str | None, path: Any) -> Case:
    """A folder in which one tensor lies elsewhere in the nested dict."""
    return edited(lambda content: content.planner_data.update({f"model.{EMBEDDING}": path}), refused)


def named_by(name: str, refused: str | None) -> Case:
    """A folder with one more tensor of this name."""
    return Case(lambda folder: folder_of(folder, {"model": {**weights(), name: torch.zeros(2)}}), refused)


def blob(make: Callable[[bytes], bytes], refused: str | None, name: str = "step") -> Case:
    """A sharded run, one of whose values is another blob; it is put at the end of the file."""

    def build(folder: Path) -> Path:
        sharded(folder)
        with open(folder / ".metadata", "rb") as file:
            content = pickle.load(file)
        info = next(info for index, info in content.storage_data.items() if name in index.fqn)
        file = folder / info.relative_path
        data = make(file.read_bytes()[info.offset : info.offset + info.length])
        info.offset, info.length = file.stat().st_size, len(data)
        file.write_bytes(file.read_bytes() + data)
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        return folder

    return Case(build, refused)


def files(change: Callable[[Path], object], refused: str | None) -> Case:
    """A folder, after something was done to it."""

    def build(folder: Path) -> Path:
        folder_of(folder)
        change(folder)
        return folder

    return Case(build, refused)


def instead(put: Callable[[Path], object]) -> Callable[[Path], object]:
    return instead_of(DATA, put)


def saved(value: Any) -> bytes:
    """A blob of torch."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_call(opcodes: bytes) -> Callable[[bytes], bytes]:
    """A zip whose pickle is these opcodes."""

    def make(_: bytes) -> bytes:
        import zipfile  # noqa: PLC0415 - only here

        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + opcodes + b".")
            archive.writestr("archive/version", b"3\n")
        return stream.getvalue()

    return make


def many_chunks(count: int) -> Edit:
    """One row in this number of empty chunks, each at its own place."""

    def edit(content: Any) -> None:
        described = content.state_dict_metadata[f"model.{EMBEDDING}"]
        first = described.chunks[0]
        info = content.storage_data[layout.MetadataIndex(f"model.{EMBEDDING}", first.offsets)]
        described.size = torch.Size([count, 4])
        described.chunks = [
            layout.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(count)
        ]
        for row in range(count):
            index = layout.MetadataIndex(f"model.{EMBEDDING}", torch.Size([row, 0]))
            content.storage_data[index] = type(info)(f"{row}.distcp", 0, 10)

    return edit


def checkerboard(content: Any) -> None:
    """Chunks that cut each other's boundaries: as many cells as the square of the chunks."""
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((2 * row, 3 * row), (1, 1)) for row in range(5000)]
    content.state_dict_metadata[f"model.{EMBEDDING}"].size = torch.Size([50, 100])
    split(content, f"model.{EMBEDDING}", pieces)


def lengths(change_length: Callable[[int], int]) -> Edit:
    def edit(content: Any) -> None:
        for info in content.storage_data.values():
            info.length = change_length(info.length)

    return edit


OVER = "overlap|leave a gap|lie outside"
OUTSIDE = "outside the folder"
HONEST = {"dcp": Case(folder_of, None), "sharded": Case(sharded, None)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "metadata: os.system": added(call("os", "system", text(SHELL)), ATTACK),
    "metadata: eval": added(call("builtins", "eval", text(PYTHON)), ATTACK),
    "metadata: a call of another name": added(call("evil", "run", text(PYTHON)), NO_ITEM),
    "metadata: nested pickle": added(call("pickle", "loads", b"C\x04cos\n"), NO_ITEM),
    "metadata: a call instead": metadata(lambda _: b"\x80\x02" + call("evil", "Evil") + b".", NO_ITEM),
    "metadata: a call that builds": metadata(
        lambda _: b"\x80\x02" + named("torch.distributed.evil", "Metadata") + b")\x81}" + text("x") + b"Nsb.", NO_ITEM
    ),
    "metadata: cut": metadata(lambda data: data[: len(data) // 2], "truncated"),
    "metadata: nothing": metadata(lambda _: b"", "truncated|" + NO_ITEM),
    "metadata: a pickle after it": metadata(lambda data: data + b"cos\nsystem\n.", "after its end"),
    "metadata: another object": metadata(lambda _: pickle.dumps({"torch.distributed.": 1}), NO_ITEM),
    "metadata: 100,000 marks": metadata(lambda data: data[:2] + b"(" * 100_000, "nested deeper|truncated"),
    "metadata: missing": files(instead_of(".metadata", lambda path: None), "no `.metadata`"),
    "metadata: a pipe": files(instead_of(".metadata", lambda path: os.mkfifo(path)), "no `.metadata`"),
    "metadata: a link to /dev/zero": files(
        instead_of(".metadata", lambda path: path.symlink_to("/dev/zero")), "no `.metadata`"
    ),
    "metadata: a version with an escape sequence": edited(
        lambda content: setattr(content, "version", "\x1b[2J\nhint"), None
    ),
    "metadata: a version that is an object": edited(
        lambda content: setattr(content, "version", [torch.Size([1])]), None
    ),
    "metadata: no items": edited(lambda content: content.state_dict_metadata.clear(), "no language model"),
    "metadata: items that are a list": edited(lambda content: setattr(content, "state_dict_metadata", [1]), NO_ITEM),
    "metadata: no places": edited(lambda content: setattr(content, "storage_data", None), "without `storage_data`"),
    "metadata: places of nothing": edited(lambda content: content.storage_data.clear(), "no storage location"),
    "metadata: places by number": edited(lambda content: setattr(content, "storage_data", {1: 2}), NO_ITEM),
    "metadata: an item that is a number": edited(lambda content: content.state_dict_metadata.update(evil=7), NO_ITEM),
    "metadata: a name that is a number": edited(
        lambda content: content.state_dict_metadata.update({7: 7}), "no valid key"
    ),
    "place: the parent": place(OUTSIDE, relative_path="../../etc/passwd"),
    "place: absolute": place(OUTSIDE, relative_path="/etc/passwd"),
    "place: of Windows": place(OUTSIDE, relative_path="..\\evil"),
    "place: a folder": place("missing", relative_path=".."),
    "place: nothing": place("missing|outside", relative_path=""),
    "place: an escape sequence": place(OUTSIDE, relative_path="\x1b[2J.distcp"),
    "place: a zero": place(OUTSIDE, relative_path="a\0.distcp"),
    "place: a name of 60,000 letters": place("cannot be read|missing|too long", relative_path="a" * 60_000),
    "place: a number": place(OUTSIDE, relative_path=7),
    "place: `.metadata` itself": place("not a torch file|ends at byte", relative_path=".metadata"),
    "place: `config.json`": place("not a torch file|ends at byte", relative_path="config.json", offset=0, length=20),
    "place: past the end": place("ends at byte", offset=1 << 50),
    "place: 2^61 bytes": place("overlap|ends at byte", length=1 << 61),
    "place: 2^70 bytes": place("invalid bytes", length=1 << 70),
    "place: a negative byte": place("invalid bytes", offset=-1),
    "place: no number": place("invalid bytes", offset="0"),
    "place: in the middle of another": place("overlap", offset=17),
    "place: no bytes": place("not a torch file|truncated|damaged", length=0),
    "place: transforms": place("extension", transform_descriptors=["\x1b[2Jzstd"]),
    "place: transforms that are none": place("transforms", transform_descriptors=[7]),
    "all places a byte longer": edited(lengths(lambda length: length + 1), "overlap|ends at byte"),
    "all places a byte shorter": edited(lengths(lambda length: length - 1), "truncated|damaged"),
    "tensor: a shape that overflows": item("overlap|mismatch|invalid shape", size=torch.Size([1 << 40, 1 << 40])),
    "tensor: a size of 2^62": item("invalid shape", size=torch.Size([1 << 62])),
    "tensor: no shape": item("invalid shape", size="8"),
    "tensor: 17 axes": item("invalid shape", size=torch.Size([1] * 17)),
    "tensor: no chunks": item(OVER, chunks=[]),
    "tensor: chunks that are a number": item("invalid shape", chunks=7),
    "tensor: chunks that are numbers": item(NO_ITEM, chunks=[7]),
    "tensor: no properties": item("no element type", properties=7),
    "chunks: twice the same rows": boxes(OVER, ((0, 0), (8, 4)), ((4, 0), (4, 4))),
    "chunks: a gap": boxes(OVER, ((0, 0), (3, 4)), ((4, 0), (4, 4))),
    "chunks: outside": boxes(OVER, ((0, 0), (4, 4)), ((8, 0), (4, 4))),
    "chunks: far outside": boxes(OVER, ((0, 0), (4, 4)), ((1 << 61, 0), (4, 4))),
    "chunks: too many axes": boxes("invalid shape", ((0, 0, 0), (8, 4, 1))),
    "chunks: halves that are wholes": boxes("shape mismatch for a chunk|missing", ((0, 0), (4, 4)), ((4, 0), (4, 4))),
    "chunks: 20,000 in files that are not there": edited(many_chunks(20_000), "missing"),
    "chunks: on a diagonal": edited(checkerboard, OVER),
    "tree: a name of no parts": path_of("no valid key", ()),
    "tree: a number": path_of("no valid key", 7),
    "tree: a key that is a list": path_of("invalid key", ([],)),
    "tree: 100 keys": path_of("no valid key", tuple("x" * 100)),
    "tree: inside an item": path_of("nested in the item|also contains items", ("model", "lm_head.weight", "x")),
    "tree: where another is": path_of("duplicate key|also contains items", ("model", "lm_head.weight")),
    "tree: in a list at 2^60": path_of("lacks|missing|no language model|no embedding", ("model", 1 << 60)),
    "names: one that leads out": named_by("../../evil", "outside the model"),
    "names: an escape sequence": named_by("\x1b[2J\nmodel.x", "outside the model"),
    "names: a zero": named_by("model.\0", "does not have"),
    "data: a pipe": files(instead(lambda path: os.mkfifo(path)), "missing"),
    "data: a folder": files(instead(Path.mkdir), "missing"),
    "data: a link to /etc/passwd": files(
        instead(lambda path: path.symlink_to("/etc/passwd")), "ends at byte|not a torch"
    ),
    "data: a link to /dev/zero": files(instead(lambda path: path.symlink_to("/dev/zero")), "missing"),
    "data: a link to itself": files(instead(lambda path: path.symlink_to(path.name)), "missing"),
    "data: nothing": files(lambda folder: (folder / DATA).write_bytes(b""), "ends at byte"),
    "data: cut": files(lambda folder: os.truncate(folder / DATA, (folder / DATA).stat().st_size // 2), "ends at byte"),
    "data: zeros": files(
        lambda folder: (folder / DATA).write_bytes(bytes((folder / DATA).stat().st_size)), "not a torch file"
    ),
    "data: a TB of zeros behind": files(lambda folder: os.truncate(folder / DATA, 1 << 40), None),
    "blob: os.system": blob(with_call(call("os", "system", text(SHELL))), ATTACK, "file_extension"),
    "blob: another call": blob(with_call(call("evil", "Evil", text(CANARY))), None, "class"),
    "blob: a torch file in bytes": blob(lambda _: saved(saved(saved({"x": 1}))), None, "class"),
    "blob: a pickle in bytes": blob(lambda _: saved(b"cos\nsystem\n."), None, "class"),
    "blob: a list a million deep": blob(with_call(b"]" * 1_000_000 + b"a" * 999_999), "nested deeper", "class"),
    "blob: no zip": blob(lambda _: b"cos\nsystem\n.", "not a torch file", "class"),
    "blob: nothing": blob(lambda _: b"", "not a torch file|truncated", "class"),
}
