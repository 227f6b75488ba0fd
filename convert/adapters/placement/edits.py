"""Edits: the changes of each tensor of the base by all adapters; names and shapes are checked, no weights are read."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from typing import Any

import numpy as np

from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.low_rank_sum import LoraProduct, is_mirrored
from llmconv.convert.adapters.placement.targets import AdapterTargets, WeightChange, add_changes, other_base
from llmconv.convert.adapters.placement.tensor_names import AS_STORED, Naming, match_saved
from llmconv.convert.adapters.saved_modules import TokenRows, changed_originals, is_saved, same_values, with_rows
from llmconv.convert.adapters.tuners import FittingShape, Tuner, WeightShape
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors
from llmconv.convert.algebra.operations import equal
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import BY_NAME, FLOATS, Array, DType, LazyTensor, cast, in_memory

HEAD = HEADS[0]

CLASS = re.compile(r"(For[A-Z]|LMHead|DoubleHeads|Model|Pretrained|PreTrained).*")
"""The rest of the name of a transformers class after the family."""

ONE = in_memory(np.ones((1, 1), dtype=np.float32), BY_NAME["float32"])


@dataclass
class Edits:
    """The changes of the base's tensors by all adapters together, by the base's names."""

    tensors: dict[str, LazyTensor]  # the base's tensors, and those that adapters add
    config: Mapping[str, Any]
    # names of embedding and head if they are one tensor in the base; `tensors` then has both
    tied: tuple[str, ...] = ()
    whole: dict[str, LazyTensor] = field(default_factory=dict)  # tensors that are replaced
    tokens: dict[str, list[TokenRows]] = field(default_factory=dict)  # rows that are replaced, after whole tensors
    changes: dict[str, list[WeightChange]] = field(default_factory=dict)  # updates that are added after replacing
    warnings: list[str] = field(default_factory=list)  # one line each
    naming: Naming = AS_STORED

    def touches(self, name: str | None) -> bool:
        """Whether any adapter changes the tensor."""
        return name in self.whole or name in self.changes or name in self.tokens

    def replaces(self, name: str) -> bool:
        """Whether an adapter replaces the tensor, or rows of it."""
        return name in self.whole or name in self.tokens

    def only_tokens(self, name: str | None) -> bool:
        """Whether replaced rows are the only change of the tensor."""
        return name in self.tokens and name not in self.whole and name not in self.changes

    def same(self, name: str, other: str | None) -> bool:
        """Whether two tied tensors stay equal after their edits."""
        if other is None or (name in self.tokens) != (other in self.tokens):
            return False
        pairs = zip(self.tokens.get(name, []), self.tokens.get(other, []), strict=False)
        alike = all(one is two or (one.ids == two.ids and equal(one.rows, two.rows)) for one, two in pairs)
        mine, others = self.changes.get(name, []), self.changes.get(other, [])
        alike &= len(mine) == len(others) and len(self.tokens.get(name, [])) == len(self.tokens.get(other, []))
        alike = alike and all(is_mirrored(one, two) for one, two in zip(mine, others, strict=True))
        one, two = (self.whole.get(each) or self.tensors[each] for each in (name, other))
        return alike and (one is two or equal(one, two))

    def current(self, name: str) -> LazyTensor:
        """The tensor before updates are added; in float32 if both rows are replaced and updates added."""
        tensor = self.whole.get(name) or self.tensors[name]
        if name not in self.tokens:
            return tensor
        wide = name in self.changes and tensor.dtype.itemsize < 4
        return with_rows(cast(tensor, BY_NAME["float32"]) if wide else tensor, self.tokens[name])

    def result(self, name: str, dtype: DType) -> LazyTensor:
        """The tensor after all edits, rounded once to `dtype`."""
        if name in self.changes:
            return add_changes(self.current(name), self.changes[name], dtype)
        return cast(self.current(name), dtype)

    def place(self, adapter: Adapter, weight: float) -> None:
        """Adds one adapter, its updates times `weight`; MalformedInput: another base, UnsupportedInput: a layer."""
        modules = adapter.config.modules_to_save
        new = {name for name in adapter.whole if name not in self.tensors and is_saved(name, modules)}
        targets = AdapterTargets(adapter, ChainMap(self.whole, self.tensors), self.config, self.naming)
        homes = targets.homes(adapter.whole.keys() - new)
        homes |= match_saved(new, homes, self.tensors.keys(), adapter.name, self.naming.spelled, modules)
        self._replace_all(adapter, homes)
        for module, tokens in adapter.tokens.items():
            self._replace_rows(adapter.name, homes[f"{module}.weight"], tokens)
        for module, pair in adapter.pairs.items():
            for name, changes in targets.changes(module, pair, weight):
                self._require_float(name)
                for each in self._tied_with(name, adapter, homes):
                    self.changes.setdefault(each, []).extend(changes)
            if pair.bias:
                scale = weight * adapter.config.scale(module, pair.rank)
                self._change_bias(adapter.name, homes[f"{module}.bias"], pair.bias, scale)
        has_bias = self.tensors.__contains__
        for name, update in updates_of(adapter, homes, self.current, has_bias, targets.is_conv1d, weight):
            self.changes.setdefault(name, []).append(update)
        self._warn(adapter, weight)

    def _tied_with(self, name: str, adapter: Adapter, homes: Mapping[str, str]) -> tuple[str, ...]:
        """The tensors that an update is added to: both tied ones if the adapter keeps the tie with one update."""
        kept = adapter.keeps_tie and name in self.tied and not {*self.tied} <= {*homes.values()}
        return self.tied if kept else (name,)

    def _replace_all(self, adapter: Adapter, homes: Mapping[str, str]) -> None:
        """Replaces whole tensors; in a tied base, a resized embedding replaces the head, too."""
        originals = {homes.get(name, name): tensor for name, tensor in adapter.originals.items()}
        trained = {
            homes.get(name, name): tensor
            for name, tensor in adapter.whole.items()
            if tensor is not adapter.originals.get(name)
        }
        for one, other in (self.tied, self.tied[::-1]) if self.tied else ():
            if one in originals and other not in trained:
                originals.setdefault(other, originals[one])
        for name, tensor in changed_originals(originals, self.tensors).items():
            if name not in trained and not (name in self.whole and same_values(tensor, self.whole[name])):
                self._replace(adapter.name, name, tensor)
        for name, tensor in trained.items():
            self._replace(adapter.name, name, tensor)

    def _replace(self, adapter: str, name: str, tensor: LazyTensor) -> None:
        if name in self.whole:
            raise MalformedInput(
                f"`{adapter}` replaces `{name}`, which another adapter replaces too",
                hint="whole tensors cannot be summed; merge one adapter at a time and decide which one counts",
            )
        there = self.tensors.setdefault(name, tensor)
        rows_may_differ = name.endswith((*HEADS, *EMBEDDINGS))
        if there.shape != tensor.shape and not (rows_may_differ and there.shape[1:] == tensor.shape[1:]):
            raise other_base(adapter, name, there.shape, tensor.shape)
        self.whole[name] = tensor

    def _replace_rows(self, adapter: str, name: str, tokens: TokenRows) -> None:
        shape = self.current(name).shape
        if len(shape) != 2 or shape[1:] != tokens.rows.shape[1:] or max(tokens.ids) >= shape[0]:
            raise MalformedInput(
                f"`{adapter}` replaces row {max(tokens.ids)} of {tokens.rows.shape[1]} numbers in `{name}`, "
                f"in the base it has shape {list(shape)}",
                hint="the adapter was trained on another model; see its `base_model_name_or_path`",
            )
        taken = {row for other in self.tokens.get(name, []) for row in other.ids}
        if common := sorted(taken & set(tokens.ids)):
            raise MalformedInput(
                f"`{adapter}` replaces row {common[0]} of `{name}`, which another adapter replaces too",
                hint="trained rows cannot be summed; merge one adapter at a time and decide which one counts",
            )
        self.tokens.setdefault(name, []).append(tokens)

    def _require_float(self, name: str) -> None:
        if (dtype := self.current(name).dtype).name not in ("float64", *FLOATS):
            raise UnsupportedInput(
                f"`{name}` of the base is stored as {dtype.name}", hint="merge into the unquantized model"
            )

    def _change_bias(self, adapter: str, name: str, bias: LazyTensor, scale: float) -> None:
        """`lora_bias`: the bias of B is added as a product of a column and a 1×1 matrix."""
        if bias.shape != self.current(name).shape:
            raise other_base(adapter, name, self.current(name).shape, bias.shape)
        column = LazyTensor(bias.dtype, (*bias.shape, 1), lambda start, stop: bias.rows(start, stop).reshape(-1, 1))
        self.changes.setdefault(name, []).append(LoraProduct(ONE, column, scale))

    def _warn(self, adapter: Adapter, weight: float) -> None:
        notes = list(adapter.config.warnings)
        has_bias = any(name.endswith(".bias") for name in adapter.whole)
        if adapter.config.bias != "none" and not has_bias and any(name.endswith(".bias") for name in self.tensors):
            notes.append(f"`bias` is {adapter.config.bias!r}, but the file holds no bias; PEFT up to 0.20 lost them")
        if other := self._other_family(adapter.config.base_class):
            notes.append(f"it was trained on a `{adapter.config.base_class}`, the base is a `{other}`")
        if weight != 1 and (count := len(adapter.whole) + len(adapter.tokens)):
            notes.append(f"the weight {weight:g} does not apply to the {count} tensors it replaces")
        self.warnings += [f"`{adapter.name}`: {note}" for note in notes]

    def _other_family(self, trained: str) -> str:
        """The base's class if it is of another family than `trained`, the class of the training base; else empty."""
        classes = self.config.get("architectures")
        own = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
        one, other = (CLASS.sub("", name) for name in (own, trained))
        return own if one and other and not (one.startswith(other) or other.startswith(one)) else ""


TILE_ELEMENTS = 1 << 18
"""Elements computed at once, so that intermediate results stay small."""


@dataclass
class KeptUntilLastRow:
    """A value that all rows of a tensor need: computed by the first thread, released after the last of `rows` rows."""

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
    """The update of one weight (`shape` out×in) by one adapter, multiplied by the adapter's `weight`.

    Computed by row blocks; for weights stored in×out (Conv1D, `transposed`) the whole update at once, in float64.
    `needed` is the result of `tuner.delta`, shared by all rows.
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
    """Names of the base's tensors and their updates, times `weight`, by a `tuner` if any; reads nothing large.

    `homes` maps `<module>.weight` to the base's name. Raises MalformedInput for another base, UnsupportedInput for a
    weight that is not floating-point.
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
    """out×in of the weight, and whether it is stored in×out: by model type or, where only that fits, by the config."""
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
