"""The table of scenarios: one row each, with a public bug that it would have caught.

A scenario consists of chains; a chain consists of calls, each of which continues the cache of the call before. The same
calls run on the eager model and on every graph. All tokens, also those of padding, are random and seeded by the
scenario's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.verify.scenarios import long_pasts, sweep
from llmconv.verify.scenarios.calls import (
    CacheEdit,
    Call,
    Chain,
    ModelFacts,
    chain,
    full_mask,
    holes_mask,
    moved,
    pieces,
    ragged_mask,
)
from llmconv.verify.scenarios.extra_draws import at_limits, drawn

LENGTHS = (33, 1, 2, 3, 7)
LONG_LENGTHS = (16, 17, 64, 65, 127)
STEPS = 16
GREEDY_STEPS = 32
WINDOW_LIMITS = {False: (64, 512), True: (64, 1024)}
"""By whether the suite is full: largest window crossed in every way, and in one way; synthetic pasts cross all."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes:
        name: unique, as printed.
        bug: a public bug of this kind, and its effect.
        chains: returns the calls for a model; empty where the scenario does not apply.
        suite: `quick` scenarios also run in `full`.
        left_out: why some chains that apply to the model are not run; empty if all are.
    """

    name: str
    bug: str
    chains: Callable[[ModelFacts, np.random.Generator], list[Chain]]
    suite: str = "quick"
    left_out: Callable[[ModelFacts], str] = lambda facts: ""

    @property
    def seed(self) -> int:
        """Seed of the tokens."""
        return zlib.crc32(self.name.encode())

    def build(self, facts: ModelFacts) -> list[Chain]:
        """The calls, equal in every run; chains longer than the model's context are left out."""
        chains = self.chains(facts, np.random.default_rng(self.seed))
        limit = facts.max_positions or 1 << 40
        return [chain for chain in chains if max(int(call.position_ids.max()) for call in chain) < limit]


def _prefill(length: int) -> Callable[[ModelFacts, np.random.Generator], list[Chain]]:
    return lambda facts, rng: [chain(full_mask(1, length), [length], facts, rng)]


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
        chains += _crossed(width, facts, rng) if width <= every else []
        if width <= once:
            chains.append(chain(ragged_mask((width + 4, 3), 2, "left"), [width + 4, 1, 1], facts, rng))
    return chains


