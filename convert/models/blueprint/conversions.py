"""Renaming tensors of other versions of transformers to the names of the installed one; experts stored one by one.

Source: the tables in transformers `conversion_mapping.py`, by which it renames and joins what it loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from llmconv.convert.models.blueprint.transformers_source import STAND_INS, source, transformers_folder

EXPERT_LIMIT = 1 << 16

Shape = tuple[int, ...] | None


class Renaming:
    """One tensor under another name: what matches one of the sources becomes the target."""

    def __init__(self, source_patterns: Any, target_patterns: Any) -> None:
        self.source_patterns, self.target_patterns = _listed(source_patterns), _listed(target_patterns)

    def new_name(self, name: str) -> str:
        """`name` as this rule changes it, if it does."""
        for pattern in self.source_patterns:
            end = r"(?!\w)" if pattern[-1:].isalnum() else ""
            if match := re.search(pattern + end, name):
                first = match[1] if match.re.groups else ""
                return name.replace(match[0], _plain(self.target_patterns[0]).replace(r"\1", first or ""), 1)
        return name


class PrefixChange(Renaming):
    """A part of every name that is added, where it is not there yet, or taken away."""

    def __init__(self, prefix_to_add: Any = None, prefix_to_remove: Any = None, model_prefix: Any = None) -> None:
        start = rf"{model_prefix}\." if model_prefix else ""
        if prefix_to_add is not None:
            super().__init__(rf"^{start}(?!{prefix_to_add}\.)(.+)", rf"{start}{prefix_to_add}\.\1")
        else:
            super().__init__(rf"^{start}{prefix_to_remove}\.(.+)", rf"{start}\1")


class Converter(Renaming):
    """Several tensors that are joined into one, or one that is split."""

    def __init__(self, source_patterns: Any, target_patterns: Any, operations: Any = (), **kwargs: Any) -> None:
        super().__init__(source_patterns, target_patterns)
        self.steps = [(type(one).__name__, getattr(one, "dim", None)) for one in operations]

    @property
    def stacks_experts(self) -> bool:
        """Whether it stacks one matrix per expert, after joining the rows of several of the same expert."""
        joined = [("MergeModulelist", 0), ("Concatenate", 1)]
        return self.steps == joined[: 1 + (len(self.source_patterns) > 1)] and len(self.target_patterns) == 1


class MergeModulelist:
    """Stacks tensors in a new dimension."""

    def __init__(self, dim: int = 0, **kwargs: Any) -> None:
        self.dim = dim


class Concatenate(MergeModulelist):
    """Joins tensors along a dimension."""


STAND_INS |= {
    "PrefixChange": PrefixChange,
    "WeightRenaming": Renaming,
    "WeightConverter": Converter,
    "MergeModulelist": MergeModulelist,
    "Concatenate": Concatenate,
}


def _plain(pattern: str) -> str:
    """The text that a pattern of names stands for."""
    return re.sub(r"\\(?=[.])|[$^]|\(\?.*?\)", "", pattern)


def _listed(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else [str(one) for one in patterns]


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    """transformers' table of rules by model type or class; empty where its source cannot be run."""
    root = transformers_folder()
    try:
        table = source(root / "conversion_mapping.py")["_build_checkpoint_conversion_mapping"]() if root else {}
    except Exception:
        return {}
    return table if isinstance(table, dict) else {}


def conversions(class_name: str, model_type: str) -> list[Any] | None:
    """The rules for a model, in order, those of its class where it has some; None where the table cannot be read."""
    found = _table().get(class_name) or _table().get(model_type)
    return (found if isinstance(found, list) else []) if _table() else None


def is_known(rule: object) -> bool:
    """Whether a rule only renames, or stacks experts; any other needs transformers itself."""
    return type(rule) in (Renaming, PrefixChange) or (isinstance(rule, Converter) and rule.stacks_experts)


def new_names(names: Iterable[str], rules: list[Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Stored name to that in the installed transformers; names in `known` stay. `rules` are from `conversions`."""
    renamings = [rule for rule in rules if type(rule) in (Renaming, PrefixChange)]
    return {name: name if name in known else _renamed(name, renamings) for name in names}


def _renamed(name: str, renamings: list[Renaming]) -> str:
    for rule in renamings:
        name = rule.new_name(name)
    return name


def experts(name: str, shape: Shape, rules: list[Any]) -> dict[str, Shape]:
    """Name to shape of the single experts' tensors in a stacked one (experts first); empty if there are none."""
    for rule in rules:
        is_stack = isinstance(rule, Converter) and rule.stacks_experts
        if shape and is_stack and name.endswith(target := _plain(rule.target_patterns[0])):
            start, sources = name.removesuffix(target), [_plain(one) for one in rule.source_patterns]
            return dict(_each_expert(start, shape, sources))
    return {}


def _each_expert(start: str, shape: tuple[int, ...], sources: list[str]) -> Iterator[tuple[str, Shape]]:
    for number in range(min(shape[0], EXPERT_LIMIT)):
        for pattern in sources:
            yield start + pattern.replace("*", str(number)), (shape[1] // len(sources), *shape[2:])
