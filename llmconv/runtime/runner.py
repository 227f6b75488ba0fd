"""Runner, the protocol of what runs a model: its caches, steps, and embeddings that take the places of some tokens.

ArrayCache is a cache as numpy arrays, which every runner can continue. A change of a cache is a `CacheEdit`: it is
applied to arrays at once, and sent to the stages that have a `RemoteCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from llmconv.causal_lm import LengthSwitch
from llmconv.errors import UsageProblem
from llmconv.runtime.extra_inputs import ExtraInput, ModelCall, is_state
from llmconv.tensors import Array


@dataclass(frozen=True)
class PromptEmbeddings:
    """Embeddings in place of those of some tokens of one prompt."""

    at: Array  # positions of these tokens in the prompt, int64 [count], ascending
    rows: Array  # their embeddings, float32 [count, hidden]
    before: int = 0  # number of them that precede the prompt and stand for no token; penalties do not count these
    # values of extra inputs of the model that belong to them, for all tokens of the prompt, by name, without the axis
    # of the batch
    inputs: Mapping[str, Array] = field(default_factory=dict)
    read_whole: bool = False  # the prompt is read in one run, because some tokens attend to later ones


@dataclass(frozen=True)
class PlacedEmbeddings:
    """Embeddings, float32 [count, hidden] in row order, in place of the tokens `where`, bool [batch, tokens]."""

    where: Array
    rows: Array

    @classmethod
    def of(cls, prompts: Sequence[PromptEmbeddings | None], lengths: Sequence[int]) -> PlacedEmbeddings | None:
        """Those of a batch of prompts of these lengths in tokens, padded on the left; None if there are none."""
        found = [one for one in prompts if one is not None]
        if not found:
            return None
        where = np.zeros((len(prompts), max(lengths)), dtype=bool)
        for row, (one, length) in enumerate(zip(prompts, lengths, strict=True)):
            if one is not None:
                where[row, where.shape[1] - length + one.at] = True
        return cls(where, np.concatenate([one.rows for one in found]))

    def columns(self, start: int, stop: int) -> PlacedEmbeddings | None:
        """Those of the tokens from column `start` to `stop`; None if there are none."""
        part = np.zeros_like(self.where)
        part[:, start:stop] = self.where[:, start:stop]
        return PlacedEmbeddings(self.where[:, start:stop], self.rows[part[self.where]]) if part.any() else None

    def into(self, embedded: Array) -> Array:
        """A copy of `embedded`, float [batch, tokens, hidden] (perhaps larger than `where`), with these in place."""
        result = embedded.copy()
        batch, tokens = self.where.shape
        result[:batch, :tokens][self.where] = self.rows.astype(embedded.dtype)
        return result


Extras = Mapping[str, Array]  # values of extra inputs by name
TOKENS_ONLY = "export it again with `llmconv export --embeds`"


class Cache(Protocol):
    """The keys, values and states of every layer, wherever the runner holds them."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache, padding included."""

    def arrays(self) -> Mapping[str, Array]:
        """Arrays by output name, in order: [batch, kv_heads, length, head_dim]; states [batch, …]."""


@dataclass(frozen=True)
class Choices:
    """The graph's K likeliest tokens, int64 [batch, new tokens, K], and their log-probabilities `scores`."""

    tokens: Array
    scores: Array


@dataclass(frozen=True)
class Step:
    """The outputs of one call.

    Attributes:
        logits: [batch, new tokens, vocabulary], or [batch, 1, vocabulary] if the last logits only were asked for, or
            the graph returns no others;
            empty if there are `choices`.
        present: the cache of past and new tokens together; the `past` of the next call.
        choices: what the graph returns instead of logits; None if it returns logits.
        hidden: the hidden state that an MTP head reads, [batch, new tokens, hidden]; None if the graph has no such
            output.
    """

    logits: Array
    present: Cache
    choices: Choices | None = None
    hidden: Array | None = None

    @property
    def scored(self) -> int:
        """Number of tokens whose logits, or choices, it has."""
        return len((self.logits if self.choices is None else self.choices.tokens)[0])


