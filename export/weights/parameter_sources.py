"""Parameters of the model as expressions over the tensors that a checkpoint stores.

transformers keeps experts stacked and some projections fused, while checkpoints store them one by one (or the reverse),
as its conversion mapping declares (`transformers.conversion_mapping`). This module turns that mapping into expressions
over stored tensors, so that a graph can map the stored bytes instead of a converted copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from llmconv.errors import UnsupportedInput


@dataclass(frozen=True)
class StoredRows:
    """Rows of a stored tensor, which are adjacent bytes of its file.

    `stored` is its whole shape. A `count` of -1 means all rows; `single` drops the first axis of one row.
    """

    name: str
    stored: tuple[int, ...]
    first: int = 0
    count: int = -1
    single: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows, with the first axis."""
        return self.count in (-1, self.stored[0] if self.stored else -1) and not self.single

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows."""
        if self.single:
            return self.stored[1:]
        return self.stored if self.is_whole else (self.count, *self.stored[1:])

    @property
    def label(self) -> str:
        """The tensor's name, followed by `[row]` or `[first:stop]` for a part of it."""
        if self.is_whole:
            return self.name
        return f"{self.name}[{self.first}]" if self.single else f"{self.name}[{self.first}:{self.first + self.count}]"


@dataclass(frozen=True)
class Concatenation:
    """Expressions joined in order along `axis`; with `stack`, along a new first axis instead."""

    parts: tuple[WeightSource, ...]
    axis: int
    stack: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        part = self.parts[0].shape
        if self.stack:
            return (len(self.parts), *part)
        size = sum(each.shape[self.axis] for each in self.parts)
        return (*part[: self.axis], size, *part[self.axis + 1 :])


@dataclass(frozen=True)
class Transposition:
    """An expression with two axes exchanged."""

    whole: WeightSource
    axes: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after the exchange."""
        a, b = self.axes
        sizes = list(self.whole.shape)
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return tuple(sizes)


@dataclass(frozen=True)
class Deinterleaved:
    """An axis reordered: first all even entries, then all odd entries."""

    whole: WeightSource
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape does not change."""
        return self.whole.shape


