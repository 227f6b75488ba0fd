"""Edits: the changes of each tensor of the base by all adapters; names and shapes are checked, no weights are read.

Where adapters have the names of the model in memory, they are placed on the base under those (`BaseInMemory`), and the
result of the merge goes back to the stored names.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llmconv.causal_lm import architecture
from llmconv.checkpoint import HEADS, Checkpoint
from llmconv.convert.adapters.adapter import (
    Adapter,
    FittingShape,
    ModuleTensors,
    TokenRows,
    Tuner,
    WeightShape,
    parts_from_saved,
    same_values,
    with_rows,
)
from llmconv.convert.adapters.low_rank_sum import LoraProduct, is_mirrored
from llmconv.convert.adapters.targets import (
    AdapterTargets,
    WeightChange,
    add_changes,
    fused_tensors,
    other_base,
    separate_tensors,
)
from llmconv.convert.adapters.tensor_names import AS_STORED, Naming, has_same_end, match_saved, prefix_fits
from llmconv.convert.algebra import Lines, Origin, equal, gathered, reshaped, zeros
from llmconv.convert.models.completeness import may_be_built
from llmconv.convert.models.head_and_dtype import find_embedding, find_head
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput, listing, word
from llmconv.tensors import BY_NAME, FLOATS, Array, DType, LazyTensor, cast, in_memory

if TYPE_CHECKING:
    from llmconv.convert.models.meta_model import Joint, NamesInMemory


HEAD = HEADS[0]

# The rest of the name of a transformers class after the family
CLASS = re.compile(r"(For[A-Z]|LMHead|DoubleHeads|Model|Pretrained|PreTrained).*")
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
        return name in self.whole or name in self.changes or name in self.tokens

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
        new = {name for name in adapter.whole if name not in self.tensors and parts_from_saved(name, modules)}
        targets = AdapterTargets(adapter, ChainMap(self.whole, self.tensors), self.config, self.naming)
        homes = targets.homes(adapter.whole.keys() - new)
        homes |= match_saved(new, homes, self.tensors.keys(), adapter.name, self.naming.spelled, modules)
        self._require_saved(adapter, homes)
        self._replace_all(adapter, homes)
        for module, tokens in adapter.tokens.items():
            self._replace_rows(adapter.name, homes[f"{module}.weight"], tokens)
        for module, pair in adapter.pairs.items():
            for name, changes in targets.changes(module, pair, weight):
                _require_float(name, self.current(name))
                # both tied ones if the adapter keeps the tie with one update
                kept = adapter.keeps_tie and name in self.tied and not {*self.tied} <= {*homes.values()}
                for each in self.tied if kept else (name,):
                    self.changes.setdefault(each, []).extend(changes)
            if bias := pair.bias:  # `lora_bias`, that of B: a product of a column and a 1×1 matrix
                name, scale = homes[f"{module}.bias"], weight * adapter.config.scale(module, pair.rank)
                if bias.shape != self.current(name).shape:
                    raise other_base(adapter.name, name, self.current(name).shape, bias.shape)
                self.changes.setdefault(name, []).append(LoraProduct(ONE, reshaped(bias, (*bias.shape, 1)), scale))
        has_bias = self.tensors.__contains__
        for name, update in updates_of(adapter, homes, self.current, has_bias, targets.is_conv1d, weight):
            self.changes.setdefault(name, []).append(update)
        self._warn(adapter, weight)

    def _require_saved(self, adapter: Adapter, homes: Mapping[str, str]) -> None:
        """Refuses an adapter without the weights of a module of the base that it trained as a whole."""
        by_tie = self.tied if {*self.tied} & {*homes.values()} else ()
        for module in adapter.config.modules_to_save:
            if any(parts_from_saved(name, (module,)) for name in (*adapter.whole, *homes.values())):
                continue
            lost = [name for name in self.tensors if parts_from_saved(name, (module,)) and name not in by_tie]
            if lost:
                raise MalformedInput(
                    f"`{adapter.name}` lacks `{lost[0]}`, which it trained by its `modules_to_save` ({module})",
                    hint="give a checkpoint with it; if it was not trained, remove it from `adapter_config.json`",
                )

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
        for name, tensor in originals.items():
            there = (known[name] for known in (self.tensors, self.whole) if name in known)
            if name not in trained and not any(same_values(tensor, one) for one in there):
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

    def _warn(self, adapter: Adapter, weight: float) -> None:
        notes = list(adapter.config.warnings)
        has_bias = any(name.endswith(".bias") for name in adapter.whole)
        if adapter.config.bias != "none" and not has_bias and any(name.endswith(".bias") for name in self.tensors):
            notes.append(f"`bias` is {adapter.config.bias!r}, but the file holds no bias; PEFT up to 0.20 lost them")
        own = architecture(self.config)
        one, other = (CLASS.sub("", name) for name in (own, adapter.config.base_class))
        if one and other and not (one.startswith(other) or other.startswith(one)):  # of another family
            notes.append(f"it was trained on a `{adapter.config.base_class}`, the base is a `{own}`")
        if weight != 1 and (count := len(adapter.whole) + len(adapter.tokens)):
            notes.append(f"the weight {weight:g} does not apply to the {count} tensors it replaces")
        self.warnings += [f"`{adapter.name}`: {note}" for note in notes]


TILE_ELEMENTS = 1 << 18  # elements computed at once, so that intermediate results stay small


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
        if self.transposed:
            whole: Array = self.needed.take(
                stop - start,
                lambda: np.ascontiguousarray(
                    self.weight * self.tuner.delta(self.learned, self.shape)(base.read().T.astype(np.float64), 0).T
                ),
            )
            return whole[start:stop]
        delta = self.needed.take(stop - start, lambda: self.tuner.delta(self.learned, self.shape))
        result = np.empty((stop - start, self.shape[1]))
        height, group = max(1, TILE_ELEMENTS // max(1, self.shape[1])), self.tuner.group(self.learned)
        for first in range(start, stop, height):
            last = min(first + height, stop)
            low, high = first - first % group, last + -last % group
            rows = base.rows(low, high).reshape(high - low, -1).astype(np.float64)
            own = delta(rows, low)[first - low : last - low]
            np.multiply(own, self.weight, out=result[first - start : last - start])
        return result


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
    if (tuner := adapter.tuner) is None:
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


def _require_float(name: str, weight: LazyTensor) -> None:
    if weight.dtype.name not in ("float64", *FLOATS):
        raise UnsupportedInput(
            f"`{name}` of the base is stored as {weight.dtype.name}", hint="merge into the unquantized model"
        )


def _orientation(
    adapter: str, name: str, weight: LazyTensor, fit: FittingShape, swapped: tuple[bool, bool]
) -> tuple[WeightShape, bool]:
    """out×in of the weight, and whether it is stored in×out: by model type or, where only that fits, by the config."""
    _require_float(name, weight)
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


FLOAT32 = BY_NAME["float32"]

# Model types whose modules share weights: a name of an adapter may be in the files, and stand for others, too
SHARING = ("diffusion_gemma", "udop", "zamba", "zamba2")
Tensors = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class Recovered:
    """The update of a stored tensor whose lines are in tensors in memory: `merged` (float64) minus the base's."""

    merged: LazyTensor

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        made: Array = self.merged.rows(start, stop) - base.rows(start, stop).astype("float64")
        return made.reshape(stop - start, -1)


