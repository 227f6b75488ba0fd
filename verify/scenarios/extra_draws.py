"""Values of a model's extra inputs for the calls of a scenario: random ones, other ones in each row and call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmconv.runtime.extra_inputs import BATCH, SEQUENCE, TOTAL, ExtraInput, ModelCall
from llmconv.tensors import BY_NAME, Array
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain

BFLOAT16_BITS = np.uint32(0xFFFF0000)

Extras = Mapping[str, ExtraInput]
"""Resolved extra inputs by name."""


def drawn(chain: Chain, inputs: Extras, rng: np.random.Generator, *, both_ways: bool = False) -> Chain:
    """The calls with random values of the inputs that a request may give; calls that have values keep them.

    A value of each new token is drawn for each call; one of all tokens grows, and one of a sequence stays, with the
    cache of its row.

    Args:
        chain: the calls.
        inputs: the extra inputs.
        rng: generates the values.
        both_ways: also of inputs with which a call cannot be divided, as graphs of a fixed size divide it.
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
    """The value in a call, after the value in the call before."""
    new = random_value(extra, call.tokens, rng)
    if before is None or SEQUENCE in extra.axes:
        return new
    kept = _edited(extra, before, call.edit)
    if TOTAL not in extra.axes:
        return kept
    at = extra.axes.index(TOTAL)
    later = np.take(new, range(kept.shape[at], new.shape[at]), axis=at)
    return np.concatenate([kept, later], axis=at)


def _edited(extra: ExtraInput, array: Array, edit: CacheEdit) -> Array:
    """The value after a change of the cache."""
    if edit.rows is not None and BATCH in extra.axes:
        array = np.take(array, edit.rows, axis=extra.axes.index(BATCH))
    if edit.drop and TOTAL in extra.axes:
        at = extra.axes.index(TOTAL)
        array = np.take(array, range(array.shape[at] - edit.drop), axis=at)
    return array


def random_value(extra: ExtraInput, call: ModelCall, rng: np.random.Generator) -> Array:
    """A random value: an integer below the number of values, or a normal number that bfloat16 has.

    Args:
        extra: the input; a request may give its value.
        call: the call.
        rng: generates it.
    """
    shape, dtype = extra.shape(call), BY_NAME[extra.dtype].numpy
    assert isinstance(extra.values, int | float)
    if extra.dtype == "float32":
        numbers = (rng.standard_normal(shape) * extra.values).astype(np.float32)
        return (numbers.view(np.uint32) & BFLOAT16_BITS).view(np.float32)
    values: Array = rng.integers(0, 2 if extra.dtype == "bool" else max(int(extra.values), 1), shape).astype(dtype)
    return values


def at_limits(chain: Chain, inputs: Extras, *, last: bool) -> Chain:
    """The calls with the first or the last valid value of every input that a request may give, everywhere.

    Args:
        chain: the calls.
        inputs: the extra inputs.
        last: the last one.
    """
    free = {name: extra for name, extra in inputs.items() if extra.values is not None}
    values = [{name: _limit(extra, call.tokens, last=last) for name, extra in free.items()} for call in chain]
    return [replace(call, extras=one) for call, one in zip(chain, values, strict=True)]


def _limit(extra: ExtraInput, call: ModelCall, *, last: bool) -> Array:
    assert isinstance(extra.values, int | float)
    whole = extra.dtype != "float32"
    value = (max(extra.values, 1) - 1 if whole else extra.values) if last else 0
    return np.full(extra.shape(call), value if extra.dtype != "bool" else last, BY_NAME[extra.dtype].numpy)
