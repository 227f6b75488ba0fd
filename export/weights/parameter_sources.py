"""How each parameter of the model is made of the tensors that a checkpoint stores.

Transformers keeps experts stacked and some projections fused, while checkpoints store them one by one (or the reverse);
its own conversion mapping (`transformers.conversion_mapping`) says how. Here that mapping is read as expressions over
stored tensors, so that a graph can map the stored bytes instead of a converted copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from llmconv.errors import UnsupportedInput

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor, which are adjacent bytes of its file; `single` drops the first axis."""

    name: str
    stored: Shape
    first: int = 0
    count: int = -1
    single: bool = False

    @property
    def is_whole(self) -> bool:
        """All rows."""
        return self.count in (-1, self.stored[0] if self.stored else -1) and not self.single

    @property
    def shape(self) -> Shape:
        """Of these rows."""
        if self.single:
            return self.stored[1:]
        return self.stored if self.is_whole else (self.count, *self.stored[1:])

    @property
    def label(self) -> str:
        """The tensor's name, with `[row]` or `[first:stop]` for a part of it."""
        if self.is_whole:
            return self.name
        return f"{self.name}[{self.first}]" if self.single else f"{self.name}[{self.first}:{self.first + self.count}]"


@dataclass(frozen=True)
class Joined:
    """Parts joined along an axis: a new one in front (`stack`), or `axis`."""

    parts: tuple[Expression, ...]
    axis: int
    stack: bool = False

    @property
    def shape(self) -> Shape:
        """Of the whole."""
        part = self.parts[0].shape
        if self.stack:
            return (len(self.parts), *part)
        size = sum(each.shape[self.axis] for each in self.parts)
        return (*part[: self.axis], size, *part[self.axis + 1 :])


@dataclass(frozen=True)
class Swapped:
    """Two axes exchanged."""

    whole: Expression
    axes: tuple[int, int]

    @property
    def shape(self) -> Shape:
        """After the exchange."""
        a, b = self.axes
        sizes = list(self.whole.shape)
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return tuple(sizes)


@dataclass(frozen=True)
class Dealt:
    """Entries of an axis dealt out in two: first all even ones, then all odd ones."""

    whole: Expression
    axis: int

    @property
    def shape(self) -> Shape:
        """As before."""
        return self.whole.shape


@dataclass(frozen=True)
class Sliced:
    """A range of an axis."""

    whole: Expression
    axis: int
    first: int
    count: int

    @property
    def shape(self) -> Shape:
        """Of the range."""
        sizes = list(self.whole.shape)
        sizes[self.axis] = self.count
        return tuple(sizes)


Expression = Rows | Joined | Swapped | Dealt | Sliced


def leaves(whole: Expression) -> Iterator[Rows]:
    """The stored rows of an expression."""
    if isinstance(whole, Rows):
        yield whole
    elif isinstance(whole, Joined):
        for part in whole.parts:
            yield from leaves(part)
    else:
        yield from leaves(whole.whole)


def element(whole: Expression, index: int) -> Expression:
    """Entry `index` of the first axis, that axis dropped."""
    if isinstance(whole, Rows):
        assert not whole.single
        return replace(whole, first=whole.first + index, count=1, single=True)
    if isinstance(whole, Joined) and whole.stack:
        return whole.parts[index]
    if isinstance(whole, Joined) and whole.axis > 0:
        return Joined(tuple(element(part, index) for part in whole.parts), whole.axis - 1)
    if isinstance(whole, Swapped) and 0 not in whole.axes:
        return Swapped(element(whole.whole, index), (whole.axes[0] - 1, whole.axes[1] - 1))
    if isinstance(whole, Dealt) and whole.axis > 0:
        return Dealt(element(whole.whole, index), whole.axis - 1)
    if isinstance(whole, Sliced) and whole.axis > 0:
        return replace(whole, whole=element(whole.whole, index), axis=whole.axis - 1)
    raise UnsupportedInput("experts are joined in a way that cannot be taken apart", hint="report the model type")


