"""TunerUpdate: what an adapter of another kind than LoRA does to one weight, by rows of the file's tensor."""

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
"""Elements whose change is made at once, so that what the formulas make on the way stays small."""


@dataclass
class KeptUntilLastRow:
    """A value that many threads need for all rows of a tensor: made by the first, let go when every row was served.

    Attributes:
        rows: how many rows there are.
    """

    rows: int
    _served: int = 0
    _value: Any = None
    _lock: Lock = field(default_factory=Lock)

    def take(self, rows: int, make: Callable[[], Any]) -> Any:
        """The value, for `rows` more rows."""
        with self._lock:
            value = make() if self._value is None else self._value
            self._served += rows
            done = self._served >= self.rows
            self._value, self._served = (None, 0) if done else (value, self._served)
            return value


@dataclass(frozen=True)
class TunerUpdate:
    """One adapter's change of one weight.

    Row blocks, except where the file's rows are inputs (Conv1D): there the whole tensor's change is made at once, in
    float64.

    Attributes:
        tuner: the formula.
        learned: what goes into it.
        shape: out×in of the weight.
        weight: how much of the change is made.
        transposed: the weight is stored in×out.
        needed: what the formula makes of `learned`.
    """

    tuner: Tuner
    learned: ModuleTensors
    shape: WeightShape
    weight: float
    transposed: bool
    needed: KeptUntilLastRow

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the change, float64, of two dimensions; see `updates.Update`."""
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
    """Every change that an adapter makes, with the name of the base's tensor; nothing large is read.

    Args:
        adapter: of a kind with a `tuner`.
        homes: `<module>.weight` to the name of the base's tensor.
        current: the base's tensor of a name.
        has_bias: whether the base has a tensor of this name.
        is_conv1d: whether a weight is stored in×out, where its shape does not tell.
        weight: how much of the changes is made.

    Raises:
        MalformedInput: tensors that do not belong together, or to this base.
        UnsupportedInput: the weight in the base is not a floating-point tensor.
    """
    tuner = adapter.tuner
    if tuner is None:
        return
    places = {}
    for module, learned in adapter.learned.items():
        name, fit = homes[f"{module}.weight"], tuner.fit(learned)
        turned = (is_conv1d(name), learned.settings.flag("fan_in_fan_out")) if tuner.conv1d else (False, False)
        places[module] = name, *_lies(adapter.name, name, current(name), fit, turned)
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


def _lies(
    adapter: str, name: str, weight: LazyTensor, fit: FittingShape, turned: tuple[bool, bool]
) -> tuple[WeightShape, bool]:
    """out×in of the weight, and whether it is stored in×out.

    The second of `turned`, what the config says, counts where the weight does not fit otherwise: it is often wrong.
    """
    if weight.dtype.name not in ("float64", *FLOATS):
        raise UnsupportedInput(
            f"`{name}` of the base is stored as {weight.dtype.name}", hint="merge into the unquantized model"
        )
    if len(weight.shape) > 1:
        own = (weight.shape[0], prod(weight.shape[1:]))
        fits_turned = len(weight.shape) == 2 and _matches(own[::-1], fit)
        if fits_turned and (turned[0] or (turned[1] and not _matches(own, fit))):
            return own[::-1], True
        if _matches(own, fit):
            return own, False
    wanted = "×".join("any" if size is None else str(size) for size in fit)
    raise MalformedInput(
        f"`{adapter}` is for `{name}` of size {wanted}, in the base it has shape {list(weight.shape)}",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )


def _matches(shape: WeightShape, fit: FittingShape) -> bool:
    return all(wanted in (None, size) for size, wanted in zip(shape, fit, strict=True))
