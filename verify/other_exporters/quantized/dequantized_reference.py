"""The dequantized reference: a temporary folder of the model with the dequantized weights of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from llmconv.verify.other_exporters.quantized.smoothing import StoredSmoothing
from llmconv.verify.other_exporters.quantized.stacked_matrices import restacked
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch

TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class TiedHead:
    """The names, in the checkpoint, of an embedding and of the head that shares its weights.

    Attributes:
        embedding, head: names of the weights.
        shared: other parameters that the checkpoint has under the name of another module, such as the head's bias;
            transformers shares them only in a model with a tied head.
    """

    embedding: str
    head: str
    shared: Mapping[str, str] = field(default_factory=dict)


def tied_head(model: Any, reference: Mapping[str, LazyTensor]) -> TiedHead | None:
    """The tied embedding and head of a transformers model; None if the head has its own weights."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {module: f"{name}.weight" for name, module in model.named_modules() if module in (head, embedding)}
    shared = _shared(model, names[head], reference)
    return TiedHead(reference_name(names[embedding], reference) or names[embedding], names[head], shared)


def _shared(model: Any, weight: str, reference: Mapping[str, LazyTensor]) -> dict[str, str]:
    """The parameters, except `weight`, that the checkpoint has under the name of another one, by their own names."""
    every = list(model.named_parameters(remove_duplicate=False))
    names = {name: reference_name(name, reference) for name, _ in every}
    stored = {id(one): names[name] for name, one in every if names[name]}
    return {name: stored[id(one)] for name, one in every if name != weight and not names[name] and id(one) in stored}


Replacements = dict[str, list[tuple[MatchedMatrix, TensorMatch]]]


def _replacements(found: Sequence[MatchedMatrix], tie: TiedHead | None) -> Replacements:
    """The matrices that replace each tensor; with a tied head, lookups replace the embedding and products the head."""
    replacements: Replacements = {}
    for one in found:
        for match in one.matches:
            names = {match.name}
            if tie and names & {tie.embedding, tie.head}:
                names = {tie.embedding} if one.stored.looked_up else set()
                names |= {tie.head} if one.stored.multiplied else set()
            for name in names:
                replacements.setdefault(name, []).append((one, match))
    return replacements


@contextmanager
def dequantized_reference(
    folder: Path,
    reference: Mapping[str, LazyTensor],
    found: Sequence[MatchedMatrix],
    tie: TiedHead | None,
    smoothing: StoredSmoothing,
) -> Iterator[Path]:
    """Context with a temporary folder of the model, with quantized matrices in place of its tensors.

    The weights are streamed to the disk.

    Args:
        folder: folder of the model.
        reference: its tensors by name, with `smoothing`.
        found: the quantized matrices and the matching tensors.
        tie: its tied embedding and head, if any; the head is then stored separately.
        smoothing: factors, which the result is without.
    """
    replacements = _replacements(found, tie)
    tensors = dict(reference)
    if tie and {tie.embedding, tie.head} & replacements.keys():
        tensors[tie.head] = tensors[tie.embedding]
    for name, windows in replacements.items():
        tensors[name] = _replaced(tensors[name], windows)
    if tie and tie.head in tensors:
        tensors |= {name: tensors[stored] for name, stored in tie.shared.items()}
    tensors = smoothing.undone(tensors)
    with TemporaryDirectory(prefix="llmconv-dequantized-") as name:
        copy = Path(name)
        config = read_json(folder / "config.json")
        untied = _untied(config) if tie and tie.head in tensors else config
        (copy / "config.json").write_bytes(json_bytes(untied))
        with open(copy / SINGLE, "xb", buffering=0) as file:
            stream_shard(file, Shard(SINGLE, restacked(tensors)), lambda count: None)
        yield copy


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The config with untied embeddings, also in nested configs."""
    nested = {
        key: {**value, TIED: False} if isinstance(value, dict) and (key == "text_config" or TIED in value) else value
        for key, value in config.items()
    }
    return {**nested, TIED: False}


def _replaced(tensor: LazyTensor, replacements: Sequence[tuple[MatchedMatrix, TensorMatch]]) -> LazyTensor:
    """A tensor in float32 in which windows are replaced by quantized matrices."""

    def load(start: int, stop: int) -> Array:
        rows = np.array(tensor.rows(start, stop), dtype=np.float32)
        for window in windows:
            window(rows, start, stop)
        return rows

    windows = [
        _TransposedWindow(found, match) if match.transposed else partial(_overwrite, found, match)
        for found, match in replacements
    ]
    return LazyTensor(BY_NAME["float32"], tensor.shape, load)


def _overwrite(found: MatchedMatrix, match: TensorMatch, rows: Array, start: int, stop: int) -> None:
    """Overwrites rows `start:stop` of a tensor with those rows of a matrix that match them."""
    shift = match.rows.start - match.first_row
    first, last = max(start, match.first_row), min(stop, match.first_row + len(match.rows))
    if first < last:
        across = slice(match.first_column, match.first_column + len(match.columns))
        values = found.stored.rows(first + shift, last + shift)
        rows[first - start : last - start, across] = values[:, match.columns.start : match.columns.stop]


class _TransposedWindow:
    """As `_overwrite`, for a transposed matrix, which is dequantized once."""

    def __init__(self, found: MatchedMatrix, match: TensorMatch) -> None:
        self._match = match
        self._read = lru_cache(maxsize=1)(found.stored.read)

    def __call__(self, rows: Array, start: int, stop: int) -> None:
        match = self._match
        first, last = max(start, match.first_column), min(stop, match.first_column + len(match.columns))
        if first >= last:
            return
        shift = match.columns.start - match.first_column
        values = self._read()[match.rows.start : match.rows.stop, first + shift : last + shift].T
        rows[first - start : last - start, match.first_row : match.first_row + len(match.rows)] = values
