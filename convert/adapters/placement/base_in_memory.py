"""BaseInMemory: the base under the names of the model in memory, and the way back of a merge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.placement.edits import Edits
from llmconv.convert.adapters.placement.targets import AdapterTargets, WeightChange, fused_tensors, separate_tensors
from llmconv.convert.adapters.placement.tensor_names import Naming, has_same_end, prefix_fits
from llmconv.convert.adapters.saved_modules import parts_from_saved
from llmconv.convert.algebra.operations import Lines, Origin, gathered
from llmconv.convert.models.blueprint.names import EMBEDDINGS, HEADS
from llmconv.convert.models.completeness import may_be_built
from llmconv.convert.models.tied_head import find_embedding, find_head
from llmconv.errors import UnsupportedInput, listing
from llmconv.tensors import BY_NAME, Array, LazyTensor

if TYPE_CHECKING:
    from llmconv.convert.models.names_in_memory import Joint, NamesInMemory

FLOAT32 = BY_NAME["float32"]

SHARING = ("diffusion_gemma", "udop", "zamba", "zamba2")
"""Model types whose modules share weights: a name of an adapter may be in the files, and stand for others, too."""

Tensors = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class Recovered:
    """The update of a stored tensor whose lines are in tensors in memory: `merged` (float64) minus the base's."""

    merged: LazyTensor

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the update, float64, two-dimensional; see `WeightUpdate`."""
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

    def checkpoint(self) -> Checkpoint:
        """The base to place adapters on."""
        return replace(self.stored, tensors=self.tensors)

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
        return tensors, self._edits(edits, names, tensors)

    def _gathered(self, name: str, tensors: Tensors) -> LazyTensor:
        origin = self.origins[name]
        there = [tensors[source] for source in origin.sources]
        if all(tensor is self.tensors[source] for tensor, source in zip(there, origin.sources, strict=True)):
            return self.stored[name]
        return gathered(origin, there, [self.layouts[source] for source in origin.sources], there[0].dtype)

    def _edits(self, edits: Edits, names: Mapping[str, str], tensors: Tensors) -> Edits:
        """Edits by stored names; the whole tensor counts as changed where a part of it is."""
        changes: dict[str, list[WeightChange]] = {names[n]: c for n, c in edits.changes.items() if n in names}
        whole = {names[name]: tensor for name, tensor in edits.whole.items() if name in names}
        for name, origin in self.origins.items():
            if any(source in edits.changes for source in origin.sources):
                exact = {source: edits.result(source, BY_NAME["float64"]) for source in origin.sources}
                changes[name] = [Recovered(self._gathered(name, exact))]
            elif any(edits.touches(source) for source in origin.sources):
                whole[name] = tensors[name]
        there = {old: edits.tensors[new] for new, old in names.items() if new in edits.tensors}
        return Edits(
            {**self.stored.tensors, **there},
            edits.config,
            tuple(names.get(name) or self.stored_name(name) for name in edits.tied),
            whole,
            {names[name]: rows for name, rows in edits.tokens.items() if name in names},
            changes,
            edits.warnings,
        )


def base_in_memory(base: Checkpoint, tensors: Tensors, adapters: Sequence[Adapter]) -> BaseInMemory | None:
    """The base by names in memory; None if adapters have the files' names. UnsupportedInput: a shared weight."""
    may_share = base.config.get("model_type") in SHARING
    if not may_share and not any(_lacks(adapter, tensors, base.config) for adapter in adapters):
        return None
    if not may_be_built(base.tensors, base.config):
        return None
    from llmconv.convert.models.meta_model import NotBuildable  # noqa: PLC0415 - torch
    from llmconv.convert.models.names_in_memory import NamesInMemory, classes  # noqa: PLC0415

    shapes = {name: tensor.shape for name, tensor in base.items()}
    for class_name in classes(base.config, [adapter.config.base_class for adapter in adapters]):
        try:
            names = NamesInMemory(shapes, base.config, class_name)
            for adapter in adapters:
                _refuse_shared(adapter, names, base)
            found = _under(base, names, [*_wanted(names, adapters, base.config)])
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
    found = dict.fromkeys(expected & known, "")
    return bool(missing) and (has_towers or len(prefix_fits(missing, known, found)) != 1)


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
        hint=f"use it unmerged, in PEFT or by `llmconv generate {base.path} --adapter {adapter.path} --backend torch`",
    )


def _in_memory(names: NamesInMemory, adapter: Adapter, config: Mapping[str, Any]) -> set[str]:
    """Names in memory of the tensors that an adapter changes."""
    model = {name: LazyTensor(FLOAT32, shape, _unread) for name, shape in names.shapes.items()}
    return {names.spelled(name) for name in _expected(adapter, AdapterTargets(adapter, model, config))}


def _wanted(names: NamesInMemory, adapters: Sequence[Adapter], config: Mapping[str, Any]) -> set[str]:
    """Names in memory of all tensors that adapters change or may need, biases among them."""
    found = {name for adapter in adapters for name in _in_memory(names, adapter, config)}
    biases = {f"{name.removesuffix('.weight')}.bias" for name in found if name.endswith(".weight")}
    return found | (biases & names.shapes.keys())


def _unread(start: int, stop: int) -> Array:
    raise AssertionError("a tensor of the model in memory has no values")


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
    known = {*tensors, *stacks, *separate_tensors(tensors), *fused_tensors(tensors)}
    head = find_head(tensors, find_embedding(tensors))
    if {*wanted} - known - {head}:
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
