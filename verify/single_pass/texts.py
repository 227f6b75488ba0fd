"""The texts that graphs without a cache are run on: batches with padding on either side, one token, long texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array

LONGEST = {"quick": 1024, "full": 8192}
"""Maximum number of tokens of a text that crosses a window, by suite."""


UNLIMITED = 1 << 60


@dataclass(frozen=True)
class TextLimits:
    """The properties of a model that the texts depend on.

    Attributes:
        vocab_size: rows of the embedding.
        padding: id of the padding token, which no text contains; None to pad with any tokens.
        max_positions: maximum number of tokens; None for no limit.
        windows: sizes of sliding windows, smallest first.
    """

    vocab_size: int
    padding: int | None
    max_positions: int | None
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """One batch.

    Attributes:
        name: of the scenario.
        input_ids: int64 [batch, tokens].
        attention_mask: int64 [batch, tokens], 0 for padding.
    """

    name: str
    input_ids: Array
    attention_mask: Array


def batches(limits: TextLimits, suite: str) -> tuple[list[Texts], list[int]]:
    """The batches of a suite, and the windows that no text of it crosses.

    Args:
        limits: of the model.
        suite: `quick` or `full`.
    """
    most = min(limits.max_positions or LONGEST[suite], LONGEST[suite])
    rows = [
        ("one text", [11], "right"),
        ("one token", [1, 1, 1], "right"),
        ("padding on the left", [9, 3, 1, 14], "left"),
        ("padding on the right", [9, 3, 1, 14], "right"),
        ("padding on both sides", [5, 12, 2, 7], "both"),
        ("long texts", [min(70, most), min(41, most)], "left"),
    ]
    if suite == "full":
        rows += [("many texts", [length % 17 + 1 for length in range(24)], "right"), ("the longest", [most], "right")]
    crossed = [window for window in limits.windows if 2 * window + 3 <= most]
    rows += [(f"longer than the window of {window}", [2 * window + 3, window + 2], "right") for window in crossed]
    made = [_batch(name, [min(size, most) for size in sizes], side, limits) for name, sizes, side in rows]
    return made, [
        window for window in limits.windows if window not in crossed and window < (limits.max_positions or 1 << 60)
    ]


def _batch(name: str, lengths: Sequence[int], side: str, limits: TextLimits) -> Texts:
    """Random tokens; those under the padding are random too, if the model takes any."""
    random = np.random.default_rng([len(lengths), *lengths, len(side)])
    extra = 3 if side == "both" else 0
    width = max(lengths) + extra
    ids = random.integers(0, limits.vocab_size, (len(lengths), width))
    if limits.padding is not None:
        ids = np.where(ids == limits.padding, (ids + 1) % limits.vocab_size, ids)
    first = {"left": [width - n for n in lengths], "right": [0] * len(lengths)}.get(
        side, [int(random.integers(0, width - n + 1)) for n in lengths]
    )
    at = np.arange(width)[None]
    starts, stops = np.array(first)[:, None], np.array(first)[:, None] + np.array(lengths)[:, None]
    mask = ((at >= starts) & (at < stops)).astype(np.int64)
    if limits.padding is not None:
        ids = np.where(mask == 1, ids, limits.padding)
    return Texts(name, ids.astype(np.int64), mask)
