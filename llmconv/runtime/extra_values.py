"""ExtraValues: the values of a model's extra inputs in a call; parts of them, and larger ones for fixed sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from llmconv.errors import InputRefused, UsageProblem
from llmconv.runtime.extra_inputs import BATCH, DOCUMENT, PAST, SEQUENCE, TOTAL, ExtraInput, ModelCall
from llmconv.tensors import Array


@dataclass(frozen=True)
class ExtraValues:
    """The values of the extra inputs in a call: those that the caller gives, and for the others their defaults.

    Raises UsageProblem if a given array is of none of the (resolved) inputs, or of one that can only be computed.
    """

    inputs: Mapping[str, ExtraInput] = field(default_factory=dict)
    given: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.given:
            if name not in self.inputs:
                known = ", ".join(self.inputs) or "none"
                raise UsageProblem(f"the model has no extra input `{name}`", hint=f"its extra inputs: {known}")
            if PAST in self.inputs[name].axes:
                raise UsageProblem(f"`{name}` has an axis of past tokens and is computed", hint="leave it out")

    def of(self, call: ModelCall, whole: ModelCall | None = None, start: int = 0) -> dict[str, Array]:
        """The values of a call by name.

        `call` is part of the call `whole` that the arrays were given for (default: all of it), from index `start` of
        its new tokens. Raises as `ExtraInput.value`, and UsageProblem for an array of another dtype or shape.
        """
        return {name: self._value(name, extra, call, whole or call, start) for name, extra in self.inputs.items()}

    @property
    def both_ways(self) -> bool:
        """Whether tokens attend to each other in both directions, so that the call cannot be divided."""
        return any(bool(self.inputs[name].both_ways) and bool(array.any()) for name, array in self.given.items())

    def require_whole(self, most: int) -> None:
        """Raises InputRefused for a call whose tokens attend to later ones; `most` is the number that run together."""
        if self.both_ways:
            raise InputRefused(
                f"tokens of images attend to later ones, and these graphs read {most} tokens at a time",
                hint="export again with `--shapes dynamic`, or give a shorter prompt",
            )

    def _value(self, name: str, extra: ExtraInput, call: ModelCall, whole: ModelCall, start: int) -> Array:
        if name not in self.given:
            return extra.value(call)
        array = self.given[name]
        if problem := extra.misfit(array, whole):
            raise UsageProblem(f"the value of `{name}` is {problem}", hint=DOCUMENT)
        return part(extra, array, call, start)


def part(extra: ExtraInput, array: Array, call: ModelCall, start: int) -> Array:
    """The values of an input in `call`, one of several consecutive calls, from those in all the calls together.

    `start` is the index of its first new token among the new tokens of all calls.
    """
    sizes = call.sizes
    cuts = {SEQUENCE: slice(start, start + sizes[SEQUENCE]), TOTAL: slice(sizes[TOTAL]), PAST: slice(sizes[PAST])}
    every = slice(None)
    found: Array = array[tuple([cuts.get(str(axis), every) for axis in extra.axes])]
    return found


def grown(extra: ExtraInput, array: Array, sizes: Mapping[str, int]) -> Array:
    """The value of an input with larger symbolic axes: rows are copies of the first row, other places are 0."""
    shape = [
        sizes.get(axis, size) if isinstance(axis, str) else size
        for axis, size in zip(extra.axes, array.shape, strict=True)
    ]
    if list(array.shape) == shape:
        return array
    result = np.zeros(shape, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    if BATCH in extra.axes:
        rows = np.moveaxis(result, extra.axes.index(BATCH), 0)
        rows[array.shape[extra.axes.index(BATCH)] :] = rows[:1]
    return result


def with_past(inputs: Mapping[str, ExtraInput], values: Mapping[str, Array], past: int) -> dict[str, Array]:
    """Values of new tokens after `past` in the cache, as transformers takes them.

    Those of `both_ways` are for past tokens, too, and left out where all are 0.
    """
    found = dict(values)
    for name in [name for name in values if inputs[name].both_ways]:
        array = found.pop(name)
        if array.any():
            found[name] = np.pad(array, ((0, 0), (past, 0)))
    return found
