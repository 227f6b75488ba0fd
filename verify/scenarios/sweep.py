"""Scenarios that sweep lengths, batch sizes and positions, to reach faults that depend on a single value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import Chain, ModelFacts, chain, full_mask, pieces, ragged_mask

MOST_NEW = 48
"""The full suite runs every number of new tokens up to this, with and without a past."""

PIECES = (1, 5, 6, 8, 9, 1, 10, 11, 12, 13)
LONGER_PIECES = (1, 24, 32, 16, 48)
"""New tokens of consecutive calls in the quick suite; other scenarios have pieces of 2, 3, 4 and 7 tokens."""

LONGEST = 128
LONGEST_WITH_STATES = 64
"""Tokens of one chain; shorter for layers with states, where the model recomputes all tokens in every call."""

ROWS, COLUMNS, WIDE = 6, 24, 64
"""Sequences and tokens of a call with spread positions; `WIDE` is for the full suite."""

EVERY = 4096
"""Number of positions in the full suite: all of a shorter context, evenly spaced ones of a longer context."""

RAGGED = (3, 9, 1, 7, 5, 2)
"""Tokens of six prompts; the first is padded, so that its mask cannot serve for all."""


def packed(lengths: Sequence[int], facts: ModelFacts) -> Iterator[list[int]]:
    """Groups of consecutive lengths, each within the context; longer lengths are left out."""
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
    """Chains whose calls have the numbers of new tokens in `PIECES` and `LONGER_PIECES`."""
    groups = [*packed(PIECES, facts), *packed(LONGER_PIECES, facts)]
    return [chain(full_mask(1, sum(group)), group, facts, rng) for group in groups]


def every_number(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Every number of new tokens up to `MOST_NEW`, as a prompt and after a past."""
    then = rng.permutation(MOST_NEW) + 1
    pairs = [(first, int(then[first - 1])) for first in range(1, MOST_NEW + 1)]
    return [chain(full_mask(1, sum(pair)), pair, facts, rng) for pair in pairs]


def every_batch(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Every batch size up to six, with prompts of several lengths."""
    return [
        chain(ragged_mask(RAGGED[:rows], 4, "left"), [max(RAGGED[:rows]), 1, 3], facts, rng)
        for rows in range(1, ROWS + 1)
    ]


def batch_of_six(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Six sequences of several lengths: the prompt, one step, then three tokens."""
    return [chain(ragged_mask(RAGGED, 4, "left"), [max(RAGGED), 1, 3], facts, rng)]


def spread_positions(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Positions spread over the whole context, and over the context before rotary scaling."""
    if not facts.takes_positions:
        return []
    ends = [end for end in (facts.original, _context(facts)) if end]
    return [_at(spread(ROWS * COLUMNS, end, rng), (COLUMNS - 1, 1), facts, rng) for end in ends]


def every_position(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """All positions of a context of up to `EVERY` tokens; `EVERY` positions of a longer one."""
    if not facts.takes_positions:
        return []
    end, size = _context(facts), ROWS * WIDE
    positions = rng.permutation(spread(min(EVERY, -(-end // size) * size), end, rng))
    parts = np.array_split(positions, -(-len(positions) // size))
    return [_at(np.sort(np.resize(part, size)), (WIDE - 1, 1), facts, rng) for part in parts]


def spread(count: int, end: int, rng: np.random.Generator) -> Array:
    """Ascending positions below `end`: all of them if `count` suffices, else one from each of `count` equal ranges.

    Args:
        count: number of positions to return.
        end: upper limit; 0 and `end - 1` are always included.
        rng: selects the position in each range.
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
    """Calls whose rows take the positions in turn, so that each row covers the whole range."""
    table = positions.reshape(-1, ROWS).T
    ids = rng.integers(0, facts.vocab_size, table.shape)
    mask = full_mask(*table.shape)
    uniform = bool((table == default_positions(mask, table.shape[1])).all())
    return pieces(ids, mask, np.ascontiguousarray(table), lengths, uniform=uniform)
