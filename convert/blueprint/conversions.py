"""Names under which other versions of transformers keep the same weights, such as one matrix per expert.

Source: the tables in transformers `conversion_mapping.py`, by which it renames and joins what it loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from llmconv.convert.blueprint.source import STAND_INS, source, transformers_folder

EXPERT_LIMIT = 1 << 16


class Renaming:
    """One tensor under another name: what matches one of `sources` becomes `target`."""

    def __init__(self, source_patterns: Any, target_patterns: Any) -> None:
        self.sources, self.targets = _listed(source_patterns), _listed(target_patterns)

    def new_name(self, name: str) -> str:
        """`name` as this rule changes it, if it does."""
        for pattern in self.sources:
            end = r"(?!\w)" if pattern[-1:].isalnum() else ""
            if match := re.search(pattern + end, name):
                target = re.sub(r"\\(?=[.])|[$^]|\(\?.*?\)", "", self.targets[0])
                first = match[1] if match.re.groups else ""
                return name.replace(match[0], target.replace(r"\1", first or ""), 1)
        return name


class Converter(Renaming):
    """Several tensors that are joined into one, or one that is split."""

    def __init__(self, source_patterns: Any, target_patterns: Any, operations: Any = (), **kwargs: Any) -> None:
        super().__init__(source_patterns, target_patterns)
        self.steps = [(type(one).__name__, getattr(one, "dim", None)) for one in operations]

    @property
    def stacks_experts(self) -> bool:
        """Whether it stacks one matrix per expert, after joining the rows of several of the same expert."""
        joined = [("MergeModulelist", 0), ("Concatenate", 1)]
        return self.steps == joined[: 1 + (len(self.sources) > 1)] and len(self.targets) == 1


class MergeModulelist:
    """Stacks tensors in a new dimension."""

    def __init__(self, dim: int = 0, **kwargs: Any) -> None:
        self.dim = dim


class Concatenate(MergeModulelist):
    """Joins tensors along a dimension."""


STAND_INS |= {
    "WeightRenaming": Renaming,
    "WeightConverter": Converter,
    "MergeModulelist": MergeModulelist,
    "Concatenate": Concatenate,
}


def _listed(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else [str(one) for one in patterns]


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    root = transformers_folder()
    try:
        table = source(root / "conversion_mapping.py")["_build_checkpoint_conversion_mapping"]() if root else {}
    except Exception:
        return {}
    return table if isinstance(table, dict) else {}


def conversions(class_name: str, model_type: str) -> list[Any]:
    """The rules for a model, in order; those of its class where it has some."""
    found = _table().get(class_name) or _table().get(model_type)
    return found if isinstance(found, list) else []


def new_names(names: Iterable[str], rules: list[Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Stored name to the name of today; what is `known` stays."""
    renamings = [rule for rule in rules if type(rule) is Renaming]
    return {name: name if name in known else _renamed(name, renamings) for name in names}


def _renamed(name: str, renamings: list[Renaming]) -> str:
    for rule in renamings:
        name = rule.new_name(name)
    return name


def parts(name: str, shape: tuple[int, ...] | None, rules: list[Any]) -> dict[str, tuple[int, ...]]:
    """The tensors, by name to shape, that the tensor `name` is stacked from; empty where it is not."""
    for rule in rules:
        if isinstance(rule, Converter) and rule.stacks_experts and name.endswith(rule.targets[0]) and shape:
            return dict(_experts(name.removesuffix(rule.targets[0]), shape, rule.sources))
    return {}


def _experts(start: str, shape: tuple[int, ...], sources: list[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for number in range(min(shape[0], EXPERT_LIMIT)):
        for pattern in sources:
            yield start + pattern.replace("*", str(number)), (shape[1] // len(sources), *shape[2:])


def is_readable(rules: list[Any]) -> bool:
    """Whether all rules are of the two kinds that are read here."""
    return all(type(rule) is Renaming or (isinstance(rule, Converter) and rule.stacks_experts) for rule in rules)
