"""Call: the inputs of one model call in a scenario (tokens, mask, positions), and edits of the cache between calls.

Running 4,096 tokens in float64 to cross a window takes too long. But a graph and the eager model continue any cache:
a `SyntheticPast` has the same random numbers for both, with large values at the edge of the window. All numbers are
small multiples of 1/16, which are exact in every floating-point type.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from llmconv.runtime.extra_inputs import BATCH, SEQUENCE, TOTAL, ExtraInput, ModelCall, is_state
from llmconv.runtime.runner import TOKEN_AXIS, ArrayCache, Cache, default_positions
from llmconv.tensors import BY_NAME, Array

GARBAGE = 1e6
"""Value of masked cache slots: too large for a weak mask of -10,000 to hide, finite in bfloat16 and float32."""

GARBAGE_IN_FLOAT16 = 100.0
"""Larger values overflow in the product of queries and keys before the mask, also in the eager model."""

GARBAGE_AFTER_FLOAT16 = 1e4  # for a float32 copy of a float16 graph, whose mask is the lowest float16 number, -65,504


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that the scenarios depend on."""

    vocab_size: int
    max_positions: int | None = None  # maximum context length in tokens; None for no limit
    windows: tuple[int, ...] = ()  # sizes in tokens of sliding windows and attention chunks, smallest first
    takes_positions: bool = True  # whether the model uses `position_ids`
    # context length before rotary scaling, where other frequencies begin; None without rotary scaling
    original: int | None = None
    keeps_states: bool = False  # some layer keeps a recurrent state, from which no token can be removed
    no_edits: str = ""  # why caches cannot be edited between two calls; empty if they can
    no_synthetic_past: str = ""  # why synthetic pasts cannot be used; empty if they can
    # cache shapes for one sequence and one token, by output name
    cache: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0  # number of parameters; limits the size of synthetic pasts
    thorough: bool = False  # the suite is `full`, which allows larger synthetic pasts
    garbage: float = GARBAGE  # value of masked cache slots
    padding: int | None = None  # id of the padding token; None without one
    # continues a prompt [1, tokens] by the given number of greedy tokens
    greedy: Callable[[Array, int], Array] | None = None
    # the extra inputs of the graphs by name, resolved
    extra_inputs: Mapping[str, ExtraInput] = field(default_factory=dict)


@dataclass(frozen=True)
class PastEdit:
    """A change that a client makes to a cache between two calls."""

    rows: tuple[int, ...] | None = None  # the sequence that each row continues, as in a beam search; None for no change
    drop: int = 0  # number of tokens removed from the end, as after a rejected draft
    garbage: float = 0.0  # value written to masked slots; 0 for no change

    def apply(self, cache: Cache, mask: Array) -> Cache:
        """The edited cache of any runner; the given one is not changed.

        `mask` is of its remaining tokens, [batch, tokens]; a prefix before them is never masked.
        """
        if self == PastEdit():
            return cache
        if isinstance(cache, EditableCache):
            return cache.edited(self, mask)
        arrays = {name: self.of_array(name, array, mask) for name, array in cache.arrays().items()}
        return ArrayCache(arrays, cache.length - self.drop)

    def of_array(self, name: str, array: Array, mask: Array) -> Array:
        """One edited array of a cache, [batch, heads, tokens, head_dim], or a state [batch, …]."""
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

    def edited(self, edit: PastEdit, mask: Array) -> Cache:
        """See `PastEdit.apply`."""


@dataclass(frozen=True)
class Call:
    """The inputs of one call of a runner, with shapes as in `Runner.prefill`."""

    input_ids: Array  # new tokens
    attention_mask: Array  # of past and new tokens
    position_ids: Array  # of the new tokens
    uniform: bool = True  # the positions follow from the mask, so that a graph without `position_ids` can run the call
    edit: PastEdit = field(default_factory=PastEdit)  # applied to the cache before the call
    start: SyntheticPast | None = None  # the synthetic past of a chain's first call; None for an empty cache
    known: int = 0  # tokens of the synthetic past, in every call of the chain; their cache is not compared
    # values of extra inputs by name, the others have their defaults; None before they are drawn
    extras: Mapping[str, Array] | None = None

    @property
    def tokens(self) -> ModelCall:
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


