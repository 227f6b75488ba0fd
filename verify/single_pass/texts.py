"""The texts that graphs without a cache are run on: batches with padding on either side, one token, long texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array

LONGEST = {"quick": 1024, "full": 8192}
"""Maximum number of tokens of a text that crosses a window or the original context, by suite."""

LONG = 259
"""Tokens of the long texts; limits of other numbers are found in the graph itself, see `audit.decisions`."""

MANY = 33
"""Texts of the largest batch."""

HOLES = (3, 4, 7)
"""Places without a token inside a text."""


@dataclass(frozen=True)
class TextLimits:
    """The properties of a model that the texts depend on.

    Attributes:
        vocab_size: rows of the embedding.
        padding: id of the padding token, which no text contains; None to pad with any tokens.
        max_positions: maximum number of tokens; None for no limit.
        windows: sizes of sliding windows, smallest first.
        switch: tokens beyond which the rotary frequencies of the whole text change; None if they never do.
    """

    vocab_size: int
    padding: int | None
    max_positions: int | None
    windows: tuple[int, ...]
    switch: int | None = None


@dataclass(frozen=True)
class Texts:
    """One batch.

    Attributes:
        name: of the scenario.
        input_ids: int64 [batch, tokens].
        attention_mask: int64 [batch, tokens], 0 for padding.
        position_ids: int64 [batch, tokens]; None for positions counted from the mask.
    """

    name: str
    input_ids: Array
    attention_mask: Array
    position_ids: Array | None = None


def batches(limits: TextLimits, suite: str, *, pools: bool, takes_positions: bool) -> tuple[list[Texts], list[str]]:
    """The batches of a suite, and what no text of it crosses, in words.

    Args:
        limits: of the model.
        suite: `quick` or `full`.
        pools: the graph joins the tokens of a text, which then has no places left out.
        takes_positions: the graph has an input of positions.
    """
    most = min(limits.max_positions or LONGEST[suite], LONGEST[suite])
    rows = [
        ("one text", [11], "right"),
        ("one token", [1, 1, 1], "right"),
        ("two texts", [13, 6], "right"),
        ("padding on the left", [9, 3, 1, 14], "left"),
        ("padding on the right", [9, 3, 1, 14], "right"),
        ("padding on both sides", [5, 12, 2, 7], "both"),
        ("long texts", [LONG, 41, 70], "left"),
        ("many texts", [length % 17 + 1 for length in range(MANY)], "right"),
    ]
    rows += [("the longest", [most], "right")] if suite == "full" else []
    crossed = [window for window in limits.windows if 2 * window + 3 <= most]
    rows += [(f"longer than the window of {window}", [2 * window + 3, window + 2], "right") for window in crossed]
    reach = min(limits.max_positions or LONGEST["full"], LONGEST["full"])
    left = [
        _unseen(f"longer than the window of {window} tokens", suite, 2 * window + 3 <= reach)
        for window in limits.windows
        if window not in crossed
    ]
    if limits.switch and limits.switch < (limits.max_positions or LONGEST[suite]):
        if limits.switch < most:
            sizes = [min(limits.switch + LONG, most), limits.switch]
            rows += [(f"beyond the original context of {limits.switch}", sizes, "left")]
        else:
            what = f"beyond the original context of {limits.switch} tokens"
            left.append(_unseen(what, suite, limits.switch < reach))
    made = [_batch(name, [min(size, most) for size in sizes], side, limits) for name, sizes, side in rows]
    sizes = [min(size, most) for size in (14, 9, 11)]
    if not pools:
        made.append(_with_holes(_batch("places without a token inside the texts", sizes, "left", limits), limits))
    if takes_positions:
        made.append(_with_gaps(_batch("positions with gaps", sizes, "right", limits), most))
    return made, left[:1]


def _unseen(texts: str, suite: str, is_reached: bool) -> str:
    """The faults that no text shows, in words; `is_reached` is whether those of the full suite do."""
    return f"faults of texts {texts}" + (" (`--suite full` runs some)" if is_reached and suite != "full" else "")


def _with_holes(texts: Texts, limits: TextLimits) -> Texts:
    """The same texts with places that the mask leaves out."""
    mask, ids = texts.attention_mask.copy(), texts.input_ids.copy()
    for place in HOLES:
        mask[:, -place:][:, :1] = 0
    if limits.padding is not None:
        ids = np.where(mask == 1, ids, limits.padding)
    return replace(texts, input_ids=ids, attention_mask=mask)


def _with_gaps(texts: Texts, most: int) -> Texts:
    """The same texts at positions that leave out some, and as a client packs them: each row begins elsewhere."""
    positions = default_positions(texts.attention_mask, texts.attention_mask.shape[1])
    starts = np.arange(len(positions), dtype=np.int64)[:, None] * 2
    return replace(texts, position_ids=np.minimum(2 * positions + positions // 4 + starts, most - 1))


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
