"""Call: the inputs of one model call in a scenario (tokens, mask, positions), and edits of the cache between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from llmconv.runtime.cache_names import is_state
from llmconv.runtime.extra_inputs import ExtraInput, ModelCall
from llmconv.runtime.runner import Cache, default_positions
from llmconv.tensors import Array
from llmconv.verify.scenarios.synthetic_past import SyntheticPast

GARBAGE = 1e6
"""Value of masked cache slots: too large for a weak mask of -10,000 to hide, finite in bfloat16 and float32."""

GARBAGE_IN_FLOAT16 = 100.0
"""Larger values overflow in the product of queries and keys before the mask, also in the eager model."""

GARBAGE_AFTER_FLOAT16 = 1e4
"""For a float32 copy of a float16 graph, whose mask is the lowest float16 number, -65,504."""


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that the scenarios depend on.

    Attributes:
        vocab_size: rows of the embedding.
        max_positions: maximum context length in tokens; None for no limit.
        windows: sizes in tokens of sliding windows and attention chunks, smallest first.
        takes_positions: whether the model uses `position_ids`.
        original: context length before rotary scaling, where other frequencies begin; None without rotary scaling.
        keeps_states: some layer keeps a recurrent state, from which no token can be removed.
        no_edits: why caches cannot be edited between two calls; empty if they can.
        no_synthetic_past: why synthetic pasts cannot be used; empty if they can.
        cache: cache shapes for one sequence and one token, by output name.
        parameters: number of parameters; limits the size of synthetic pasts.
        thorough: the suite is `full`, which allows larger synthetic pasts.
        garbage: value of masked cache slots.
        padding: id of the padding token; None without one.
        greedy: continues a prompt [1, tokens] by the given number of greedy tokens.
        extra_inputs: the extra inputs of the graphs by name, resolved.
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
    extra_inputs: Mapping[str, ExtraInput] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheEdit:
    """A change that a client makes to a cache between two calls.

    Attributes:
        rows: the sequence that each row continues, as in a beam search; None for no change.
        drop: number of tokens removed from the end, as after a rejected draft.
        garbage: value written to masked slots; 0 for no change.
    """

    rows: tuple[int, ...] | None = None
    drop: int = 0
    garbage: float = 0.0

    def apply(self, cache: Cache, mask: Array) -> Cache:
        """The edited cache.

        Args:
            cache: of any runner; not changed.
            mask: of its remaining tokens, [batch, tokens]; a prefix before them is never masked.
        """
        if self == CacheEdit():
            return cache
        if isinstance(cache, EditableCache):
            return cache.edited(self, mask)
        arrays = {name: self.of_array(name, array, mask) for name, array in cache.arrays().items()}
        return EditedCache(arrays, cache.length - self.drop)

    def of_array(self, name: str, array: Array, mask: Array) -> Array:
        """One edited array of a cache.

        Args:
            name: of the graph's output.
            array: [batch, heads, tokens, head_dim], or a state [batch, …].
            mask: as for `apply`.
        """
        array = array[list(self.rows)] if self.rows is not None else array.copy()
        if is_state(name):
            return array
        array = array[:, :, : array.shape[2] - self.drop]
        if self.garbage:
            array.transpose(0, 2, 1, 3)[:, array.shape[2] - mask.shape[1] :][mask == 0] = self.garbage
        return array


@runtime_checkable
class EditableCache(Protocol):
    """A cache that edits itself, because its arrays do not describe it completely."""

    def edited(self, edit: CacheEdit, mask: Array) -> Cache:
        """See `CacheEdit.apply`."""


@dataclass(frozen=True)
class EditedCache:
    """A cache as plain arrays, see `runner.Cache`."""

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        """Arrays by name."""
        return self.content


@dataclass(frozen=True)
class Call:
    """The inputs of one call of a runner; see `Runner.prefill` for shapes.

    Attributes:
        input_ids: new tokens.
        attention_mask: of past and new tokens.
        position_ids: of the new tokens.
        uniform: the positions follow from the mask, so that a graph without `position_ids` can run the call.
        edit: applied to the cache before the call.
        start: the synthetic past of a chain's first call; None for an empty cache.
        known: tokens of the synthetic past, in every call of the chain; their cache is not compared.
        extras: values of extra inputs by name, the others have their defaults; None before they are drawn.
    """

    input_ids: Array
    attention_mask: Array
    position_ids: Array
    uniform: bool = True
    edit: CacheEdit = field(default_factory=CacheEdit)
    start: SyntheticPast | None = None
    known: int = 0
    extras: Mapping[str, Array] | None = None

    @property
    def tokens(self) -> ModelCall:
        """Its tokens, mask and positions."""
        return ModelCall(self.input_ids, self.attention_mask, self.position_ids)

    @property
    def past_mask(self) -> Array:
        """The mask of the tokens before the new ones, [batch, past tokens]."""
        return self.attention_mask[:, : self.attention_mask.shape[1] - self.input_ids.shape[1]]

    @property
    def valid(self) -> Array:
        """Which new tokens are not padding, bool [batch, new tokens]."""
        valid: Array = self.attention_mask[:, self.past_mask.shape[1] :] == 1
        return valid


Chain = list[Call]
"""Calls that continue each other's cache."""