@dataclass(frozen=True)
class BaseInMemory:
    """The base under the names of the model in memory."""

    stored: Checkpoint  # the base
    tensors: dict[str, LazyTensor]  # name in memory to tensor; joined, split or rearranged ones are lazy
    renamed: Mapping[str, str]  # stored name to name in memory, where the tensor is the same
    origins: Mapping[str, Origin]  # name of any other stored tensor to the location of its lines in tensors in memory
    layouts: Mapping[str, Lines]  # of the tensors in memory that those name
    naming: Naming  # for placing adapters
    stored_name: Callable[[str], str]  # returns the name for a tensor that the base does not have
    model: Collection[str]  # names of all tensors of the model in memory

    def restored(self, merged: dict[str, LazyTensor], edits: Edits) -> tuple[dict[str, LazyTensor], Edits]:
        """The result of a merge and its edits, renamed from names in memory to stored names."""
        names = {new: old for old, new in self.renamed.items()}
        joined = {source for origin in self.origins.values() for source in origin.sources}
        added = [name for name in merged if name not in names and name not in joined]
        names |= {name: self.stored_name(name) for name in added}
        tensors: dict[str, LazyTensor] = {}
        for name in self.stored:
            if name in self.origins:
                tensors[name] = self._gathered(name, merged)
            elif self.renamed[name] in merged:
                tensors[name] = merged[self.renamed[name]]
        tensors |= {names[name]: merged[name] for name in added}
        # the edits by stored names; the whole tensor counts as changed where a part of it is
        changes: dict[str, list[WeightChange]] = {names[n]: c for n, c in edits.changes.items() if n in names}
        whole = {names[name]: tensor for name, tensor in edits.whole.items() if name in names}
        for name, origin in self.origins.items():
            if any(source in edits.changes for source in origin.sources):
                exact = {source: edits.result(source, BY_NAME["float64"]) for source in origin.sources}
                changes[name] = [Recovered(self._gathered(name, exact))]
            elif any(edits.touches(source) for source in origin.sources):
                whole[name] = tensors[name]
        there = {old: edits.tensors[new] for new, old in names.items() if new in edits.tensors}
        tied = tuple(names.get(name) or self.stored_name(name) for name in edits.tied)
        tokens = {names[name]: rows for name, rows in edits.tokens.items() if name in names}
        stored = {**self.stored.tensors, **there}
        return tensors, Edits(stored, edits.config, tied, whole, tokens, changes, edits.warnings)

    def _gathered(self, name: str, tensors: Tensors) -> LazyTensor:
        origin = self.origins[name]
        there = [tensors[source] for source in origin.sources]
        if all(tensor is self.tensors[source] for tensor, source in zip(there, origin.sources, strict=True)):
            return self.stored[name]
        return gathered(origin, there, [self.layouts[source] for source in origin.sources], there[0].dtype)


