"""The table of scenarios: one row each, with a public bug that it would have caught.

A scenario consists of chains; a chain consists of calls, each of which continues the cache of the call before. The same
calls run on the eager model and on every graph. All tokens, also those of padding, are random and seeded by the
scenario's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import (
    MIB,
    Call,
    Chain,
    ModelFacts,
    PastEdit,
    SyntheticPast,
    at_limits,
    chain,
    continuing,
    drawn,
    elements_per_token,
    full_mask,
    holes_mask,
    moved,
    pieces,
    ragged_mask,
)

CROSSING = (3, 1, 5)
"""New tokens of the calls across the edge of a window; the last reach the edge of a chunk even after padding."""

BEFORE = 2  # tokens between the past and the edge of the window
PADDING = 5
LOUD = 10

QUICK = (30, 62, 126, 254, 1022)
MORE = (14, 46, 94, 158, 190, 318, 382, 510, 638, 766, 894, 1534, 2046, 3070, 4094, 8190, 16382, 32766)
THEN = (2, 1)  # new tokens of the calls: two after a past of these lengths, then one after a past of a multiple of 16
ROOM = {False: (1 << 24, 1 / 8), True: (1 << 26, 1 / 2)}
"""Largest synthetic cache, by whether the suite is full: elements, or a share of the model's parameters if larger."""

BYTES = 8  # bytes per element of the reference, which is float64


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
    least, share = ROOM[facts.thorough]
    return 2 * length * elements_per_token(facts.cache) <= max(least, int(share * facts.parameters))


def too_large(wanted: Callable[[ModelFacts], Sequence[int]]) -> Callable[[ModelFacts], str]:
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


MOST_NEW = 48  # the full suite runs every number of new tokens up to this, with and without a past
PIECES = (1, 5, 6, 8, 9, 1, 10, 11, 12, 13)
LONGER_PIECES = (1, 24, 32, 16, 48)
"""New tokens of consecutive calls in the quick suite; other scenarios have pieces of 2, 3, 4 and 7 tokens."""

LONGEST = 128
LONGEST_WITH_STATES = 64
"""Tokens of one chain; shorter for layers with states, where the model recomputes all tokens in every call."""

ROWS, COLUMNS, WIDE = 6, 24, 64  # sequences and tokens of a call with spread positions; `WIDE` is for the full suite
EVERY = 4096  # number of positions in the full suite: all of a shorter context, evenly spaced ones of a longer context
RAGGED = (3, 9, 1, 7, 5, 2)  # tokens of six prompts; the first is padded: its mask and length cannot serve for all


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
    """Ascending positions below `end`, first and last included: all, or one from each of `count` equal ranges."""
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


WINDOW_LIMITS = {False: (64, 512), True: (64, 1024)}
"""By whether the suite is full: largest window crossed in every way, and in one way; synthetic pasts cross all."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    name: str  # unique, as printed
    bug: str  # a public bug of this kind, and its effect
    # returns the calls for a model; empty where the scenario does not apply
    chains: Callable[[ModelFacts, np.random.Generator], list[Chain]]
    suite: str = "quick"  # `quick` scenarios also run in `full`
    # why some chains that apply to the model are not run; empty if all are
    left_out: Callable[[ModelFacts], str] = lambda facts: ""

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def build(self, facts: ModelFacts) -> list[Chain]:
        """The calls, equal in every run; chains longer than the model's context are left out."""
        chains = self.chains(facts, np.random.default_rng(self.seed))
        limit = facts.max_positions or 1 << 40
        return [chain for chain in chains if max(int(call.position_ids.max()) for call in chain) < limit]


def _calls(mask: Array, *lengths: int) -> Callable[[ModelFacts, np.random.Generator], list[Chain]]:
    """One chain of calls with these numbers of new tokens."""
    return lambda facts, rng: [chain(mask, lengths, facts, rng)]