Chain = list[Call]  # calls that continue each other's cache


def chain(
    mask: Array, lengths: Sequence[int], facts: ModelFacts, rng: np.random.Generator, jumps: bool = False
) -> Chain:
    """Calls that feed one batch of random tokens in pieces.

    `mask` is [batch, sum of lengths], 0 for padding; `lengths` are the numbers of new tokens of each call. With
    `jumps`, positions start high and have gaps, instead of following from the mask.
    """
    ids = rng.integers(0, facts.vocab_size, mask.shape)
    positions = default_positions(mask, mask.shape[1])
    if jumps:
        positions = np.cumsum(rng.integers(1, 4, mask.shape), axis=1) + (facts.max_positions or 200) // 4
    return pieces(ids, mask, positions, lengths, uniform=not jumps)


def pieces(ids: Array, mask: Array, positions: Array, lengths: Sequence[int], uniform: bool = True) -> Chain:
    """Calls that feed the given tokens, mask and positions [batch, sum of lengths] in pieces.

    `lengths` are the numbers of new tokens of each call. If `uniform`, the positions follow from the mask.
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
    """Calls of `lengths` new tokens that continue a synthetic past, at the positions after it.

    `padding` is the number of masked slots at the start of the last row.
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
    """The mask of prompts of these lengths, padded on `side`, `left` or `right`, then `steps` tokens in all rows."""
    longest = max(lengths)
    rows = [[0] * (longest - length) + [1] * length for length in lengths]
    if side == "right":
        rows = [row[::-1] for row in rows]
    return np.array([row + [1] * steps for row in rows], dtype=np.int64)