def base_in_memory(base: Checkpoint, tensors: Tensors, adapters: Sequence[Adapter]) -> BaseInMemory | None:
    """The base by names in memory; None if adapters have the files' names. UnsupportedInput: a shared weight."""
    may_share = base.config.get("model_type") in SHARING
    if not may_share and not any(_lacks(adapter, tensors, base.config) for adapter in adapters):
        return None
    if not may_be_built(base.tensors, base.config):
        return None
    from llmconv.convert.models.meta_model import NamesInMemory, NotBuildable, classes  # noqa: PLC0415

    shapes = {name: tensor.shape for name, tensor in base.items()}
    for class_name in classes(base.config, [adapter.config.base_class for adapter in adapters]):
        try:
            names = NamesInMemory(shapes, base.config, class_name)
            for adapter in adapters:
                _refuse_shared(adapter, names, base)
            wanted = {name for adapter in adapters for name in _in_memory(names, adapter, base.config)}
            biases = {f"{name.removesuffix('.weight')}.bias" for name in wanted if name.endswith(".weight")}
            found = _under(base, names, [*wanted, *(biases - wanted) & names.shapes.keys()])
        except NotBuildable:
            continue
        if found:
            return found
    return None


def _expected(adapter: Adapter, targets: AdapterTargets) -> set[str]:
    """Names of tensors that the base must have; a saved module whose name resembles none may be a new one."""
    has_head = any(other.endswith(HEADS) for other in targets.tensors)  # which files may call otherwise
    new = {
        name
        for name in adapter.whole
        if (parts := parts_from_saved(name, adapter.config.modules_to_save))
        and not (has_head and name.endswith(HEADS))
        and not any(has_same_end(name, other, parts) for other in targets.tensors)
    }
    return targets.names(adapter.whole.keys() - new)


