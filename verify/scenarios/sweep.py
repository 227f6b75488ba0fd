"""Coverage: calls of many lengths, batch sizes and positions, so that a fault that asks for one of them is met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import Chain, ModelFacts, chain, full_mask, pieces, ragged_mask

MOST_NEW = 48
"""Every number of new tokens up to here is run by the full suite, after a past and without one."""

PIECES = (1, 5, 6, 8, 9, 1, 10, 11, 12, 13)
LONGER_PIECES = (1, 24, 32, 16, 48)
"""New tokens of the calls of the quick suite, which continue each other: many pasts at once. Pieces of 2, 3, 4 and 7
tokens are those of other scenarios."""

LONGEST = 128
LONGEST_WITH_STATES = 64
"""Tokens of one chain; where layers keep states the model runs all of them again in every call."""

ROWS, COLUMNS, WIDE = 6, 24, 64
"""Sequences and tokens of a call that spreads positions; the wide ones are the full suite's."""

EVERY = 4096
"""Positions that the full suite runs: all of a context of so many tokens, an even share of a longer one."""

RAGGED = (3, 9, 1, 7, 5, 2)
"""Tokens of six prompts; the first is padded, so that its mask cannot stand for those of the others."""


def packed(lengths: Sequence[int], facts: ModelFacts) -> Iterator[list[int]]:
    """Numbers of new tokens in their order, as few chains as fit the context; larger ones than that are left out."""
    limit = min(facts.max_positions or LONGEST, LONGEST_WITH_STATES if facts.keeps_states else LONGEST)
    group: list[int] = []
    for length in lengths:
        if sum(group) + length > limit and group:
            yield group
            group = []
        group += [length] if length <= limit else []
    if group:
        yield group


def many_pieces(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Chains whose calls have as many new tokens as `PIECES` says."""
    groups = [*packed(PIECES, facts), *packed(LONGER_PIECES, facts)]
    return [chain(full_mask(1, sum(group)), group, facts, rng) for group in groups]


def every_number(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Every number of new tokens up to `MOST_NEW`, first as a prompt, then after a past of another length."""
    then = rng.permutation(MOST_NEW) + 1
    pairs = [(first, int(then[first - 1])) for first in range(1, MOST_NEW + 1)]
    return [chain(full_mask(1, sum(pair)), pair, facts, rng) for pair in pairs]


def every_batch(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Every number of sequences up to six, of several lengths."""
    return [
        chain(ragged_mask(RAGGED[:rows], 4, "left"), [max(RAGGED[:rows]), 1, 3], facts, rng)
        for rows in range(1, ROWS + 1)
    ]


def batch_of_six(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Six sequences of several lengths: the prompt, a step, and three tokens after it."""
    return [chain(ragged_mask(RAGGED, 4, "left"), [max(RAGGED), 1, 3], facts, rng)]


def spread_positions(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Positions over the whole context, every one of a short context; below the border of rotary scaling once more."""
    if not facts.takes_positions:
        return []
    ends = [end for end in (facts.original, _context(facts)) if end]
    return [_at(spread(ROWS * COLUMNS, end, rng), (COLUMNS - 1, 1), facts, rng) for end in ends]


def every_position(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """All positions of a context of up to `EVERY` tokens; as many of a longer one."""
    if not facts.takes_positions:
        return []
    end, size = _context(facts), ROWS * WIDE
    positions = rng.permutation(spread(min(EVERY, -(-end // size) * size), end, rng))
    parts = np.array_split(positions, -(-len(positions) // size))
    return [_at(np.sort(np.resize(part, size)), (WIDE - 1, 1), facts, rng) for part in parts]


def spread(count: int, end: int, rng: np.random.Generator) -> Array:
    """So many positions below `end`, ascending: every one where they suffice, else one of each equal share.

    The first and the last position are always among them.
    """
    if end <= count:
        return np.sort(np.resize(np.arange(end), count))
    edges = np.linspace(0, end, count + 1).astype(np.int64)
    positions = rng.integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))
    positions[0], positions[-1] = 0, end - 1
    return positions


def _context(facts: ModelFacts) -> int:
    return facts.max_positions or EVERY


def _at(positions: Array, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator) -> Chain:
    """Calls whose rows take the positions in turns, so that each row goes over all of them."""
    table = positions.reshape(-1, ROWS).T
    ids = rng.integers(0, facts.vocab_size, table.shape)
    mask = full_mask(*table.shape)
    uniform = bool((table == default_positions(mask, table.shape[1])).all())
    return pieces(ids, mask, np.ascontiguousarray(table), lengths, uniform=uniform)
