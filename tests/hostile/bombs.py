"""Files of a few megabytes that ask for minutes or gigabytes; each is refused soon, or costs what honest ones do.

Kinds: pickles (alone, in a distributed checkpoint, of before torch 1.6), names of files, tokenizers, configurations,
headers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile import gguf, honest, legacy
from tests.hostile.case import Case
from tests.hostile.dcp import folder_of
from tests.hostile.honest import composer, message, mindspore_value, safetensors, with_pickle
from tests.hostile.pickle_bombs import PICKLES, SIZE, colliding_pairs, items, memo, number, times
from tests.hostile.pickles import named, text

EASY = None
"""It may be converted, if that costs as little."""

NAMES = {
    "accessory": "consolidated.00000-of-1000000000.model.pth",
    "accessory with many digits": f"consolidated.0-of-{10**200}.model.pth",
    "meta": "consolidated.999999999.pth",
    "meta with many digits": f"consolidated.{10**200}.pth",
}


Make = Callable[[], bytes]


def beside(make: Make) -> Case:
    """A Composer run that holds one more value, under `evil`."""
    return Case(lambda folder: with_pickle(folder, lambda data: data[:-1] + text("evil") + make() + b"s."), EASY)


def within(make: Make, *place: str) -> Case:
    """A Composer run that holds one more value where it is read."""
    mark = "put another value here"

    def build(folder: Path) -> Path:
        run = composer()
        inner: Any = run
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = mark
        return with_pickle(folder, lambda data: data.replace(text(mark), make()), run)

    return Case(build, EASY)


def as_file(make: Make) -> Case:
    """A torch file of nothing else."""
    return Case(lambda folder: with_pickle(folder, lambda _: b"\x80\x02" + make() + b"."), EASY)


def old(number: int, make: Make) -> Case:
    """A file of before torch 1.6, one of whose pickles is this value."""
    return legacy.legacy(legacy.joined(number, lambda _: b"\x80\x02" + make() + b"."), EASY)


def views() -> bytes:
    """The value of an old file whose views have names of a megabyte."""
    kind, long = named("torch", "FloatStorage"), text("x" * (1 << 20))
    value = memo(1, long) + memo(2, text("storage")) + memo(3, kind) + memo(4, text("cpu"))
    value += times(b"(h\x02h\x03h\x01h\x04K\x08(h\x01K\x00K\x04ttQ0")
    return value + b"N"


def metadata(make: Make) -> Case:
    """A distributed checkpoint whose `.metadata` has one more field."""

    def build(folder: Path) -> Path:
        file = folder_of(folder) / ".metadata"
        file.write_bytes(file.read_bytes()[:-1] + b"}" + text("evil") + make() + b"sb.")
        return folder

    return Case(build, EASY)


def instead(field: str, make: Make) -> Case:
    """A distributed checkpoint of which one field of the `.metadata` is this value."""

    def build(folder: Path) -> Path:
        file = folder_of(folder) / ".metadata"
        file.write_bytes(file.read_bytes()[:-1] + b"}" + text(field) + make() + b"sb.")
        return folder

    return Case(build, EASY)


LAYOUT = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def entry(name: bytes, offset: bytes, start: bytes = b"K\x00") -> bytes:
    """Pushes an index and its place; the memo has the two classes under 1 and 2."""
    index = b"h\x01)\x81}(" + text("fqn") + name + text("offset") + offset + text("index") + b"Nub"
    info = text("relative_path") + text("__0_0.distcp") + text("offset") + start + text("length") + b"K\x01"
    return index + b"h\x02)\x81}(" + info + b"ub"


CLASSES = (memo(1, named(LAYOUT, "MetadataIndex")), memo(2, named(FILES, "_StorageInfo")))


def one_place() -> bytes:
    """`storage_data` that says the same of one item half a million times."""
    shared = b"".join(
        (*CLASSES, memo(3, b"}(" + text("fqn") + text("x") + text("offset") + b")u"), memo(4, b"}" + b""))
    )
    info = text("relative_path") + text("y") + text("offset") + b"K\x00" + text("length") + b"K\x01"
    return shared + memo(5, b"h\x02)\x81}(" + info + b"ub") + b"}(" + times(b"h\x01)\x81h\x03bh\x05") + b"u"


def many_chunks() -> bytes:
    """`state_dict_metadata` of one tensor of a million chunks that are one chunk."""
    chunk = memo(1, named(LAYOUT, "ChunkStorageMetadata"))
    box = memo(2, b"h\x01)\x81}(" + text("offsets") + b")" + text("sizes") + b")ub")
    tensor = named(LAYOUT, "TensorStorageMetadata") + b")\x81}("
    tensor += text("size") + b")" + text("chunks") + items(b"h\x02" + times(b"2", 2)) + b"ub"
    return chunk + box + b"}" + text("x") + tensor + b"s"


def places_of_one_hash() -> bytes:
    """`storage_data` of one item whose offsets have one hash."""
    pairs = colliding_pairs(20_000)
    return (
        b"".join(CLASSES)
        + b"}("
        + b"".join(entry(text("x"), number(a) + number(b) + b"\x86", number(n)) for n, (a, b) in enumerate(pairs))
        + b"u"
    )


def named_file(name: str) -> Case:
    """A folder with one honest shard of an odd name."""

    def build(folder: Path) -> Path:
        honest.meta(folder)
        (folder / "consolidated.00.pth").rename(folder / name)
        return folder

    return Case(build, "missing|is not there|should have|has no data|shards")


def ranks(name: str) -> Case:
    """A folder of one honest rank of an odd number."""

    def build(folder: Path) -> Path:
        (folder / name).mkdir()
        honest.mindspore(folder / name)
        return folder

    return Case(build, "missing")


def tokenizer(data: Callable[[], bytes]) -> Case:
    """Meta's folder with another tokenizer."""

    def build(folder: Path) -> Path:
        honest.meta(folder)
        (folder / "tokenizer.model").write_bytes(data())
        return folder

    return Case(build, EASY)


