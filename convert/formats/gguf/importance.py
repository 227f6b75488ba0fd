"""Importance matrices of llama.cpp: how much each column of a matrix counts, from the activations of a text.

Source: llama.cpp `tools/imatrix/imatrix.cpp` and `common/imatrix-loader.cpp`. A file of GGUF (`general.type` is
`imatrix`) has for each matrix `NAME.in_sum2`, the sums of squares of the activations of each column, and of each
expert, and `NAME.counts`, their number, both F32. The older form (`.dat`, little-endian) is the number of matrices i32,
then for each the length of its name i32, the name, the number of calls i32, of values i32, and the values f32; at the
end may be the number of chunks i32, the length of the name of the text i32, and that name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import InputRefused, listing, short
from llmconv.files.gguf_file import NAME_LIMIT, TENSOR_LIMIT, is_gguf, read_gguf
from llmconv.files.source_file import FileProblem, naming, open_source
from llmconv.tensors import Array

HINT = "give a file that llama.cpp's `llama-imatrix` made of this model"
SUMS, COUNTS = ".in_sum2", ".counts"
TEXT_LIMIT = 1 << 16  # bytes of the name of a text


@dataclass(frozen=True)
class Importance:
    """The weights of the columns of matrices, and what a quantized file says about their origin."""

    weights: dict[str, Array]  # float32 [experts, columns] by llama.cpp's name, finite and not negative; one expert: 1
    metadata: dict[str, Any]


def read_importance(path: Path, shapes: Mapping[str, tuple[int, ...]], model: str) -> Importance:
    """Reads the importance matrix of a model.

    Args:
        path: a file in either form.
        shapes: of the matrices of the model by llama.cpp's names, routers too; values are only read for these.
        model: its name, for messages.

    Raises:
        MalformedInput: the file is damaged, or not an importance matrix.
        InputRefused: it is that of another model, or does not exist.
    """
    if not path.is_file():
        raise InputRefused(f"`{path}` is not a file", hint=HINT)
    with naming(f"`{path.name}`", HINT):
        found, about = _of_gguf(path, shapes) if is_gguf(path) else _of_dat(path, shapes)
        for name, weights in found.items():
            if not (np.isfinite(weights).all() and (weights >= 0).all()):
                raise FileProblem(f"has negative or infinite weights for `{name}`")
    if not found:
        raise InputRefused(f"`{path.name}` has no weights for matrices of `{model}`", hint=HINT)
    for weights in found.values():  # experts that no token of the text reached count as without a matrix
        weights[~weights.any(axis=1)] = 1
    keys = {"file": path.name.encode(errors="replace").decode(), "entries_count": len(found), **about}
    return Importance(found, {f"quantize.imatrix.{key}": value for key, value in keys.items()})


def _about(text: Any, chunks: Any) -> dict[str, Any]:
    """What is kept of the origin: the name of the text and the number of its chunks, if they are that."""
    found: dict[str, Any] = {"dataset": text} if isinstance(text, str) and 0 < len(text) <= TEXT_LIMIT else {}
    return found | ({"chunks_count": chunks} if type(chunks) is int and 0 <= chunks < 1 << 31 else {})


def _expected(path: Path, name: str, count: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Experts and columns of a matrix; InputRefused if the model has no such matrix, or another number of columns."""
    if name not in shapes:
        raise InputRefused(f"`{path.name}` is of another model, which has `{name[:NAME_LIMIT]}`", hint=HINT)
    *rows, columns = shapes[name]
    experts = prod(rows[:-1])
    if count != experts * columns:
        raise InputRefused(
            f"`{path.name}` is of another model: it has {count:,} weights for `{name}`, expected {experts * columns:,}",
            hint=HINT,
        )
    return experts, columns


def _of_gguf(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Array], dict[str, Any]]:
    file = read_gguf(path)
    if (kind := file.metadata.get("general.type")) != "imatrix":
        raise FileProblem(f"is not an importance matrix (`general.type` is {short(kind)})")
    found = {}
    for name in [one.removesuffix(SUMS) for one in file.tensors if one.endswith(SUMS)]:
        sums, counts = file.tensors[name + SUMS], file.tensors.get(name + COUNTS)
        experts, columns = _expected(path, name, prod(sums.values.shape), shapes)
        if counts is None or (sums.type, counts.type, prod(counts.values.shape)) != ("F32", "F32", experts):
            raise FileProblem(f"has no fitting counts for `{name}`")
        number = counts.values.read().reshape(experts, 1)
        if not (np.isfinite(number).all() and (number >= 0).all()):
            raise FileProblem(f"has negative or infinite counts for `{name}`")
        values = sums.values.read().reshape(experts, columns)
        with np.errstate(over="ignore"):  # what is infinite is refused
            found[name] = np.where(number > 0, values / np.where(number > 0, number, 1), 1).astype(np.float32)
    texts = file.metadata.get("imatrix.datasets")
    text = texts[0] if isinstance(texts, list) and texts else ""
    return found, _about(text, file.metadata.get("imatrix.chunk_count"))


def _of_dat(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Array], dict[str, Any]]:
    found, text, chunks = dict[str, Array](), "", -1
    with open_source(path) as file:
        for _ in range(_integer(file, 1, TENSOR_LIMIT)):
            name = _take(file, _integer(file, 1, NAME_LIMIT)).decode("utf-8", "replace")
            if not name.isprintable() or name in found:
                raise FileProblem(f"has the duplicate or invalid name {name[:40]!r}")
            calls, count = _integer(file, 0, (1 << 31) - 1), _integer(file, 1, (1 << 31) - 1)
            shape = _expected(path, name, count, shapes)
            values = np.frombuffer(_take(file, 4 * count), "<f4").reshape(shape).copy()
            found[name] = values / np.float32(calls) if calls else values
        if file.peek(1):
            chunks = struct.unpack("<i", _take(file, 4))[0]
            text = _take(file, _integer(file, 0, TEXT_LIMIT)).decode("utf-8", "replace") if file.peek(1) else ""
    return found, _about(text, chunks)


def _take(file: BufferedReader, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise FileProblem("is not an importance matrix, or is truncated")
    return data


def _integer(file: BufferedReader, least: int, most: int) -> int:
    found: int = struct.unpack("<i", _take(file, 4))[0]
    if not least <= found <= most:
        raise FileProblem("is not an importance matrix of llama.cpp")
    return found


def without_weights(weights: Mapping[str, Array], kinds: Mapping[str, str], name: str) -> list[str]:
    """A warning if matrices of layers have no weights; those are quantized as without an importance matrix."""
    missing = [one for one, kind in kinds.items() if one.startswith("blk.") and kind != "F16" and one not in weights]
    return [f"`{name}` has no weights for {listing(missing)}: quantized without them"] if missing else []