class Runner(Protocol):
    """A model that continues a cache by any number of tokens; subclass it to inherit the defaults of the properties.

    Attributes:
        length_switch: where its rotary frequencies change with the length; None for a model whose frequencies do not.
    """

    length_switch: LengthSwitch | None = None

    @property
    def max_batch_size(self) -> int | None:
        """Maximum number of sequences per call; None for no limit."""
        return None

    @property
    def cache_capacity(self) -> int | None:
        """Maximum number of tokens in the cache, virtual tokens not counted; None for no limit."""
        return None

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens (of a tuned prefix) that precede every prompt in the cache."""
        return 0

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        """Inputs besides tokens, mask, positions and cache, by name, with numbers as sizes."""
        return {}

    @property
    def embedding_size(self) -> int | None:
        """Size of the embeddings that prompts may contain in place of tokens; None if they consist of tokens only."""
        return None

    def continues_in_one_run(self, batch: int, past: int, new: int) -> bool:
        """Whether `prefill` can continue `past` tokens by `new` per sequence of a batch without several runs."""
        return True

    def scores_all(self, past: int, new: int) -> bool:
        """Whether one run of `decode` continues `past` tokens by `new`, scores all of them, and keeps the past."""
        return False

    @property
    def runs_rows_apart(self) -> bool:
        """Whether the results of a sequence do not depend on the others of its batch, up to rounding."""
        return True

    def reads_in_parts(self, tokens: int) -> bool:
        """Whether a sequence gives the same if it runs in parts, after others in one cache, or with others in a batch.

        Args:
            tokens: length of the longest sequence of the call, virtual tokens not counted.
        """
        return self.length_switch is None or tokens + self.virtual_tokens <= self.length_switch.tokens

    def reads_again(self, past: int) -> bool:
        """Whether the step after `past` tokens of a single sequence runs all of them again, see `LengthSwitch`."""
        switch = self.length_switch
        return switch is not None and switch.reads_again and past == switch.tokens and not self.virtual_tokens

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
        *,
        last_only: bool = False,
    ) -> Step:
        """Runs the prompt.

        Args:
            input_ids: [batch, new tokens] int64.
            attention_mask: [batch, past + new tokens] int64, 0 for padding.
            position_ids: [batch, new tokens] int64; ignored by models without such an input.
            past: the cache to continue; None for an empty one. It remains unchanged.
            extras: values of `extra_inputs` by name, with the batch; the others have their defaults.
            placed: embeddings in place of those of some of `input_ids`, which may be any tokens of the vocabulary; only
                if there is an `embedding_size`.
            last_only: only the logits of the last token are read: those of the others may be left out.

        Raises:
            UsageProblem: there is no `embedding_size`.
        """
        return self._run_prompt(ModelCall(input_ids, attention_mask, position_ids, last_only), past, extras, placed)

    def decode(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
    ) -> Step:
        """Runs one step of the generation; arguments, and the default, as `prefill`."""
        return self._run_step(ModelCall(input_ids, attention_mask, position_ids), past, extras)

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        name = type(self).__name__
        raise NotImplementedError(f"`{name}` has neither `prefill` nor `_run_prompt`")

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        return self.prefill(*call.arrays, past, extras)


def refuse_placed(placed: PlacedEmbeddings | None) -> None:
    """Raises UsageProblem for embeddings in a prompt, for a runner without `embedding_size`."""
    if placed is not None:
        raise UsageProblem("this model takes tokens, and no embeddings", hint=TOKENS_ONLY)


def default_positions(attention_mask: Array, new_tokens: int) -> Array:
    """int64 [batch, new_tokens]: cumulative sum of the mask, minus one, as transformers' `generate` counts."""
    positions: Array = np.maximum(attention_mask.cumsum(axis=1, dtype=np.int64) - 1, 0)
    return positions[:, positions.shape[1] - new_tokens :]


TOKEN_AXIS = 2  # the token axis of keys and values


@dataclass(frozen=True)
class ArrayCache:
    """A cache as numpy arrays by the names of the graph's outputs; `length` counts tokens, padding included."""

    content: Mapping[str, Array]
    length: int

    def arrays(self) -> Mapping[str, Array]:
        return self.content