def _lacks(adapter: Adapter, tensors: Tensors, config: Mapping[str, Any]) -> bool:
    """Whether an adapter's names are not the base's, even with another prefix (which does not tell towers apart)."""
    targets = AdapterTargets(adapter, tensors, config)
    expected, known = _expected(adapter, targets), {*targets.known}
    missing = sorted(expected - known)
    has_towers = any(isinstance(part, dict) and "model_type" in part for part in config.values())
    return bool(missing) and (has_towers or len(prefix_fits(missing, known, dict.fromkeys(expected & known, ""))) != 1)


def _refuse_shared(adapter: Adapter, names: NamesInMemory, base: Checkpoint) -> None:
    """Refuses (UnsupportedInput) changes of weights that modules share; embedding and head are separated later.

    Each module has its own factors (PEFT gives them to one, or different ones to all), and after a merge all modules
    would have the sum: PEFT's own merge of such a model is not the model that was trained.
    """
    pairs = {
        name: other
        for name, other in names.shared.items()
        if not (name.endswith(HEADS) and other.endswith(EMBEDDINGS)) and not name.endswith("bias")
    }
    sources = {*pairs.values()}
    found = sorted(name for name in _in_memory(names, adapter, base.config) if name in pairs or name in sources)
    if not found:
        return
    source = pairs.get(found[0], found[0])
    others = [name for name in (source, *(one for one, two in pairs.items() if two == source)) if name != found[0]]
    raise UnsupportedInput(
        f"`{adapter.name}` adapts weights that several modules share: `{found[0]}` is also {listing(others)}, "
        "and merged it would change in all of them",
        hint="use it unmerged, in PEFT or by "
        f"`llmconv generate {word(base.path)} --adapter {word(adapter.path)} --backend torch`",
    )


def _in_memory(names: NamesInMemory, adapter: Adapter, config: Mapping[str, Any]) -> set[str]:
    """Names in memory of the tensors that an adapter changes."""
    model = {name: zeros(FLOAT32, shape) for name, shape in names.shapes.items()}
    return {names.spelled(name) for name in _expected(adapter, AdapterTargets(adapter, model, config))}


def _under(base: Checkpoint, names: NamesInMemory, wanted: Sequence[str]) -> BaseInMemory | None:
    """The base in the names of one class; None if it lacks adapters' tensors. NotBuildable: more than lines move."""
    renamed = {name: names.renamed.get(name) or names.parts.get(name) or name for name in base}
    if len({*renamed.values()}) < len(renamed):
        return None
    stacks: dict[str, tuple[tuple[str, ...], ...]] = {}
    joints: list[Joint] = []
    for name in sorted({*wanted} - {*renamed.values()}):
        if stack := names.stack(name):
            stacks[name] = tuple(tuple(renamed[part] for part in parts) for parts in stack)
        elif (joint := names.joint(name)) and joint not in joints:
            joints.append(joint)
    origins = {name: origin for joint in joints for name, origin in joint.stored.items()}
    if any(len({base[name].dtype for name in joint.stored}) > 1 for joint in joints):
        return None
    tensors = {renamed[name]: tensor for name, tensor in base.items() if name not in origins}
    for joint in joints:
        layouts = [origin.lines for origin in joint.stored.values()]
        there = [base[name] for name in joint.stored]
        tensors |= {name: gathered(each, there, layouts, there[0].dtype) for name, each in joint.origins.items()}
    head = find_head(tensors, find_embedding(tensors))
    if {*wanted} - {*tensors, *stacks, *separate_tensors(tensors), *fused_tensors(tensors), head}:
        return None
    return BaseInMemory(
        base,
        tensors,
        {name: new for name, new in renamed.items() if name not in origins},
        origins,
        {name: each.lines for joint in joints for name, each in joint.origins.items()},
        Naming(names.spelled, stacks),
        names.stored_name,
        names.shapes.keys(),
    )