def _crossed(width: int, facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    across = [chain(full_mask(1, length), [length], facts, rng) for length in (width, width + 1, 2 * width + 3)]
    before = max(1, width - 2)
    return [*across, chain(full_mask(1, width + 3), [before, *[1] * (width + 3 - before)], facts, rng)]


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


def _no_token(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    mask = ragged_mask((6, 0), 3, "left")
    return [chain(mask, [6, 1, 2], facts, rng)]


def _exchanged(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    """Two exchanges of rows, with padding, as in a beam search."""
    if facts.no_edits:
        return []
    mask = ragged_mask((7, 4, 2), 3, "left")
    calls = chain(mask, [7, 1, 1, 1], facts, rng)
    kept = np.arange(3)
    for at, rows in ((1, (2, 0, 0)), (3, (1, 2, 0))):
        kept = kept[list(rows)]
        calls[at] = replace(calls[at], edit=CacheEdit(rows=rows))
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
    return [[*first, replace(second[0], edit=CacheEdit(drop=3)), second[1]]]


def _holes(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    mask = holes_mask(4, 40, rng)
    if facts.keeps_states:  # transformers ignores the mask of a single new token
        mask[:, 33] = 1
    return [chain(mask, [33, 1, 6], facts, rng)]


def _garbage(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if facts.no_edits:
        return []
    calls = chain(ragged_mask((9, 3), 2, "left"), [9, 1, 1], facts, rng)
    return [[calls[0], *(replace(call, edit=CacheEdit(garbage=facts.garbage)) for call in calls[1:])]]


def _greedy(facts: ModelFacts, rng: np.random.Generator) -> list[Chain]:
    if facts.greedy is None:
        return []
    prompt = rng.integers(0, facts.vocab_size, (1, 8))
    ids = facts.greedy(prompt, GREEDY_STEPS)
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
            _prefill(length),
        )
        for length in LENGTHS
    ),
    Scenario(
        "chunked prefill, pieces of 1 to 48 tokens",
        "optimum #1839: the decode graph assumed one new token",
        sweep.many_pieces,
    ),
    Scenario(
        "decode chain, 16 steps",
        "tinygrad #15949: the causal mask was not offset by the past",
        lambda facts, rng: [chain(full_mask(1, 5 + STEPS), [5, *[1] * STEPS], facts, rng)],
    ),
    Scenario(
        "one-token prompt",
        "transformers #30127: the mask branch for one query was frozen",
        lambda facts, rng: [chain(full_mask(rows, 4), [1, 1, 1, 1], facts, rng) for rows in (1, 4)],
    ),
    Scenario(
        "batch of 3",
        "pytorch #140011: batch size 1 baked into the graph",
        lambda facts, rng: [chain(full_mask(3, 9), [7, 1, 1], facts, rng)],
    ),
    Scenario(
        "left padding",
        "optimum #1381: ragged batches wrong for lack of position_ids",
        lambda facts, rng: [chain(ragged_mask((11, 4, 1), 3, "left"), [11, 1, 1, 1], facts, rng)],
    ),
    Scenario(
        "right padding",
        "onnxruntime #4330: GPT-2 padding support",
        lambda facts, rng: [chain(ragged_mask((8, 5, 2), 2, "right"), [8, 1, 1], facts, rng)],
    ),
    Scenario(
        "holes in the mask",
        "onnxruntime #18945: a fusion took the mask for a length",
        lambda facts, rng: [chain(holes_mask(2, 12, rng), [9, 2, 1], facts, rng)],
    ),
    Scenario(
        "sliding window crossed",
        "tract #2323: the window was dropped, fine until the context outgrew it",
        _window,
    ),
    Scenario(
        "window crossed behind a made-up past",
        "mobius #371: the window of 4,096 was missing, which no short test reaches",
        long_pasts.crossed_windows,
        left_out=long_pasts.windows_left_out,
    ),
    Scenario(
        "pasts of 30 to 1,022 tokens",
        "cascadia #151: fine below 1,024 tokens, degenerate beyond",
        long_pasts.quick_pasts,
        left_out=long_pasts.quick_left_out,
    ),
    Scenario("batch of 6", "genai #1639: the mask was read with the stride of one row", sweep.batch_of_six),
    Scenario(
        "positions over the whole context",
        "onnxruntime #19801: a table of positions shorter than the context",
        sweep.spread_positions,
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
        "first and last values of extra inputs",
        "setfit #446: token_type_ids taken for another input",
        _extra_values,
    ),
    Scenario("first and last token", "genai #2306: head and embedding mixed up", _edge_tokens),
    Scenario("a row of padding only", "pytorch #159973: NaN where a row sees nothing", _no_token),
    Scenario(
        "second turn",
        "transformers #30311: the mask of several tokens after a past was that of a prompt",
        lambda facts, rng: [chain(full_mask(1, 19), [5, 1, 7, 1, 3, 2], facts, rng)],
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
            _prefill(length),
            "full",
        )
        for length in LONG_LENGTHS
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
        sweep.every_number,
        "full",
    ),
    Scenario(
        "every batch size, 1 to 6", "pytorch #140011: batch size 1 baked into the graph", sweep.every_batch, "full"
    ),
    Scenario(
        "every position of the context",
        "onnxruntime #19801: a table of positions shorter than the context",
        sweep.every_position,
        "full",
    ),
    Scenario(
        "pasts of 14 tokens to the end of the context",
        "cascadia #151: fine below 1,024 tokens, degenerate beyond",
        long_pasts.more_pasts,
        "full",
        long_pasts.more_left_out,
    ),
    Scenario(
        "decode chain, 64 steps",
        "cascadia #151: fine at first, degenerate later",
        lambda facts, rng: [chain(full_mask(2, 67), [3, *[1] * 64], facts, rng)],
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
        lambda facts, rng: [chain(full_mask(1, 133), [130, 1, 2], facts, rng)],
        "full",
    ),
    Scenario(
        "holes in the mask, batch of 4",
        "genai #1639: the mask was read with the stride of one row",
        _holes,
        "full",
    ),
    Scenario(
        "batch of 5, second turn",
        "transformers #13175: an attention mask shorter than past and new tokens",
        lambda facts, rng: [chain(ragged_mask((13, 9, 6, 2, 1), 9, "left"), [13, 1, 1, 7], facts, rng)],
        "full",
    ),
)
