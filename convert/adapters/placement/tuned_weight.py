"""TunerUpdate: the update of one weight by an adapter of another kind than LoRA, by rows of the stored tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from typing import Any

import numpy as np

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import FLOATS, Array, LazyTensor

TILE_ELEMENTS = 1 << 18
"""Elements computed at once, so that intermediate results stay small."""


@dataclass
class KeptUntilLastRow:
    """A value that all rows of a tensor need: computed by the first thread, released after the last row.

    Attributes:
        rows: number of rows.
    """

    rows: int
    _served: int = 0
    _value: Any = None
    _lock: Lock = field(default_factory=Lock)

    def take(self, rows: int, make: Callable[[], Any]) -> Any:
        """The value, for `rows` more rows, computed by `make` if necessary."""
        with self._lock:
            value = make() if self._value is None else self._value
            self._served += rows
            done = self._served >= self.rows
            self._value, self._served = (None, 0) if done else (value, self._served)
            return value


@dataclass(frozen=True)
class TunerUpdate:
    """The update of one weight by one adapter.

    Computed by row blocks; for weights stored in×out (Conv1D) the whole update at once, in float64.

    Attributes:
        tuner: the formula.
        learned: its tensors.
        shape: out×in of the weight.
        weight: the adapter's weight, by which the update is multiplied.
        transposed: the weight is stored in×out.
        needed: result of `tuner.delta`, shared by all rows.
    """

    tuner: Tuner
    learned: ModuleTensors
    shape: WeightShape
    weight: float
    transposed: bool
    needed: KeptUntilLastRow

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the update, float64, two-dimensional; see `WeightUpdate`."""
        if self.transposed:
            whole: Array = self.needed.take(stop - start, lambda: self._whole(base))
            return whole[start:stop]
        delta = self.needed.take(stop - start, lambda: self.tuner.delta(self.learned, self.shape))
        result = np.empty((stop - start, self.shape[1]))
        height = max(1, TILE_ELEMENTS // max(1, self.shape[1]))
        for first in range(start, stop, height):
            last = min(first + height, stop)
            rows = base.rows(first, last).reshape(last - first, -1).astype(np.float64)
            np.multiply(delta(rows, first), self.weight, out=result[first - start : last - start])
        return result

    def _whole(self, base: LazyTensor) -> Array:
        delta = self.tuner.delta(self.learned, self.shape)
        return np.ascontiguousarray(self.weight * delta(base.read().T.astype(np.float64), 0).T)


def updates_of(
    adapter: Adapter,
    homes: Mapping[str, str],
    current: Callable[[str], LazyTensor],
    has_bias: Callable[[str], bool],
    is_conv1d: Callable[[str], bool],
    weight: float,
) -> Iterator[tuple[str, TunerUpdate]]:
    """Names of the base's tensors and their updates by an adapter; nothing large is read.

    Args:
        adapter: without a `tuner` it has no such updates.
        homes: `<module>.weight` to the name of the base's tensor.
        current: returns the base's tensor by name.
        has_bias: returns whether the base has a tensor by name.
        is_conv1d: returns whether a weight is stored in×out, for square ones.
        weight: factor of the updates.

    Raises:
        MalformedInput: tensors that do not fit each other, or this base.
        UnsupportedInput: the weight in the base is not floating-point.
    """
    tuner = adapter.tuner
    if tuner is None:
        return
    places = {}
    for module, learned in adapter.learned.items():
        name, fit = homes[f"{module}.weight"], tuner.fit(learned)
        swapped = (is_conv1d(name), learned.settings.flag("fan_in_fan_out")) if tuner.conv1d else (False, False)
        places[module] = name, *_orientation(adapter.name, name, current(name), fit, swapped)
    absent = set(tuner.shared) - {part for learned in adapter.learned.values() for part in learned.tensors}
    shapes = [shape for _, shape, _ in places.values()]
    drawn = tuner.drawn(next(iter(adapter.learned.values())).settings, shapes) if absent and shapes else {}
    for module, (name, shape, transposed) in places.items():
        learned = adapter.learned[module]
        complete = replace(learned, tensors={**drawn, **learned.tensors})
        tuner.require(complete, shape)
        yield name, TunerUpdate(tuner, complete, shape, weight, transposed, KeptUntilLastRow(current(name).num_rows))
        bias = name.removesuffix("weight") + "bias"
        if tuner.scales_output and tuner.fit(learned)[0] is not None and has_bias(bias):
            yield bias, TunerUpdate(tuner, complete, (shape[0], 1), weight, False, KeptUntilLastRow(shape[0]))


def _orientation(
    adapter: str, name: str, weight: LazyTensor, fit: FittingShape, swapped: tuple[bool, bool]
) -> tuple[WeightShape, bool]:
    """out×in of the weight, and whether it is stored in×out.

    Args:
        adapter: its name, for messages.
        name: of the weight.
        weight: the base's tensor.
        fit: size that the adapter's tensors are for.
        swapped: stored in×out by model type, and by `fan_in_fan_out`, which counts only if nothing else fits.
    """
    if weight.dtype.name not in ("float64", *FLOATS):
        raise UnsupportedInput(
            f"`{name}` of the base is stored as {weight.dtype.name}", hint="merge into the unquantized model"
        )
    if len(weight.shape) > 1:
        own = (weight.shape[0], prod(weight.shape[1:]))
        fits_swapped = len(weight.shape) == 2 and _matches(own[::-1], fit)
        if fits_swapped and (swapped[0] or (swapped[1] and not _matches(own, fit))):
            return own[::-1], True
        if _matches(own, fit):
            return own, False
    wanted = "×".join("any" if size is None else str(size) for size in fit)
    raise MalformedInput(
        f"shape mismatch for `{name}`: `{adapter}` expected {wanted}, got {list(weight.shape)} in the base",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )


def _matches(shape: WeightShape, fit: FittingShape) -> bool:
    return all(wanted in (None, size) for size, wanted in zip(shape, fit, strict=True))
