"""Scenarios that continue a synthetic cache: windows of any size, and pasts of thousands of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmconv.verify.scenarios.calls import Chain, ModelFacts, continuing
from llmconv.verify.scenarios.synthetic_past import MIB, SyntheticPast, elements_per_token

CROSSING = (3, 1, 5)
"""New tokens of the calls across the edge of a window; the last reach the edge of a chunk even after padding."""

BEFORE = 2
"""Tokens between the past and the edge of the window."""

PADDING = 5
LOUD = 10

QUICK = (30, 62, 126, 254, 1022)
MORE = (14, 46, 94, 158, 190, 318, 382, 510, 638, 766, 894, 1534, 2046, 3070, 4094, 8190, 16382, 32766)
THEN = (2, 1)
"""New tokens of the calls: two after a past of these lengths, then one after a past of a multiple of 16."""

ROOM = {False: (1 << 24, 1 / 8), True: (1 << 26, 1 / 2)}
"""Largest synthetic cache, by whether the suite is full: elements, or a share of the model's parameters if larger."""

BYTES = 8
"""Bytes per element of the reference, which is float64."""

RowCounts = Callable[[ModelFacts], Sequence[int]]


def crossed_windows(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """A few tokens across the edge of every window and chunk; the tokens just outside have large values."""
    chains = []
    for window in _windows(facts):
        if fits(window, facts):
            past = _past(facts, window - BEFORE, (0, LOUD), rng)
            chains.append(continuing(past, _lengths(CROSSING, facts), facts, rng, min(PADDING, window - BEFORE - 1)))
    return chains


def _windows(facts: ModelFacts) -> list[int]:
    """Windows whose edge lies within the context; others are never crossed."""
    limit = facts.max_positions or 1 << 40
    return [window for window in facts.windows if 2 * BEFORE < window < limit - sum(CROSSING)]


def quick_pasts(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """A few tokens after pasts of several lengths, and at the end of the context if the past fits into memory."""
    return _after([*QUICK, *_end(facts)], facts, rng)  # the end is optional here: `more_pasts` reports it as left out


def more_pasts(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """A few tokens after pasts of more lengths, up to the end of the context."""
    return _after(_more(facts), facts, rng)


def _more(facts: ModelFacts) -> list[int]:
    return sorted({*MORE, *_end(facts)})


def _end(facts: ModelFacts) -> list[int]:
    """The length of the past after which the calls fill the context, in a list; empty without a limit."""
    end = facts.max_positions
    return [end - sum(THEN)] if end and end > 2 * sum(THEN) else []


def _after(lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    return [
        continuing(_past(facts, length, (0, 0), rng, rows=1), _lengths(THEN, facts), facts, rng)
        for length in _within(lengths, facts)
        if fits(length, facts)
    ]


def _within(lengths: Sequence[int], facts: ModelFacts) -> list[int]:
    """The lengths that fit into the context."""
    return [length for length in lengths if length + sum(THEN) <= (facts.max_positions or 1 << 40)]


def _past(
    facts: ModelFacts, length: int, loud: tuple[int, int], rng: np.random.Generator, rows: int = 2
) -> SyntheticPast:
    return SyntheticPast(facts.cache, rows, length, loud, int(rng.integers(1 << 30)))


def _lengths(lengths: Sequence[int], facts: ModelFacts) -> list[int]:
    """The lengths; single tokens for layers with states, which transformers continues only token by token."""
    return [1] * sum(lengths) if facts.keeps_states else list(lengths)


def fits(length: int, facts: ModelFacts) -> bool:
    """Whether the cache of two sequences of `length` tokens is small compared with the model."""
    if facts.no_synthetic_past or not elements_per_token(facts.cache):
        return False
    return 2 * length * elements_per_token(facts.cache) <= _room(facts)


def _room(facts: ModelFacts) -> int:
    least, share = ROOM[facts.thorough]
    return max(least, int(share * facts.parameters))


def too_large(wanted: RowCounts) -> Callable[[ModelFacts], str]:
    """A function that returns why some of the wanted lengths are not run; empty if all are."""

    def reason(facts: ModelFacts) -> str:
        if facts.no_synthetic_past:
            return facts.no_synthetic_past if wanted(facts) else ""
        if not elements_per_token(facts.cache):
            return ""  # only states, which have no length
        left = [length for length in wanted(facts) if not fits(length, facts)]
        if not left:
            return ""
        needed = 2 * max(left) * elements_per_token(facts.cache) * BYTES // MIB
        more = "" if facts.thorough else "; `--suite full` has more room"
        return f"past of {' and '.join(map(str, left))} tokens left out: the cache takes {needed:,} MiB{more}"

    return reason


windows_left_out = too_large(_windows)
quick_left_out = too_large(lambda facts: _within(QUICK, facts))
more_left_out = too_large(lambda facts: _within(_more(facts), facts))