def holes_mask(batch: int, length: int, rng: np.random.Generator) -> Array:
    """A mask [batch, length] with zeros in the middle, other places in each row; first and last token are ones."""
    mask: Array = (rng.random((batch, length)) > 0.35).astype(np.int64)
    mask[:, [0, -1]] = 1
    mask[:, length // 2] = 0
    return mask


LARGEST = 24
STEP = 1 / 16
LOUDER = 32  # factor of the values of the loud tokens, so that one token among thousands is visible
MIB = 1 << 20


@dataclass(frozen=True)
class SyntheticPast:
    """A `Cache` of random keys and values; states are zero, as in an empty past."""

    shapes: Mapping[str, tuple[int, ...]]  # for one sequence and one token, by output name
    rows: int
    length: int
    loud: tuple[int, int]  # first slot with large values, and the slot after the last
    seed: int

    @property
    def key(self) -> bytes:
        return hashlib.sha256(repr(self).encode()).digest()

    def arrays(self) -> dict[str, Array]:
        """Arrays by name, float32; generated anew on each call, so that no memory is held between two calls."""
        return {name: self._array(name, shape) for name, shape in self.shapes.items()}

    def _array(self, name: str, shape: tuple[int, ...]) -> Array:
        whole = [self.rows, *shape[1:]]
        if is_state(name):
            return np.zeros(whole, dtype=np.float32)
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        whole[TOKEN_AXIS] = self.length
        array: Array = rng.integers(-LARGEST, LARGEST + 1, whole, dtype=np.int8).astype(np.float32)
        array *= STEP
        if name.endswith(".value"):
            array[:, :, slice(*self.loud)] *= LOUDER
        return array

    def kept_by(self, arrays: Mapping[str, Array]) -> bool:
        """Whether a later cache begins with exactly this one; states are not compared, since they change."""
        return all(
            name not in arrays or np.array_equal(arrays[name][:, :, : self.length], self._array(name, shape))
            for name, shape in self.shapes.items()
            if not is_state(name)
        )


def elements_per_token(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements that one token of one sequence adds to a cache."""
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not is_state(name))


WINDOW = re.compile(r"^(?!max_)\w*(window(s|_size|_sizes|_len)?|attention_chunk_size|local_attention)$")
"""Names of config fields that contain a window size in tokens.

`sliding_window` in most families, `window_size` in GPT-Neo, `attention_chunk_size` in Llama 4, `attention_window_size`
in RecurrentGemma, `sliding_window_size` in Inkling, `local_attention` in ModernBERT's decoder.
"""

MOST = 6  # maximum number of windows that are crossed; no known family has more than two


def windows_of(config: Any) -> tuple[int, ...]:
    """Sizes in tokens of all sliding windows and attention chunks that a config declares, smallest first.

    A size that no layer uses is included as well: crossing it only costs time. Layers may have their own configs.
    """
    fields = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    sizes = {*_sizes(config.to_dict()), *_sizes(fields)}
    for layer in getattr(config, "per_layer_config", None) or ():
        sizes |= set(_sizes({name: getattr(layer, name, None) for name in fields}))
    return tuple(sorted(sizes)[:MOST])


def _sizes(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if WINDOW.match(name):
            numbers = value if isinstance(value, list | tuple) else [value]
            yield from (n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n > 1)


Extras = Mapping[str, ExtraInput]  # resolved extra inputs by name


def drawn(chain: Chain, inputs: Extras, rng: np.random.Generator, *, both_ways: bool = False) -> Chain:
    """The calls with random values of the inputs that a request may give; calls that have values keep them.

    A value of each new token is drawn for each call; one of all tokens grows, and one of a sequence stays, with the
    cache of its row. With `both_ways`, values are also drawn for inputs with which a call cannot be divided, as graphs
    of a fixed size divide it.
    """
    free = {
        name: extra for name, extra in inputs.items() if extra.values is not None and (both_ways or not extra.both_ways)
    }
    calls, held = [], dict[str, Array]()
    for call in chain:
        if call.extras is not None:
            calls.append(call)
            continue
        held = {name: _continued(extra, held.get(name), call, rng) for name, extra in free.items()}
        calls.append(replace(call, extras=held))
    return calls


def _continued(extra: ExtraInput, before: Array | None, call: Call, rng: np.random.Generator) -> Array:
    new = random_value(extra, call.tokens, rng)
    if before is None or SEQUENCE in extra.axes:
        return new
    kept = _edited(extra, before, call.edit)
    if TOTAL not in extra.axes:
        return kept
    at = extra.axes.index(TOTAL)
    later = np.take(new, range(kept.shape[at], new.shape[at]), axis=at)
    return np.concatenate([kept, later], axis=at)


def _edited(extra: ExtraInput, array: Array, edit: PastEdit) -> Array:
    if edit.rows is not None and BATCH in extra.axes:
        array = np.take(array, edit.rows, axis=extra.axes.index(BATCH))
    if edit.drop and TOTAL in extra.axes:
        at = extra.axes.index(TOTAL)
        array = np.take(array, range(array.shape[at] - edit.drop), axis=at)
    return array


def random_value(extra: ExtraInput, call: ModelCall, rng: np.random.Generator) -> Array:
    """A random value: an integer below the number of values, or a normal number that bfloat16 has."""
    shape, dtype = extra.shape(call), BY_NAME[extra.dtype].numpy
    assert isinstance(extra.values, int | float)
    if extra.dtype == "float32":
        numbers = (rng.standard_normal(shape) * extra.values).astype(np.float32)
        return (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    return rng.integers(0, 2 if extra.dtype == "bool" else max(int(extra.values), 1), shape).astype(dtype)


def at_limits(chain: Chain, inputs: Extras, *, last: bool) -> Chain:
    """The calls with the first or the last valid value of every input that a request may give, everywhere."""
    free = {name: extra for name, extra in inputs.items() if extra.values is not None}
    values = [{name: _limit(extra, call.tokens, last=last) for name, extra in free.items()} for call in chain]
    return [replace(call, extras=one) for call, one in zip(chain, values, strict=True)]


def _limit(extra: ExtraInput, call: ModelCall, *, last: bool) -> Array:
    assert isinstance(extra.values, int | float)
    whole = extra.dtype != "float32"
    value = (max(extra.values, 1) - 1 if whole else extra.values) if last else 0
    return np.full(extra.shape(call), value if extra.dtype != "bool" else last, BY_NAME[extra.dtype].numpy)
