"""The names of stored tensors in a model that transformers has loaded, by its own conversion mapping.

transformers renames the tensors of most models when it loads them, stacks experts, and joins, splits, permutes and
transposes some weights; it saves them under the old names again. Imports torch, so only for adapters that need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from llmconv.convert.algebra.operations import Lines, Origin
from llmconv.convert.models.meta_model import NotBuildable, model_of_class, quiet
from llmconv.errors import first_line

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Joint:
    """Tensors of a model in memory that together have the lines of some stored ones."""

    # name of each stored tensor to the location of its lines in `origins`, whose order is that of the sources
    stored: Mapping[str, Origin]
    origins: Mapping[str, Origin]  # name in memory to the location of its lines in the stored tensors


class NamesInMemory:
    """The names of a model in memory, as its class loads some stored tensors.

    Attributes:
        renamed: stored name to the name in memory, of tensors that are only renamed.
        parts: stored name to the name in memory that its stack of experts begins with, of tensors that are joined.
        shapes: of the tensors in memory.
        shared: name in memory to the name of the tensor that it is tied to by the class.
    """

    def __init__(self, shapes: Mapping[str, Shape], config: Mapping[str, Any], class_name: str) -> None:
        """Finds the names for stored tensors of these shapes; NotBuildable if transformers cannot build the model."""
        self._model = model_of_class(config, class_name)
        self._stored = shapes
        self.shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        self.shared: Mapping[str, str] = self._model.all_tied_weights_keys
        self.renamed: dict[str, str] = {}
        self.parts: dict[str, str] = {}
        self._sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._rules: dict[str, Any] = {}
        self._joints: dict[str, Joint] = {}
        rules = get_model_conversion_mapping(self._model)
        renamings, self._converters = _kinds(rules)
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        for name in sorted(shapes, key=dot_natural_key):
            self._find(name, renamings)
        self._spellings, _ = _kinds(get_model_conversion_mapping(self._model))  # apart: rules note their use
        self._back = [rule.reverse_transform() for rule in renamings[::-1] if rule.was_used()]
        self._keys = {target: key for key, rule in self._rules.items() for target in _targets(key, rule)}

    def _find(self, name: str, renamings: list[Any]) -> None:
        """Notes where transformers puts one stored tensor."""
        prefix, there = self._model.base_model_prefix, self.shapes
        new, pattern = rename_source_key(name, renamings, self._converters, prefix, there)
        if new not in there and name in there:
            new, pattern = rename_source_key(name, [], [], prefix, there)
        if new not in there:
            return
        rule = self._by_pattern.get(str(pattern))
        if rule is None or all(isinstance(each, Transpose) and each.check_dims for each in rule.operations):
            self.renamed[name] = new  # a stack of experts in either order, which its shape tells
            return
        self._sources[new][str(pattern)].append(name)
        self._rules[new] = rule
        self.parts[name] = apply_renamings(name, renamings)

    def spelled(self, name: str) -> str:
        """The name in memory of what an adapter of another version of transformers calls `name`."""
        if name in self.shapes:
            return name
        return str(rename_source_key(name, self._spellings, [], self._model.base_model_prefix, self.shapes)[0])

    def stored_name(self, name: str) -> str:
        """The name under which transformers stores a tensor that the files do not have yet."""
        return str(apply_renamings(name, self._back))

    def stack(self, name: str) -> tuple[tuple[str, ...], ...] | None:
        """The stored matrices of each expert, joined by rows, that `name` stacks; None if it is made in another way."""
        if (key := self._keys.get(name)) is None:
            return None
        rule, groups = self._rules[key], self._sources[key]
        steps = [(type(each), getattr(each, "dim", None)) for each in rule.operations]
        if steps != [(MergeModulelist, 0), (Concatenate, 1)][: 1 + (len(rule.source_patterns) > 1)]:
            return None
        parts = [groups.get(pattern, []) for pattern in rule.source_patterns]
        return tuple(zip(*parts, strict=True)) if len({len(each) for each in parts}) == 1 else None

    def joint(self, name: str) -> Joint | None:
        """What one tensor in memory consists of; None: a stored one. NotBuildable: more than whole lines are moved."""
        if (key := self._keys.get(name)) is None:
            return None
        if key not in self._joints:
            try:
                self._joints[key] = self._converted(key)
            except NotBuildable:
                raise
            except Exception as error:  # transformers and torch promise no class of error
                raise NotBuildable(f"{type(error).__name__}: {first_line(error, 120)}") from error
        return self._joints[key]

    def _converted(self, key: str) -> Joint:
        """Has transformers convert the numbers of the lines in place of the values."""
        rule, names = deepcopy(self._rules[key]), [name for group in self._sources[key].values() for name in group]
        layouts = [Lines(self._stored[name]) for name in names]
        starts = np.cumsum([0, *(each.count for each in layouts)])
        numbers = {name: _numbered(*pair) for name, *pair in zip(names, layouts, starts.tolist(), strict=False)}
        for pattern, group in self._sources[key].items():
            for name in group:
                rule.add_tensor(key, name, pattern, numbers[name])
        with quiet():
            made = rule.convert(key, model=self._model, config=self._model.config)
        origins = {name: self._origin(name, value, names, starts) for name, value in made.items()}
        return Joint(_inverted(names, layouts, origins), origins)

    def _origin(self, name: str, made: Any, names: list[str], starts: Any) -> Origin:
        made = made[0] if isinstance(made, list) else made
        shape, found = self.shapes[name], tuple(made.shape)
        if len(shape) == 1 or found == (*shape[:-1], 1) or (len(shape) > 3 and found == (shape[0], 1)):
            lines = Lines(shape)
        elif found == (*shape[:-2], 1, shape[-1]):
            lines = Lines(shape, swapped=True)
        else:
            raise NotBuildable(f"`{name}` is made of more than whole lines")
        flat = made.reshape(-1).numpy()
        owner = np.searchsorted(starts, flat, side="right") - 1
        return Origin(lines, tuple(names), owner, flat - starts[owner])


def _kinds(rules: list[Any]) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters of a mapping, which transformers applies in this order."""
    return (
        [rule for rule in rules if isinstance(rule, WeightRenaming)],
        [rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def _targets(key: str, rule: Any) -> list[str]:
    return [key.replace(rule.target_patterns[0], target) for target in rule.target_patterns]


def _numbered(lines: Lines, start: int) -> Any:
    """The numbers of a tensor's lines from `start`, in its shape but for the last dimension, which is 1."""
    shape = lines.shape if len(lines.shape) == 1 else (*lines.shape[:-1], 1)
    shape = (lines.shape[0], 1) if len(lines.shape) > 3 else shape
    return torch.arange(start, start + lines.count).reshape(shape)


def _inverted(names: list[str], layouts: list[Lines], origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """The location of the stored tensors' lines in those in memory; NotBuildable if a line is in none of them."""
    result = {}
    for number, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        owner, line = (np.full(layout.count, -1, np.int64) for _ in range(2))
        for place, origin in enumerate(origins.values()):
            mine = np.flatnonzero(origin.owner == number)
            owner[origin.line[mine]], line[origin.line[mine]] = place, mine
        if (owner < 0).any():
            raise NotBuildable(f"`{name}` is only partly in the model")
        result[name] = Origin(layout, tuple(origins), owner, line)
    return result


def classes(config: Mapping[str, Any], others: Collection[str]) -> list[str]:
    """Names of the classes of transformers that an adapter's model may have: that of the files first, then `others`."""
    own, kind = config.get("architectures"), str(config.get("model_type"))
    tables = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = [*(own if isinstance(own, list) else ()), *others, *(table.get(kind) for table in tables)]
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and name.isidentifier()))
