"""What is run: each scenario is one row, with the public bug that it would have caught.

A scenario is a few chains; a chain is a few calls, each continuing the cache that the call before it made. The same
calls run on the eager model and on every graph. Tokens are random but seeded by the scenario's name, padding included:
what lies under a zero of the mask is garbage on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array

LENGTHS = (33, 1, 2, 3, 7)
LONG_LENGTHS = (16, 17, 64, 65, 127)
STEPS = 16
WINDOW_LIMIT = 512
"""A sliding window is crossed when it is at most so long; longer ones cost too much in float64."""


@dataclass(frozen=True)
class Facts:
    """What scenarios must know of a model.

    Attributes:
        vocab_size: rows of the embedding.
        max_positions: longest context that the model can take at all; None for no limit.
        window: tokens that a sliding layer sees; None without one.
        takes_positions: whether `position_ids` reach the model.
    """

    vocab_size: int
    max_positions: int | None = None
    window: int | None = None
    takes_positions: bool = True


@dataclass(frozen=True)
class Call:
    """One call of a runner; see `Runner.prefill` for shapes.

    Attributes:
        uniform: positions are those that the mask implies, so a graph without `position_ids` can run the call.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    uniform: bool = True

    @property
    def valid(self) -> Array:
        """Bool [batch, new tokens]: the tokens that are not padding."""
        valid: Array = self.attention_mask[:, self.attention_mask.shape[1] - self.input_ids.shape[1] :] == 1
        return valid


Chain = list[Call]


@dataclass(frozen=True)
class Scenario:
    """One row of the matrix.

    Attributes:
        name: unique, as printed.
        bug: a public bug of this kind, and what it broke.
        chains: makes the calls for a model; an empty list where the scenario does not apply.
        suite: `quick` scenarios also run in `full`.
    """

    name: str
    bug: str
    chains: Callable[[Facts, np.random.Generator], list[Chain]]
    suite: str = "quick"

    def build(self, facts: Facts) -> list[Chain]:
        """The calls, the same ones for every run; chains too long for the model are left out."""
        chains = self.chains(facts, np.random.default_rng(zlib.crc32(self.name.encode())))
        limit = facts.max_positions or 1 << 40
        return [chain for chain in chains if max(int(call.position_ids.max()) for call in chain) < limit]


def chain(mask: Array, lengths: Sequence[int], facts: Facts, rng: np.random.Generator, jumps: bool = False) -> Chain:
    """Calls that feed one batch piece by piece.

    Args:
        mask: [batch, sum of lengths], 0 where a token is padding.
        lengths: new tokens of each call.
        facts: for the vocabulary.
        rng: makes the tokens.
        jumps: positions start high and leave gaps, instead of counting the mask.
    """
    ids = rng.integers(0, facts.vocab_size, mask.shape)
    positions = default_positions(mask, mask.shape[1])
    if jumps:
        positions = np.cumsum(rng.integers(1, 4, mask.shape), axis=1) + (facts.max_positions or 200) // 4
    calls, done = [], 0
    for length in lengths:
        new = slice(done, done + length)
        calls.append(Call(ids[:, new], mask[:, : new.stop], positions[:, new], uniform=not jumps))
        done += length
    return calls


def full_mask(batch: int, length: int) -> Array:
    """No padding."""
    return np.ones((batch, length), dtype=np.int64)


def ragged_mask(lengths: Sequence[int], steps: int, side: str) -> Array:
    """Prompts of several lengths padded on one side, then `steps` tokens that all rows have."""
    longest = max(lengths)
    rows = [[0] * (longest - length) + [1] * length for length in lengths]
    if side == "right":
        rows = [row[::-1] for row in rows]
    return np.array([row + [1] * steps for row in rows], dtype=np.int64)


