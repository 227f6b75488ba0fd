"""The shadow of a model: a temporary folder whose tensors are what a graph's quantised weights stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from llmconv.checkpoint import SINGLE, read_json
from llmconv.output.plan import Shard, json_bytes
from llmconv.output.streaming import stream_shard
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.quantized.tensor_matching import Found, Placement

TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Tie:
    """A head that is the embedding: the embedding's name in the checkpoint, and the head's."""

    embedding: str
    head: str


def tie_of(model: Any, reference: Mapping[str, LazyTensor]) -> Tie | None:
    """How a transformers model ties its head; None where it has one of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {module: f"{name}.weight" for name, module in model.named_modules() if module in (head, embedding)}
    return Tie(reference_name(names[embedding], reference) or names[embedding], names[head])


Pieces = dict[str, list[tuple[Found, Placement]]]


def _pieces(found: Sequence[Found], tie: Tie | None) -> Pieces:
    """What replaces which tensor; of a tied one, lookups the embedding and products the head."""
    pieces: Pieces = {}
    for one in found:
        for placement in one.placements:
            names = {placement.name}
            if tie and names & {tie.embedding, tie.head}:
                names = {tie.embedding} if one.stored.looked_up else set()
                names |= {tie.head} if one.stored.multiplied else set()
            for name in names:
                pieces.setdefault(name, []).append((one, placement))
    return pieces


@contextmanager
def shadow_of(
    folder: Path, reference: Mapping[str, LazyTensor], found: Sequence[Found], tie: Tie | None
) -> Iterator[Path]:
    """A copy of a model's config and weights in which quantised matrices have their places; streamed to the disk.

    Args:
        folder: of the model.
        reference: its tensors.
        found: the matrices, and where they belong.
        tie: the head gets values of its own where the model ties it.
    """
    pieces = _pieces(found, tie)
    tensors = dict(reference)
    if tie and {tie.embedding, tie.head} & pieces.keys():
        tensors[tie.head] = tensors[tie.embedding]
    for name, several in pieces.items():
        tensors[name] = _replaced(tensors[name], several)
    with TemporaryDirectory(prefix="llmconv-shadow-") as place:
        shadow = Path(place)
        config = read_json(folder / "config.json")
        untied = _untied(config) if tie and tie.head in tensors else config
        (shadow / "config.json").write_bytes(json_bytes(untied))
        with open(shadow / SINGLE, "xb", buffering=0) as file:
            stream_shard(file, Shard(SINGLE, tensors), lambda count: None)
        yield shadow


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The same with a head of its own, also where a nested config says otherwise."""
    nested = {
        key: {**value, TIED: False} if isinstance(value, dict) and (key == "text_config" or TIED in value) else value
        for key, value in config.items()
    }
    return {**nested, TIED: False}


def _replaced(tensor: LazyTensor, pieces: Sequence[tuple[Found, Placement]]) -> LazyTensor:
    """A tensor in float32 with windows of quantised matrices laid over it."""

    def load(start: int, stop: int) -> Array:
        rows = np.array(tensor.rows(start, stop), dtype=np.float32)
        for window in windows:
            window(rows, start, stop)
        return rows

    windows = [
        _Turned(found, placement) if placement.turned else partial(_lay, found, placement)
        for found, placement in pieces
    ]
    return LazyTensor(BY_NAME["float32"], tensor.shape, load)


def _lay(found: Found, placement: Placement, rows: Array, start: int, stop: int) -> None:
    """Lays those of a matrix's rows over rows `start:stop` of a tensor that belong there."""
    shift = placement.rows.start - placement.first_row
    first, last = max(start, placement.first_row), min(stop, placement.first_row + len(placement.rows))
    if first < last:
        across = slice(placement.first_column, placement.first_column + len(placement.columns))
        values = found.stored.rows(first + shift, last + shift)
        rows[first - start : last - start, across] = values[:, placement.columns.start : placement.columns.stop]


class _Turned:
    """The same for a transposed matrix, which is dequantised once."""

    def __init__(self, found: Found, placement: Placement) -> None:
        self._placement = placement
        self._read = lru_cache(maxsize=1)(found.stored.read)

    def __call__(self, rows: Array, start: int, stop: int) -> None:
        place = self._placement
        first, last = max(start, place.first_column), min(stop, place.first_column + len(place.columns))
        if first >= last:
            return
        shift = place.columns.start - place.first_column
        values = self._read()[place.rows.start : place.rows.stop, first + shift : last + shift].T
        rows[first - start : last - start, place.first_row : place.first_row + len(place.rows)] = values