def _every_split(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    ids = rng.bit_generator.state
    chains = []
    for cut in range(1, 9):
        rng.bit_generator.state = ids  # the same prompt each time
        chains.append(chain(full_mask(1, 9), [cut, 9 - cut], facts, rng))
    return chains


def _window(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Prompts and steps across the edges of short windows; for longer windows one prompt next to a short one."""
    every, once = WINDOW_LIMITS[facts.thorough]
    chains = []
    for width in facts.windows:
        if width <= every:
            lengths, before = (width, width + 1, 2 * width + 3), max(1, width - 2)
            chains += [chain(full_mask(1, length), [length], facts, rng) for length in lengths]
            chains.append(chain(full_mask(1, width + 3), [before, *[1] * (width + 3 - before)], facts, rng))
        if width <= once:
            chains.append(chain(ragged_mask((width + 4, 3), 2, "left"), [width + 4, 1, 1], facts, rng))
    return chains


def _edge_tokens(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """First and last token alone and in a batch, then their neighbors and those of the padding token."""
    last = facts.vocab_size - 1
    wanted = [1, last - 1, *([facts.padding + by for by in (-1, 0, 1)] if isinstance(facts.padding, int) else [])]
    others = np.array([[token for token in wanted if 0 <= token <= last]], dtype=np.int64)
    ids = np.array([[0, last, 0, 0, last]], dtype=np.int64)
    rolled = np.concatenate([np.roll(ids, by, axis=1)[:, :2] for by in range(5)])
    masks = [(ids, full_mask(1, 5)), (rolled, full_mask(5, 2)), (others, full_mask(*others.shape))]
    return [[Call(tokens, mask, default_positions(mask, mask.shape[1]))] for tokens, mask in masks]


def _high_positions(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if not facts.takes_positions:
        return []
    return [chain(full_mask(4, 9), [6, 1, 2], facts, rng, jumps=True)]


def _context_end(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if not facts.takes_positions or not facts.max_positions or facts.max_positions < 8:
        return []
    return [moved(chain(full_mask(1, 8), [4, 4], facts, rng), facts.max_positions - 8)]


def _context_middle(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if not facts.takes_positions or not facts.max_positions or facts.max_positions < 64:
        return []
    return [moved(chain(full_mask(1, 8), [6, 1, 1], facts, rng), facts.max_positions // 2)]


def _original_context(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Prompts on both sides of the original context's end, steps across it, and a batch with one row beyond it."""
    if not facts.takes_positions or not facts.original:
        return []
    border = facts.original
    prompts = [moved(chain(full_mask(1, 6), [6], facts, rng), at) for at in (border - 7, border - 6, border)]
    stepping = moved(chain(full_mask(1, 7), [3, 1, 1, 1, 1], facts, rng), border - 5)
    far = moved(chain(full_mask(2, 6), [5, 1], facts, rng), 2 * border)
    apart = [replace(call, position_ids=call.position_ids - [[0], [2 * border]]) for call in far]
    return [*prompts, stepping, far, apart]


def _exchanged(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Two exchanges of rows, with padding, as in a beam search."""
    if facts.no_edits:
        return []
    mask = ragged_mask((7, 4, 2), 3, "left")
    calls = chain(mask, [7, 1, 1, 1], facts, rng)
    kept = np.arange(3)
    for at, rows in ((1, (2, 0, 0)), (3, (1, 2, 0))):
        kept = kept[list(rows)]
        calls[at] = replace(calls[at], edit=PastEdit(rows=rows))
        for later in range(at, len(calls)):
            positions = default_positions(mask[kept], mask.shape[1])[:, 6 + later : 7 + later]
            width = calls[later].attention_mask.shape[1]
            calls[later] = replace(calls[later], attention_mask=mask[kept, :width], position_ids=positions)
    return [calls]


def _taken_back(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """A draft of four tokens, three of which are removed."""
    if facts.keeps_states or facts.no_edits:
        return []
    first = chain(full_mask(2, 10), [6, 4], facts, rng)
    second = chain(full_mask(2, 10), [7, 1, 2], facts, rng)[1:]
    return [[*first, replace(second[0], edit=PastEdit(drop=3)), second[1]]]


def _holes(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    mask = holes_mask(4, 40, rng)
    if facts.keeps_states:  # transformers ignores the mask of a single new token
        mask[:, 33] = 1
    return [chain(mask, [33, 1, 6], facts, rng)]


def _garbage(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if facts.no_edits:
        return []
    calls = chain(ragged_mask((3, 9), 2, "left"), [9, 1, 1], facts, rng)
    return [[calls[0], *(replace(call, edit=PastEdit(garbage=facts.garbage)) for call in calls[1:])]]


def _greedy(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if facts.greedy is None:
        return []
    prompt = rng.integers(0, facts.vocab_size, (1, 8))
    ids = facts.greedy(prompt, 32)
    mask = full_mask(1, ids.shape[1])
    return [pieces(ids, mask, default_positions(mask, ids.shape[1]), [8, *[1] * (ids.shape[1] - 8)])]


def _repeated(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Two equal rows of repeated tokens, then steps with the same token."""
    runs, steps = (3, 1, 2, 4), 3
    row = np.repeat(rng.integers(0, facts.vocab_size, len(runs)), runs)
    ids = np.tile([*row, *[row[-1]] * steps], (2, 1))
    mask = full_mask(*ids.shape)
    return [pieces(ids, mask, default_positions(mask, ids.shape[1]), [sum(runs), *[1] * steps])]


def _extra_values(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """The defaults of all extra inputs, their first and last valid values, equal in all rows, and random ones."""
    if not facts.extra_inputs:
        return []
    calls = chain(ragged_mask((7, 4, 2), 3, "left"), [7, 1, 2], facts, rng)
    ends = [at_limits(calls, facts.extra_inputs, last=last) for last in (False, True)]
    mixed = drawn(calls, facts.extra_inputs, rng, both_ways=True)
    return [[replace(call, extras={}) for call in calls], *ends, mixed]


SCENARIOS = (
    *(
        Scenario(
            f"prefill, {length} token{'s' * (length > 1)}",
            "pytorch #148886: a dynamic length frozen at trace time",
            _calls(full_mask(1, length), length),
        )
        for length in (33, 1, 2, 3, 7)
    ),
    Scenario(
        "chunked prefill, pieces of 1 to 48 tokens",
        "optimum #1839: the decode graph assumed one new token",
        many_pieces,
    ),
    Scenario(
        "decode chain, 16 steps",
        "tinygrad #15949: the causal mask was not offset by the past",
        _calls(full_mask(1, 21), 5, *[1] * 16),
    ),
    Scenario(
        "one-token prompt",
        "transformers #30127: the mask branch for one query was frozen",
        lambda facts, rng: [chain(full_mask(rows, 4), [1, 1, 1, 1], facts, rng) for rows in (1, 4)],
    ),
    Scenario("batch of 3", "pytorch #140011: batch size 1 baked into the graph", _calls(full_mask(3, 9), 7, 1, 1)),
    Scenario(
        "left padding",
        "optimum #1381: ragged batches wrong for lack of position_ids",
        _calls(ragged_mask((4, 11, 1), 3, "left"), 11, 1, 1, 1),
    ),
    Scenario(
        "right padding", "onnxruntime #4330: GPT-2 padding support", _calls(ragged_mask((8, 5, 2), 2, "right"), 8, 1, 1)
    ),
    Scenario(
        "holes in the mask",
        "onnxruntime #18945: a fusion took the mask for a length",
        lambda facts, rng: [chain(holes_mask(2, 12, rng), [9, 2, 1], facts, rng)],
    ),
    Scenario(
        "sliding window crossed", "tract #2323: the window was dropped, fine until the context outgrew it", _window
    ),
    Scenario(
        "window crossed behind a made-up past",
        "mobius #371: the window of 4,096 was missing, which no short test reaches",
        crossed_windows,
        left_out=too_large(_windows),
    ),
    Scenario(
        "pasts of 30 to 1,022 tokens",
        "cascadia #151: fine below 1,024 tokens, degenerate beyond",
        quick_pasts,
        left_out=too_large(lambda facts: _within(QUICK, facts)),
    ),
    Scenario("batch of 6", "genai #1639: the mask was read with the stride of one row", batch_of_six),
    Scenario(
        "positions over the whole context",
        "onnxruntime #19801: a table of positions shorter than the context",
        spread_positions,
    ),
    Scenario("positions with gaps", "optimum #1381: position_ids declared but not used", _high_positions),
    Scenario("end of the context", "sparseml #1826: rotary table folded at export length", _context_end),
    Scenario("middle of the context", "gpt-neox #1003: rotary angles in half precision", _context_middle),
    Scenario(
        "beyond the original context",
        "optimum-intel #913: the switch to other rotary frequencies frozen",
        _original_context,
    ),
    Scenario(
        "equal rows of repeated tokens",
        "onnxruntime #5672: equal rows got other results than different ones",
        _repeated,
    ),
    Scenario(
        "first and last values of extra inputs", "setfit #446: token_type_ids taken for another input", _extra_values
    ),
    Scenario("first and last token", "genai #2306: head and embedding mixed up", _edge_tokens),
    Scenario(
        "a row of padding only",
        "pytorch #159973: NaN where a row sees nothing",
        _calls(ragged_mask((6, 0), 3, "left"), 6, 1, 2),
    ),
    Scenario(
        "second turn",
        "transformers #30311: the mask of several tokens after a past was that of a prompt",
        _calls(full_mask(1, 19), 5, 1, 7, 1, 3, 2),
    ),
    Scenario(
        "rows exchanged",
        "transformers #46612: beams went on without their cache",
        _exchanged,
        left_out=lambda facts: facts.no_edits,
    ),
    Scenario(
        "tokens taken back",
        "optimum #1924: another text after a rejected draft",
        _taken_back,
        left_out=lambda facts: "" if facts.keeps_states else facts.no_edits,
    ),
    Scenario(
        "garbage under the mask",
        "transformers #13175: NaN from slots that were never written",
        _garbage,
        left_out=lambda facts: facts.no_edits,
    ),
    *(
        Scenario(
            f"prefill, {length} tokens",
            "sparseml #1826: output decays beyond the traced length",
            _calls(full_mask(1, length), length),
            "full",
        )
        for length in (16, 17, 64, 65, 127)
    ),
    Scenario(
        "chunked prefill, every split of 9 tokens",
        "optimum #1839: the decode graph assumed one new token",
        _every_split,
        "full",
    ),
    Scenario(
        "every number of new tokens, 1 to 48",
        "pytorch #148886: a dynamic length frozen at trace time",
        every_number,
        "full",
    ),
    Scenario("every batch size, 1 to 6", "pytorch #140011: batch size 1 baked into the graph", every_batch, "full"),
    Scenario(
        "every position of the context",
        "onnxruntime #19801: a table of positions shorter than the context",
        every_position,
        "full",
    ),
    Scenario(
        "pasts of 14 tokens to the end of the context",
        "cascadia #151: fine below 1,024 tokens, degenerate beyond",
        more_pasts,
        "full",
        too_large(lambda facts: _within(_more(facts), facts)),
    ),
    Scenario(
        "decode chain, 64 steps",
        "cascadia #151: fine at first, degenerate later",
        _calls(full_mask(2, 67), 3, *[1] * 64),
        "full",
    ),
    Scenario(
        "greedy continuation, 32 tokens",
        "cascadia #151: fine at first, degenerate later",
        _greedy,
        "full",
        lambda facts: "" if facts.greedy else facts.no_edits,
    ),
    Scenario(
        "one step after 130 tokens",
        "tinygrad #15949: the causal mask was not offset by the past",
        _calls(full_mask(1, 133), 130, 1, 2),
        "full",
    ),
    Scenario(
        "holes in the mask, batch of 4", "genai #1639: the mask was read with the stride of one row", _holes, "full"
    ),
    Scenario(
        "batch of 5, second turn",
        "transformers #13175: an attention mask shorter than past and new tokens",
        _calls(ragged_mask((13, 9, 6, 2, 1), 9, "left"), 13, 1, 1, 7),
        "full",
    ),
)
