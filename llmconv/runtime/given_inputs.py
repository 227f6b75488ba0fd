"""GivenInputs: the values of a model's extra inputs that a prompt brings, over its tokens and the new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmconv.runtime.extra_inputs import BATCH, PAST, SEQUENCE, TOTAL, ExtraInput, ModelCall
from llmconv.tensors import Array


@dataclass(frozen=True)
class GivenInputs:
    """The values of one prompt of `tokens` tokens: arrays by name, without the axis of the batch."""

    tokens: int
    values: Mapping[str, Array] = field(default_factory=dict)

    @property
    def content(self) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
        """Equal for equal values."""
        return tuple((name, array.shape, array.tobytes()) for name, array in sorted(self.values.items()))


def batch_values(
    rows: Sequence[GivenInputs], call: ModelCall, longest: int, known: Mapping[str, ExtraInput]
) -> dict[str, Array]:
    """The values in one call of a batch, of the inputs that any of its prompts gives.

    `call` has a mask of all columns so far; `longest` is the number of columns of the padded prompts.
    """
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        found[name] = known[name].value(call).copy()
        for at, row in enumerate(rows):
            if name in row.values:
                _place(known[name], found[name], at, row.values[name], (longest - row.tokens, longest), call)
    return found


def _place(extra: ExtraInput, target: Array, row: int, given: Array, prompt: tuple[int, int], call: ModelCall) -> None:
    """Writes a prompt's value into its row; `prompt` is the range of its columns."""
    inner = [axis for axis in extra.axes if axis != BATCH]
    if BATCH in extra.axes:  # a slice, because an element is not a view
        target = np.moveaxis(target, extra.axes.index(BATCH), -1)[..., row : row + 1]
        given = given[..., None]
    starts = {SEQUENCE: call.sizes[PAST], TOTAL: 0}
    into, source = [slice(None)] * target.ndim, [slice(None)] * target.ndim
    for at, axis in enumerate(inner):
        if axis in starts:
            start, length = starts[str(axis)], target.shape[at]
            first, last = max(start, prompt[0]), min(start + length, prompt[1])
            into[at] = slice(max(first - start, 0), max(last - start, 0))
            source[at] = slice(max(first - prompt[0], 0), max(last - prompt[0], 0))
    target[tuple(into)] = given[tuple(source)]
    tokens = [at for at, axis in enumerate(inner) if axis in starts]
    if (extra.repeats or extra.counts_on) and len(tokens) == 1:
        at = tokens[0]
        new = max(starts[str(inner[at])] - prompt[1], 0)
        later = np.moveaxis(target, at, -1)[..., max(prompt[1] - starts[str(inner[at])], 0) :]
        if extra.repeats:
            later[...] = np.moveaxis(given, at, -1)[..., -1:]
        else:
            later[...] = given.max() + 1 + new + np.arange(later.shape[-1])