def sliced(whole: Expression, axis: int, first: int, count: int) -> Expression:
    """A range of an axis; rows of a stored tensor stay rows."""
    if isinstance(whole, Rows) and axis == 0 and not whole.single:
        return replace(whole, first=whole.first + first, count=count)
    return Sliced(whole, axis, first, count)


def expressions(
    shapes: Mapping[str, Shape], stored: Mapping[str, Shape], transforms: Sequence[Any], base_prefix: str
) -> dict[str, Expression]:
    """Parameter name -> what it is made of, for every parameter that the mapping or its own name finds.

    Args:
        shapes: of the model's parameters, by name.
        stored: shapes of the checkpoint's tensors, by name.
        transforms: transformers' conversion mapping of the model.
        base_prefix: name of the inner model, which a checkpoint may leave out or have in excess.

    Raises:
        UnsupportedInput: the mapping has an operation that is not known here.
    """
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    found: dict[str, Expression] = {}
    collected: dict[str, dict[str, list[Expression]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, base_prefix, dict.fromkeys(shapes, True))
        if pattern is None or renamed not in shapes and name in shapes:
            target = renamed if renamed in shapes else _parameter(name, shapes, base_prefix)
            if target is not None:
                found.setdefault(target, Rows(name, stored[name]))
        else:
            collected[renamed][pattern].append(Rows(name, stored[name]))
    for renamed, sources in collected.items():
        converter = next(c for c in converters if set(sources) <= set(c.source_patterns))
        found.update(_convert(converter, renamed, sources, shapes))
    return found


def _parameter(name: str, shapes: Mapping[str, Shape], base_prefix: str) -> str | None:
    """The parameter that a tensor's name means, with or without the inner model's name."""
    spellings = (name, name.removeprefix(f"{base_prefix}."), f"{base_prefix}.{name}")
    return next((spelling for spelling in spellings if spelling in shapes), None)


def _convert(
    converter: Any, renamed: str, sources: Mapping[str, list[Expression]], shapes: Mapping[str, Shape]
) -> dict[str, Expression]:
    """What one entry of the mapping makes of its sources, by parameter name."""
    first = converter.target_patterns[0]
    targets = [renamed.replace(first, target, 1) for target in converter.target_patterns]
    made: list[Expression] = []
    lists = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
    for operation in converter.operations:
        lists = _apply(operation, lists, [shapes.get(target, ()) for target in targets])
    made = [expression for several in lists for expression in several]
    return dict(zip(targets, made, strict=False))


def _apply(operation: Any, lists: list[list[Expression]], targets: Sequence[Shape]) -> list[list[Expression]]:
    """One operation of transformers' `core_model_loading`, on lists of expressions by source pattern."""
    kind = type(operation).__name__
    if kind == "MergeModulelist" and operation.dim == 0:
        return [[Joined(tuple(parts), 0, stack=True)] for parts in lists]
    if kind == "Concatenate":
        return [[Joined(tuple(part for parts in lists for part in parts), operation.dim)]]
    whole = lists[0][0]
    if kind == "Transpose":
        axes = (operation.dim0, operation.dim1)
        return [[whole if operation.check_dims and whole.shape == targets[0] else Swapped(whole, axes)]]
    if kind == "Interleave" and not operation.inverse:
        return [[Dealt(whole, operation.dim)]]
    if kind in ("Chunk", "Split"):
        pieces = [whole.shape[operation.dim] // len(targets)] * len(targets)
        sizes = pieces if kind == "Chunk" else [shape[operation.dim] for shape in targets]
        return [list(_pieces(whole, operation.dim, sizes))]
    raise UnsupportedInput(
        f"the checkpoint stores weights in a way that needs `{kind}`",
        hint="load it with transformers and save it with `save_pretrained(…, save_original_format=False)`",
    )


def _pieces(whole: Expression, axis: int, sizes: Iterable[int]) -> Iterable[Expression]:
    first = 0
    for size in sizes:
        yield sliced(whole, axis, first, size)
        first += size