@dataclass(frozen=True)
class AxisSlice:
    """The entries `first` to `first + count` of an axis of an expression."""

    whole: WeightSource
    axis: int
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the range."""
        sizes = list(self.whole.shape)
        sizes[self.axis] = self.count
        return tuple(sizes)


WeightSource = StoredRows | Concatenation | Transposition | Deinterleaved | AxisSlice


def leaves(whole: WeightSource) -> Iterator[StoredRows]:
    """All stored rows in an expression."""
    if isinstance(whole, StoredRows):
        yield whole
    elif isinstance(whole, Concatenation):
        for part in whole.parts:
            yield from leaves(part)
    else:
        yield from leaves(whole.whole)


def element(whole: WeightSource, index: int) -> WeightSource:
    """Entry `index` of the first axis, without that axis."""
    if isinstance(whole, StoredRows):
        assert not whole.single
        return replace(whole, first=whole.first + index, count=1, single=True)
    if isinstance(whole, Concatenation) and whole.stack:
        return whole.parts[index]
    if isinstance(whole, Concatenation) and whole.axis > 0:
        return Concatenation(tuple(element(part, index) for part in whole.parts), whole.axis - 1)
    if isinstance(whole, Transposition) and 0 not in whole.axes:
        return Transposition(element(whole.whole, index), (whole.axes[0] - 1, whole.axes[1] - 1))
    if isinstance(whole, Deinterleaved) and whole.axis > 0:
        return Deinterleaved(element(whole.whole, index), whole.axis - 1)
    if isinstance(whole, AxisSlice) and whole.axis > 0:
        return replace(whole, whole=element(whole.whole, index), axis=whole.axis - 1)
    raise UnsupportedInput(
        "unsupported layout of stored experts: they cannot be separated", hint="report the model type"
    )


def sliced(whole: WeightSource, axis: int, first: int, count: int) -> WeightSource:
    """The entries `first` to `first + count` of an axis; for rows of a stored tensor again `StoredRows`."""
    if isinstance(whole, StoredRows) and axis == 0 and not whole.single:
        return replace(whole, first=whole.first + first, count=count)
    return AxisSlice(whole, axis, first, count)


def expressions(
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    transforms: Sequence[Any],
    base_prefix: str,
) -> dict[str, WeightSource]:
    """Expressions by parameter name, for every parameter that the mapping or its own name finds.

    Args:
        shapes: shapes of the model's parameters, by name.
        stored: shapes of the checkpoint's tensors, by name.
        transforms: transformers' conversion mapping of the model.
        base_prefix: name of the inner model (`transformer`), which tensor names may lack or have in addition.

    Raises:
        UnsupportedInput: the mapping contains an unsupported operation.
    """
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    found: dict[str, WeightSource] = {}
    collected: dict[str, dict[str, list[WeightSource]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, base_prefix, dict.fromkeys(shapes, True))
        if pattern is None or renamed not in shapes and name in shapes:
            target = renamed if renamed in shapes else _parameter(name, shapes, base_prefix)
            if target is not None:
                found.setdefault(target, StoredRows(name, stored[name]))
        else:
            collected[renamed][pattern].append(StoredRows(name, stored[name]))
    for renamed, sources in collected.items():
        converter = next(c for c in converters if set(sources) <= set(c.source_patterns))
        found.update(_convert(converter, renamed, sources, shapes))
    return found


def _parameter(name: str, shapes: Mapping[str, tuple[int, ...]], base_prefix: str) -> str | None:
    """The parameter that a tensor name refers to, with or without the inner model's name."""
    spellings = (name, name.removeprefix(f"{base_prefix}."), f"{base_prefix}.{name}")
    return next((spelling for spelling in spellings if spelling in shapes), None)


def _convert(
    converter: Any, renamed: str, sources: Mapping[str, list[WeightSource]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, WeightSource]:
    """The results of one entry of the mapping, by parameter name."""
    first = converter.target_patterns[0]
    targets = [renamed.replace(first, target, 1) for target in converter.target_patterns]
    lists = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
    for operation in converter.operations:
        lists = _apply(operation, lists, [shapes.get(target, ()) for target in targets])
    made = [expression for several in lists for expression in several]
    return dict(zip(targets, made, strict=False))


def _apply(
    operation: Any, lists: list[list[WeightSource]], targets: Sequence[tuple[int, ...]]
) -> list[list[WeightSource]]:
    """One operation of transformers' `core_model_loading`, on lists of expressions by source pattern."""
    kind = type(operation).__name__
    if kind == "MergeModulelist" and operation.dim == 0:
        return [[Concatenation(tuple(parts), 0, stack=True)] for parts in lists]
    if kind == "Concatenate":
        return [[Concatenation(tuple(part for parts in lists for part in parts), operation.dim)]]
    whole = lists[0][0]
    if kind == "Transpose":
        axes = (operation.dim0, operation.dim1)
        return [[whole if operation.check_dims and whole.shape == targets[0] else Transposition(whole, axes)]]
    if kind == "Interleave" and not operation.inverse:
        return [[Deinterleaved(whole, operation.dim)]]
    if kind in ("Chunk", "Split"):
        pieces = [whole.shape[operation.dim] // len(targets)] * len(targets)
        sizes = pieces if kind == "Chunk" else [shape[operation.dim] for shape in targets]
        starts = accumulate(sizes, initial=0)
        return [[sliced(whole, operation.dim, first, size) for first, size in zip(starts, sizes, strict=False)]]
    raise UnsupportedInput(
        f"unsupported conversion of stored weights: `{kind}`",
        hint="load it with transformers and save it with `save_pretrained(…, save_original_format=False)`",
    )