def piece(content: str, kind: int = 1) -> bytes:
    """A piece of a sentencepiece model."""
    return message(1, message(1, content.encode()) + message(3, kind))


SPECIAL = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3)
BPE = message(2, message(3, 2))


def tiktoken(tokens: list[bytes]) -> bytes:
    """A vocabulary of these tokens."""
    import base64  # noqa: PLC0415 - only here

    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def configuration(content: Callable[[], str], name: str = "run.yaml") -> Case:
    """A MindSpore checkpoint with this run configuration beside."""

    def build(folder: Path) -> Path:
        source = honest.mindspore(folder, config="")
        (folder / "run.yaml").unlink()
        (folder / name).write_text(content())
        return source

    return Case(build, EASY)


YAML = 1 << 20
DOCUMENTS: dict[str, Callable[[], str]] = {
    "a flow list": lambda: "a: [" + "1," * (YAML // 2 - 8) + "]",
    "a flow list of lists": lambda: "a: [" + "[]," * (YAML // 3 - 8) + "]",
    "a flow mapping": lambda: "a: {" + ",".join(f"a{n}: 1" for n in range(YAML // 12)) + "}",
    "a deep flow list": lambda: "a: " + "[" * (YAML // 2) + "]" * (YAML // 2 - 8),
    "a deep block": lambda: "- " * (YAML // 2),
    "anchors": lambda: "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 40)),
    "merge keys": lambda: (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{f'*a{n - 1},' * 10}]\n" for n in range(1, 40))
    ),
    "a long number": lambda: "a: " + "9" * (YAML - 8),
    "a long number in base 60": lambda: "a: 1" + ":59" * (YAML // 3 - 8),
    "a long float in base 60": lambda: "a: 1" + ":59" * (YAML // 3 - 8) + ".0",
    "a long date": lambda: "a: 2001-01-01 00:00:00." + "0" * (YAML - 50),
    "quotes": lambda: 'a: "' + "\\n" * (YAML // 2 - 8) + '"',
    "comments": lambda: "#\n" * (YAML // 2 - 8) + "a: 1",
    "directives": lambda: "%A b\n" * (YAML // 5 - 8) + "---\na: 1",
    "tags": lambda: "".join(f"a{n}: !!str x\n" for n in range(YAML // 16)),
    "block scalars": lambda: "".join(f"a{n}: |\n  x\n" for n in range(YAML // 16)),
    "keys that are lists": lambda: "".join(f"? [a, {n}]\n: 1\n" for n in range(YAML // 18)),
}


def weights_file(header: Callable[[], bytes]) -> Case:
    """A Hugging Face folder, to convert to another format, with this header."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(honest.CONFIG))
        (folder / "model.safetensors").write_bytes(safetensors(header()))
        return folder

    return Case(build, EASY, {"to": "meta"}, "from-hf")


def empty(name: str) -> str:
    """The entry of an empty tensor."""
    return f'"{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'


HEADERS: dict[str, Callable[[], bytes]] = {
    "many tensors": lambda: ("{" + ",".join(empty(f"a{n}") for n in range(SIZE // 60)) + "}").encode(),
    "one name": lambda: ("{" + ",".join(empty("a") for _ in range(SIZE // 56)) + "}").encode(),
    "many fields": lambda: ("{" + ",".join(f'"{n}":1' for n in range(SIZE // 12)) + "}").encode(),
    "a deep header": lambda: b'{"a":' + b"[" * SIZE + b"]" * SIZE + b"}",
    "a long number": lambda: b'{"a":' + b"9" * SIZE + b"}",
    "a long shape": lambda: b'{"a":{"dtype":"U8","shape":[' + b"1," * (SIZE // 2) + b'1],"data_offsets":[0,1]}}',
    "many lists": lambda: b'{"a":[' + b"[]," * (SIZE // 3) + b"1]}",
    "many objects": lambda: b'{"a":[' + b"{}," * (SIZE // 3) + b"1]}",
    "long metadata": lambda: ('{"__metadata__":{' + ",".join(f'"{n}":""' for n in range(SIZE // 12)) + "}}").encode(),
}


def zipped(count: int) -> Case:
    """A torch file with many members."""

    def build(folder: Path) -> Path:
        parts = honest.members(composer())
        return honest.repacked(folder, {**parts, **{f"x/data/{n + 100}": b"" for n in range(count)}})

    return Case(build, EASY)


def parameters(data: Callable[[], bytes]) -> Case:
    """A MindSpore file of these bytes."""

    def build(folder: Path) -> Path:
        honest.mindspore(folder)
        (folder / "x.ckpt").write_bytes(data())
        return folder / "x.ckpt"

    return Case(build, EASY)


def empty_value() -> bytes:
    """A MindSpore tensor without elements."""
    import numpy as np  # noqa: PLC0415 - only here

    return mindspore_value("a", np.zeros(0, "f4"))


def arrays(make: Make) -> Case:
    """Paddle's file with one more value."""
    return Case(lambda folder: honest.paddle(folder, lambda data: data[:-1] + text("evil") + make() + b"s."), EASY)


def index(count: int, shards: int) -> Case:
    """A Hugging Face folder whose index has many entries, and as many shards."""

    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(honest.CONFIG))
        homes = {f"a{n}": f"s{n % shards}.safetensors" for n in range(count)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
        for shard in range(shards):
            own = [name for name, home in homes.items() if home == f"s{shard}.safetensors"]
            header = "{" + ",".join(empty(name) for name in own) + "}"
            (folder / f"s{shard}.safetensors").write_bytes(safetensors(header.encode()))
        return folder

    return Case(build, EASY, {"to": "meta"}, "from-hf")


CONTENT = ("state", "integrations", "huggingface", "tokenizer")
CONFIG = ("state", "integrations", "huggingface", "model", "config", "content")

CASES: dict[str, Case] = {
    **{f"pickle: {name}": beside(value) for name, value in PICKLES.items()},
    **{f"torch file: {name}": as_file(value) for name, value in PICKLES.items()},
    **{f"weights: {name}": within(value, "state", "model") for name, value in PICKLES.items()},
    **{f"configuration: {name}": within(value, *CONFIG) for name, value in PICKLES.items()},
    **{f"tokenizer: {name}": within(value, *CONTENT) for name, value in PICKLES.items()},
    **{f"metadata: {name}": metadata(value) for name, value in PICKLES.items()},
    **{f"items: {name}": instead("state_dict_metadata", value) for name, value in PICKLES.items()},
    **{f"places: {name}": instead("storage_data", value) for name, value in PICKLES.items()},
    **{f"old file: {name}": old(3, value) for name, value in PICKLES.items()},
    **{f"old protocol: {name}": old(1, value) for name, value in PICKLES.items()},
    **{f"paddle: {name}": arrays(value) for name, value in PICKLES.items()},
    "tokenizer: a vocabulary of a long line": within(
        lambda: (
            b"}"
            + text("vocab")
            + b"}("
            + text("file_extension")
            + text(".txt")
            + text("content")
            + PICKLES["a long text, a million times"]()
            + b"us"
        ),
        *CONTENT,
    ),
    "old file: views with long names": old(3, views),
    "places: one item": instead("storage_data", one_place),
    "items: one chunk": instead("state_dict_metadata", many_chunks),
    "places: offsets of one hash": instead("storage_data", places_of_one_hash),
    **{f"name: {name}": named_file(file) for name, file in NAMES.items()},
    "name: mindspore": ranks("rank_999999999"),
    "name: mindspore with many digits": ranks(f"rank_{10**200}"),
    "sentencepiece: a long piece": tokenizer(lambda: SPECIAL + BPE + piece("ab" * (SIZE // 2))),
    "sentencepiece: pieces of 1000": tokenizer(
        lambda: SPECIAL + BPE + b"".join(piece("a" * 1000 + str(n)) for n in range(SIZE // 1010))
    ),
    "sentencepiece: pieces of one letter": tokenizer(
        lambda: SPECIAL + BPE + b"".join(piece("a" * n) for n in range(1, 2800))
    ),
    "sentencepiece: many pieces": tokenizer(
        lambda: SPECIAL + BPE + b"".join(piece(f"{n:x}") for n in range(SIZE // 16))
    ),
    "sentencepiece: empty pieces": tokenizer(lambda: SPECIAL + BPE + times(message(1, message(1, b"")))),
    "sentencepiece: many fields": tokenizer(lambda: SPECIAL + message(2, message(3, 2) + times(b"\x20\x01"))),
    "sentencepiece: fields of a piece": tokenizer(
        lambda: SPECIAL + BPE + message(1, message(1, b"a") + times(b"\x18\x01"))
    ),
    "tiktoken: a long token": tokenizer(lambda: tiktoken([b"a", b"ab" * (SIZE // 3)])),
    "tiktoken: tokens of 1000": tokenizer(lambda: tiktoken([b"a" * 1000 + b"%d" % n for n in range(SIZE // 1400)])),
    "tiktoken: tokens of one letter": tokenizer(lambda: tiktoken([b"a" * n for n in range(1, 2400)])),
    "tiktoken: many tokens": tokenizer(lambda: tiktoken([b"%x" % n for n in range(SIZE // 16)])),
    "tiktoken: a long rank": tokenizer(lambda: b"YQ== " + b"9" * SIZE + b"\n"),
    "tiktoken: empty lines": tokenizer(lambda: b"YQ== 0\n" + b"\n" * SIZE),
    "tiktoken: many words": tokenizer(lambda: b"YQ== 0\n" + b"a " * (SIZE // 2)),
    **{f"yaml: {name}": configuration(content) for name, content in DOCUMENTS.items()},
    **{f"header: {name}": weights_file(header) for name, header in HEADERS.items()},
    **{f"gguf: {name}": gguf.file(EASY, make) for name, make in gguf.BOMBS.items()},
    "gguf: many parts": gguf.file(EASY, gguf.gguf, "x-99999-of-99999.gguf"),
    "zip: many members": zipped(SIZE // 110),
    "mindspore: many values": parameters(lambda: times(empty_value())),
    "mindspore: empty values": parameters(lambda: empty_value() + times(b"\x0a\x00")),
    "mindspore: many fields": parameters(lambda: message(1, message(1, b"a") + message(2, times(b"\x10\x01")))),
    "mindspore: many dims": parameters(lambda: message(1, message(1, b"a") + message(2, times(b"\x08\x01")))),
    "index: many entries": index(40_000, 1),
    "index: many shards": index(40_000, 1000),
}
HONEST: dict[str, Case] = {
    "dcp": Case(folder_of, EASY),
    "legacy": legacy.HONEST["legacy"],
    **gguf.HONEST,
    "from-hf": Case(
        lambda folder: _hugging_face(folder),
        EASY,
        {"to": "meta"},
        "from-hf",  # what `header` and `index` are made of
    ),
}


def _hugging_face(folder: Path) -> Path:
    from safetensors.torch import save_file  # noqa: PLC0415 - only here

    (folder / "config.json").write_text(json.dumps(honest.CONFIG))
    save_file(honest.weights(), folder / "model.safetensors")
    return folder
