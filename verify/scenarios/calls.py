"""The calls that a scenario makes: tokens, masks, positions, and what happens to the cache in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.runner import Cache, default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.synthetic_past import SyntheticPast

GARBAGE = 1e6
"""Written under the zeros of a mask: more than a timid mask of -10,000 hides, and finite in bfloat16 and float32."""

GARBAGE_IN_FLOAT16 = 100.0
"""There larger ones overflow in the product of queries and keys, before they are masked, in the eager model too."""

GARBAGE_AFTER_FLOAT16 = 1e4
"""In a float32 copy of a float16 graph, whose mask is the lowest number of float16, -65,504."""


@dataclass(frozen=True)
class ModelFacts:
    """What scenarios must know of a model.

    Attributes:
        vocab_size: rows of the embedding.
        max_positions: longest context that the model can take at all; None for no limit.
        windows: tokens that sliding or chunked layers see, smallest first; empty without any.
        takes_positions: whether `position_ids` reach the model.
        original: tokens of the context before rotary scaling, where other frequencies begin; None without one.
        keeps_states: some layer keeps a state, of which no tokens can be taken back.
        no_edits: why caches cannot be changed between two calls; empty where they can.
        no_synthetic_past: why no past can be made up; empty where it can.
        cache: shapes of a cache of one sequence and one token, by the names of the graphs' outputs.
        parameters: of the model; a cache of many fewer numbers is no burden beside it.
        thorough: the suite is `full`, which has more room for made-up pasts.
        garbage: what lies under the mask of a cache.
        padding: the id of the token that stands for padding; None without one.
        greedy: continues one prompt [1, tokens] by the model's own likeliest tokens, so many.
    """

    vocab_size: int
    max_positions: int | None = None
    windows: tuple[int, ...] = ()
    takes_positions: bool = True
    original: int | None = None
    keeps_states: bool = False
    no_edits: str = ""
    no_synthetic_past: str = ""
    cache: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    thorough: bool = False
    garbage: float = GARBAGE
    padding: int | None = None
    greedy: Callable[[Array, int], Array] | None = None


@dataclass(frozen=True)
class CacheEdit:
    """What a client does to a cache between two calls.

    Attributes:
        rows: which sequence each row continues, as a beam search exchanges them; None for their own.
        drop: tokens at the end that are taken back, as a rejected draft is.
        garbage: what the mask hides is overwritten by this number; 0 leaves it as it is.
    """

    rows: tuple[int, ...] | None = None
    drop: int = 0
    garbage: float = 0.0

    def apply(self, cache: Cache, mask: Array) -> Cache:
        """The cache afterwards.

        Args:
            cache: of any runner; stays as it was.
            mask: of the tokens that are left in it, [batch, tokens]; a prefix in front of them is not masked.
        """
        if self == CacheEdit():
            return cache
        if isinstance(cache, EditableCache):
            return cache.edited(self, mask)
        arrays = {name: self.of_array(name, array, mask) for name, array in cache.arrays().items()}
        return EditedCache(arrays, cache.length - self.drop)

    def of_array(self, name: str, array: Array, mask: Array) -> Array:
        """One output of a cache afterwards; see `apply`."""
        array = array[list(self.rows)] if self.rows is not None else array.copy()
        if is_state(name):
            return array
        array = array[:, :, : array.shape[2] - self.drop]
        if self.garbage:
            array.transpose(0, 2, 1, 3)[:, array.shape[2] - mask.shape[1] :][mask == 0] = self.garbage
        return array


@runtime_checkable
class EditableCache(Protocol):
    """A cache that knows more than its arrays."""

    def edited(self, edit: CacheEdit, mask: Array) -> Cache:
        """See `CacheEdit.apply`."""


@dataclass(frozen=True)
class EditedCache:
    """A cache as arrays, see `runner.Cache`."""

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """By name."""
        return self.content


@dataclass(frozen=True)
class Call:
    """One call of a runner; see `Runner.prefill` for shapes.

    Attributes:
        uniform: positions are those that the mask implies, so a graph without `position_ids` can run the call.
        edit: what happens to the cache before it.
        start: the made-up past of a chain's first call; None where it begins with nothing.
        known: tokens of that past, for every call of the chain; they are not compared with the model's.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    uniform: bool = True
    edit: CacheEdit = field(default_factory=CacheEdit)
    start: SyntheticPast | None = None
    known: int = 0

    @property
    def past_mask(self) -> Array:
        """Of the tokens before the new ones, [batch, past tokens]."""
        return self.attention_mask[:, : self.attention_mask.shape[1] - self.input_ids.shape[1]]

    @property
    def valid(self) -> Array:
        """Bool [batch, new tokens]: the tokens that are not padding."""
        valid: Array = self.attention_mask[:, self.past_mask.shape[1] :] == 1
        return valid


Chain = list[Call]


def chain(
    mask: Array, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator, jumps: bool = False
) -> Chain:
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
    return pieces(ids, mask, positions, lengths, uniform=not jumps)


def pieces(ids: Array, mask: Array, positions: Array, lengths: Sequence[int], uniform: bool = True) -> Chain:
    """Calls of so many new tokens each, all arrays [batch, sum of lengths]."""
    calls, done = [], 0
    for length in lengths:
        new = slice(done, done + length)
        calls.append(Call(ids[:, new], mask[:, : new.stop], positions[:, new], uniform))
        done += length
    return calls


def continuing(
    past: SyntheticPast, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator, padding: int = 0
) -> Chain:
    """Calls of so many new tokens each that continue a made-up past, at the positions that follow it.

    Args:
        padding: slots that are masked at the start of the last row.
    """
    mask = full_mask(past.rows, past.length + sum(lengths))
    mask[-1, :padding] = 0
    ids = rng.integers(0, facts.vocab_size, (past.rows, sum(lengths)))
    positions = default_positions(mask, sum(lengths))
    calls = []
    for call in pieces(ids, mask[:, past.length :], positions, lengths):
        whole = mask[:, : past.length + call.attention_mask.shape[1]]
        calls.append(replace(call, attention_mask=whole, known=past.length))
    return [replace(calls[0], start=past), *calls[1:]]


def moved(calls: Chain, by: int) -> Chain:
    """The same calls at positions so much higher."""
    return [replace(call, position_ids=call.position_ids + by, uniform=False) for call in calls]


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
