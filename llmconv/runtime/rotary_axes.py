"""Positions on three axes, as Qwen2-VL and later have them: time, row and column; one number on all three for text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.errors import InputRefused
from llmconv.runtime.extra_inputs import BATCH, POSITIONS, SEQUENCE, ExtraInput, ModelCall
from llmconv.tensors import Array

AXES = 3

Grid = tuple[int, int]
"""Rows and columns of the features of an image."""


def _same_on_all_axes(call: ModelCall) -> Array:
    """Positions of text, int64 [3, batch, new tokens]."""
    return np.repeat(call.position_ids[None], AXES, axis=0)


ROTARY_AXES = ExtraInput(POSITIONS, (AXES, BATCH, SEQUENCE), default=_same_on_all_axes, counts_on=True)
"""int64 [3, batch, new tokens]; after the prompt all axes count on from the largest position."""


def positions_on_axes(where: Array, grids: Sequence[Grid]) -> Array:
    """Positions of the tokens of a prompt, int64 [3, tokens]; `where`, bool [tokens], marks placeholders of features.

    The features of an image have one position in time, and each its row and column from there. The text after it counts
    on from the larger of its numbers of rows and columns. Source: `get_rope_index` in transformers. Raises InputRefused
    unless the placeholders are one run for each image, with a token of text between two runs.
    """
    starts, stops = _runs(where)
    if [stop - start for start, stop in zip(starts, stops, strict=True)] != [rows * columns for rows, columns in grids]:
        raise InputRefused(
            "the placeholders of images in the prompt are not one run for each image",
            hint="write a token between two images, as the model's chat template does",
        )
    parts, at, done = [], 0, 0
    for start, stop, grid in zip(starts, stops, grids, strict=True):
        text = start - done
        parts += [_counted(at, text), at + text + np.stack(list(_of_features(grid)))]
        at, done = at + text + max(grid), stop
    return np.concatenate([*parts, _counted(at, len(where) - done)], axis=1)


def _runs(where: Array) -> tuple[list[int], list[int]]:
    """Where runs of True begin and end."""
    edges = np.diff(np.concatenate([[0], where.astype(np.int8), [0]]))
    return [int(at) for at in np.flatnonzero(edges == 1)], [int(at) for at in np.flatnonzero(edges == -1)]


def _counted(start: int, count: int) -> Array:
    return np.repeat(np.arange(start, start + count, dtype=np.int64)[None], AXES, axis=0)


def _of_features(grid: Grid) -> Iterator[Array]:
    rows, columns = grid
    yield np.zeros(rows * columns, dtype=np.int64)
    yield np.repeat(np.arange(rows), columns)
    yield np.tile(np.arange(columns), rows)


DEEPSTACK_LAYERS = 3
"""Number of layers of the decoder that get features of images added to their output, in all released Qwen3-VL."""

DEEPSTACK = ExtraInput(
    "deepstack_embeds",
    (BATCH, SEQUENCE, lambda config: DEEPSTACK_LAYERS * config.hidden_size),
    dtype="float32",
    values=1.0,
)
"""Features that are added to the output of each of the first layers, one layer after the other in the last axis."""