@dataclass(frozen=True)
class CacheEdit:
    """A change of a cache by `rows_of`, `cut` or `moved_right`."""

    kind: str  # one of `EDITS`
    numbers: tuple[int, ...]  # the rows, the length, or the shifts
    virtual: int = 0  # number of first tokens that are not shifted

    def applied(self, cache: Cache) -> Cache:
        if isinstance(cache, RemoteCache):
            return cache.edited(self)
        length = self.numbers[0] if self.kind == "cut" else cache.length
        return ArrayCache({name: EDITS[self.kind](array, self) for name, array in cache.arrays().items()}, length)


@runtime_checkable
class RemoteCache(Cache, Protocol):
    """A cache that is not in this process, at least in part: its arrays cannot be read, but it can be edited."""

    @property
    def is_lost(self) -> bool:
        """Whether a part of it no longer exists, so that its tokens have to run again."""

    @property
    def is_cuttable(self) -> bool:
        """See `can_be_cut`."""

    def edited(self, edit: CacheEdit) -> Cache:
        """The cache after a change."""


@runtime_checkable
class ExtendedCache(Cache, Protocol):
    """A cache that the call which continues it extends in place."""

    @property
    def is_lost(self) -> bool:
        """Whether a later call has overwritten a part of it."""

    def kept(self) -> Cache:
        """The same for after a call that continues it."""


def is_lost(cache: Cache) -> bool:
    """Whether a cache no longer exists where it was kept, so that its tokens have to run again."""
    return isinstance(cache, RemoteCache | ExtendedCache) and cache.is_lost


def can_be_cut(cache: Cache) -> bool:
    """Whether every layer keeps keys and values of every token, so that the cache can be truncated."""
    if isinstance(cache, RemoteCache):
        return cache.is_cuttable
    return all(not is_state(name) and array.shape[TOKEN_AXIS] == cache.length for name, array in cache.arrays().items())


def rows_of(cache: Cache, rows: Sequence[int]) -> Cache:
    """The given rows of a cache, in that order, possibly repeated."""
    return CacheEdit("rows", tuple(map(int, rows))).applied(cache)


def cut(cache: Cache, length: int) -> Cache:
    """The first `length` tokens of a cache, see `can_be_cut`."""
    return CacheEdit("cut", (int(length),)).applied(cache)


@runtime_checkable
class BufferedCache(Cache, Protocol):
    """A cache in memory that later calls write on."""

    def taken_back(self, length: int) -> Cache:
        """As `cut`, in the same memory: the cache must not be used any more."""


def taken_back(cache: Cache, length: int) -> Cache:
    """As `cut`, for a cache that is not used any more, whose memory the result may keep."""
    return cache.taken_back(length) if isinstance(cache, BufferedCache) else cut(cache, length)


def moved_right(cache: Cache, shifts: Sequence[int], virtual: int = 0) -> Cache:
    """Copies of a cache of one row, each shifted right along the token axis; tokens beyond the end are dropped.

    Such a row can be continued like a prompt with that much padding on the left. `can_be_cut` must hold; `shifts` are 0
    or more per row of the result; the first `virtual` tokens are not shifted.
    """
    return CacheEdit("moved", tuple(map(int, shifts)), virtual).applied(cache)


def _moved(array: Array, edit: CacheEdit) -> Array:
    shifts, virtual = edit.numbers, edit.virtual
    length = array.shape[TOKEN_AXIS] - virtual
    moved = np.zeros((len(shifts), *array.shape[1:]), dtype=array.dtype)
    moved[:, :, :virtual] = array[:, :, :virtual]
    for row, shift in enumerate(shifts):
        start = min(shift, length)
        moved[row, :, virtual + start :] = array[0, :, virtual : virtual + length - start]
    return moved


EDITS: Mapping[str, Callable[[Array, CacheEdit], Array]] = {  # what changes each array, by kind
    "rows": lambda array, edit: array[list(edit.numbers)],
    "cut": lambda array, edit: array[:, :, : edit.numbers[0]],
    "moved": _moved,
}