def chain(
    mask: Array, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator, jumps: bool = False
) -> Chain:
    """Calls that feed one batch of random tokens in pieces.

    Args:
        mask: [batch, sum of lengths], 0 for padding.
        lengths: number of new tokens of each call.
        facts: the model's vocabulary and context.
        rng: generates the tokens.
        jumps: positions start high and have gaps, instead of following from the mask.
    """
    ids = rng.integers(0, facts.vocab_size, mask.shape)
    positions = default_positions(mask, mask.shape[1])
    if jumps:
        positions = np.cumsum(rng.integers(1, 4, mask.shape), axis=1) + (facts.max_positions or 200) // 4
    return pieces(ids, mask, positions, lengths, uniform=not jumps)


def pieces(ids: Array, mask: Array, positions: Array, lengths: Sequence[int], uniform: bool = True) -> Chain:
    """Calls that feed the given tokens in pieces.

    Args:
        ids: token ids, [batch, sum of lengths].
        mask: attention mask of the same shape.
        positions: position ids of the same shape.
        lengths: number of new tokens of each call.
        uniform: the positions follow from the mask.
    """
    calls, done = [], 0
    for length in lengths:
        new = slice(done, done + length)
        calls.append(Call(ids[:, new], mask[:, : new.stop], positions[:, new], uniform))
        done += length
    return calls


def continuing(
    past: SyntheticPast, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator, padding: int = 0
) -> Chain:
    """Calls that continue a synthetic past, at the positions after it.

    Args:
        past: the synthetic past.
        lengths: number of new tokens of each call.
        facts: the model's vocabulary.
        rng: generates the tokens.
        padding: number of masked slots at the start of the last row.
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
    """The same calls, with all positions increased by `by`."""
    return [replace(call, position_ids=call.position_ids + by, uniform=False) for call in calls]


def full_mask(batch: int, length: int) -> Array:
    """A mask of ones, [batch, length]."""
    return np.ones((batch, length), dtype=np.int64)


def ragged_mask(lengths: Sequence[int], steps: int, side: str) -> Array:
    """The mask of padded prompts, followed by tokens that all rows have.

    Args:
        lengths: tokens of each prompt.
        steps: tokens after the prompts.
        side: `left` or `right`, the side of the padding.
    """
    longest = max(lengths)
    rows = [[0] * (longest - length) + [1] * length for length in lengths]
    if side == "right":
        rows = [row[::-1] for row in rows]
    return np.array([row + [1] * steps for row in rows], dtype=np.int64)


def holes_mask(batch: int, length: int, rng: np.random.Generator) -> Array:
    """A mask with zeros in the middle, at different places in each row; the first and last token are ones.

    Args:
        batch: rows.
        length: columns.
        rng: random number generator.
    """
    mask: Array = (rng.random((batch, length)) > 0.35).astype(np.int64)
    mask[:, [0, -1]] = 1
    mask[:, length // 2] = 0
    return mask