def holes_mask(batch: int, length: int, rng: np.random.Generator) -> Array:
    """Zeros in the middle of the mask, in other places for each row; first and last token stay."""
    mask: Array = (rng.random((batch, length)) > 0.35).astype(np.int64)
    mask[:, [0, -1]] = 1
    mask[:, length // 2] = 0
    return mask


def _prefill(length: int) -> Callable[[Facts, np.random.Generator], list[Chain]]:
    return lambda facts, rng: [chain(full_mask(1, length), [length], facts, rng)]


def _every_split(facts: Facts, rng: np.random.Generator) -> list[Chain]:
    ids = rng.bit_generator.state
    chains = []
    for cut in range(1, 9):
        rng.bit_generator.state = ids  # the same prompt each time
        chains.append(chain(full_mask(1, 9), [cut, 9 - cut], facts, rng))
    return chains


def _window(facts: Facts, rng: np.random.Generator) -> list[Chain]:
    if not facts.window or facts.window > WINDOW_LIMIT:
        return []
    width = facts.window
    across = [chain(full_mask(1, length), [length], facts, rng) for length in (width, width + 1, 2 * width + 3)]
    stepping = chain(full_mask(1, width + 3), [max(1, width - 2), *[1] * (width + 3 - max(1, width - 2))], facts, rng)
    padded = chain(ragged_mask((width + 4, 3), 2, "left"), [width + 4, 1, 1], facts, rng)
    return [*across, stepping, padded]


def _edge_tokens(facts: Facts, rng: np.random.Generator) -> list[Chain]:
    last = facts.vocab_size - 1
    ids = np.array([[0, last, 0, 0, last]], dtype=np.int64)
    mask = full_mask(1, 5)
    return [[Call(ids, mask, default_positions(mask, 5))]]


def _high_positions(facts: Facts, rng: np.random.Generator) -> list[Chain]:
    if not facts.takes_positions:
        return []
    return [chain(full_mask(2, 9), [6, 1, 2], facts, rng, jumps=True)]


def _context_end(facts: Facts, rng: np.random.Generator) -> list[Chain]:
    if not facts.takes_positions or not facts.max_positions or facts.max_positions < 8:
        return []
    mask = full_mask(1, 8)
    calls = chain(mask, [4, 4], facts, rng)
    shift = facts.max_positions - 8
    return [[Call(c.input_ids, c.attention_mask, c.position_ids + shift, uniform=False) for c in calls]]


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
        "chunked prefill, every split of 9 tokens",
        "optimum #1839: the decode graph assumed one new token",
        _every_split,
    ),
    Scenario(
        "decode chain, 16 steps",
        "tinygrad #15949: the causal mask was not offset by the past",
        lambda facts, rng: [chain(full_mask(1, 5 + STEPS), [5, *[1] * STEPS], facts, rng)],
    ),
    Scenario(
        "one-token prompt",
        "transformers #30127: the mask branch for one query was frozen",
        lambda facts, rng: [chain(full_mask(1, 4), [1, 1, 1, 1], facts, rng)],
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
    Scenario("positions with gaps", "optimum #1381: position_ids declared but not used", _high_positions),
    Scenario("end of the context", "sparseml #1826: rotary table folded at export length", _context_end),
    Scenario("first and last token", "genai #2306: head and embedding mixed up", _edge_tokens),
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
        "decode chain, 64 steps",
        "cascadia #151: fine at first, degenerate later",
        lambda facts, rng: [chain(full_mask(2, 67), [3, *[1] * 64], facts, rng)],
        "full",
    ),
    Scenario(
        "batch of 5, second turn",
        "transformers #13175: an attention mask shorter than past and new tokens",
        lambda facts, rng: [chain(ragged_mask((13, 9, 6, 2, 1), 9, "left"), [13, 1, 1, 7], facts, rng)],
        "full",
    ),
)


def scenarios(suite: str, facts: Facts) -> list[tuple[Scenario, list[Chain]]]:
    """The scenarios of a suite that apply to a model, with their calls."""
    chosen = [scenario for scenario in SCENARIOS if suite == "full" or scenario.suite == "quick"]
    built = [(scenario, scenario.build(facts)) for scenario in chosen]
    return [(scenario, chains) for scenario, chains in built if chains]
