"""Which of the model's tensors a foreign graph's initializers are, found by content: names say nothing there.

Exporters transpose matrices for `MatMul`, lay several side by side (`q`, `k` and `v` in one), cut them apart, and add
one to the norms of Gemma. Whole tensors are found by the sha256 of their bytes; parts by the bytes of their rows. One
tensor and one initializer are in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import reference_name

FLOATS = {"float16", "float32", "float64", "bfloat16"}
BEGINNING = 8
"""Elements of a vector that must agree before the rest is compared."""


@dataclass(frozen=True)
class Part:
    """Rows of an initializer (of its transpose where `side`) that are rows `first`, … of the tensor `name`."""

    name: str
    rows: range
    side: bool = False


@dataclass
class Content:
    """One initializer, and what was found of it.

    Attributes:
        shape, dtype: of its values.
        read: gives them.
        whole: the tensor that it is; empty when it is none.
        form: what was done to that tensor, such as `transposed`.
        parts: tensors of the model that lie in it, or that it was cut from.
        others: further tensors of the same content as `whole`, such as norms that are all ones.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]
    whole: str = ""
    form: str = ""
    parts: list[Part] = field(default_factory=list)
    others: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """Of the tensors in it, and of those of the same content."""
        return {self.whole, *self.others} if self.whole else {part.name for part in self.parts}

    def take(self, name: str, form: str, *, is_own: bool) -> None:
        """Notes a tensor of the same content; the one that the initializer is called after comes first."""
        if not self.whole or is_own:
            self.others |= {self.whole} - {"", name}
            self.whole, self.form = name, form
        elif name != self.whole:
            self.others.add(name)

    @property
    def matched(self) -> bool:
        """Whether all of it was found."""
        return bool(self.whole) or any(self.covered(side) for side in (False, True)[: len(self.shape)])

    def covered(self, side: bool) -> bool:
        """Whether the parts make up all rows, or all columns where `side`."""
        rows = np.zeros(self.shape[-1 if side else 0], dtype=bool)
        for part in self.parts:
            rows[part.rows.start : part.rows.stop] |= part.side is side
        return bool(rows.all())


def forms(values: Array) -> Iterator[tuple[str, Array]]:
    """What exporters make of a tensor."""
    yield "", values
    if values.ndim > 1:
        yield "transposed", values.swapaxes(-1, -2)
    else:
        yield "plus one", values + values.dtype.type(1)


def _forms_in(values: Array, dtype: np.dtype[Any]) -> Iterator[tuple[str, Array]]:
    """The same in the graph's type; a sum may have been rounded before it was made, or after."""
    yield from forms(values.astype(dtype, copy=False))
    if values.ndim == 1 and values.dtype.itemsize > dtype.itemsize:
        yield "plus one", (values + values.dtype.type(1)).astype(dtype)


def find_contents(contents: Mapping[str, Content], reference: Mapping[str, LazyTensor]) -> None:
    """Looks every tensor of the model up among the initializers, and notes it there."""
    by_digest: dict[tuple[str, tuple[int, ...]], list[tuple[str, Content]]] = defaultdict(list)
    for initializer, content in contents.items():
        by_digest[digest(content.read()), content.shape].append((reference_name(initializer, reference), content))
    dtypes = {content.dtype for content in contents.values()}
    for name, tensor in _floats(reference):
        values = tensor.read()
        for form, made in (pair for dtype in dtypes for pair in _forms_in(values, dtype)):
            for own, content in by_digest.get((digest(made), made.shape), []):
                if content.dtype == made.dtype:
                    content.take(name, form, is_own=name == own)
    rest = [content for content in contents.values() if not content.whole and len(content.shape) <= 2]
    if rest:
        _find_parts(rest, _each(reference, dtypes))


def _each(reference: Mapping[str, LazyTensor], dtypes: Iterable[np.dtype[Any]]) -> Iterator[tuple[str, Array]]:
    """The model's tensors in the types of the graph."""
    for name, tensor in _floats(reference):
        values = tensor.read()
        yield from ((name, values.astype(dtype, copy=False)) for dtype in dtypes)


def _floats(reference: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The model's tensors that are no integers and no scalars."""
    return ((name, tensor) for name, tensor in reference.items() if tensor.dtype.name in FLOATS and tensor.shape)


def _find_parts(contents: list[Content], tensors: Iterator[tuple[str, Array]]) -> None:
    """Tensors that lie side by side in an initializer, and initializers that were cut out of a tensor."""
    places: dict[bytes, list[tuple[Content, bool, int]]] = defaultdict(list)
    for content in contents:
        values = content.read()
        for side in (False, True)[: values.ndim]:
            for at, key in _keys(values.T if side else values):
                places[key].append((content, side, at))
    for name, values in tensors:
        for turned in (values, values.T)[: values.ndim if values.ndim < 3 else 0]:
            for first, key in _keys(turned):
                for content, side, at in places.get(key, []):
                    if first == 0 or at == 0:  # where the tensor begins, or the initializer
                        _note(content, side, at, name, turned[first:])


def _note(content: Content, side: bool, at: int, name: str, values: Array) -> None:
    """Notes the rows of an initializer from `at` on that are the rows of `values`, if all of them are."""
    mine = content.read()
    mine = (mine.T if side else mine)[at:]
    count = min(len(mine), len(values))
    if np.array_equal(mine[:count], values[:count]) and (count == len(values) or at == 0):
        content.parts.append(Part(name, range(at, at + count), side))


def _keys(values: Array) -> Iterator[tuple[int, bytes]]:
    """What the rows of a matrix begin a comparison with; of a vector, its next few elements."""
    if values.ndim == 1:
        for at in range(len(values) - BEGINNING + 1):
            yield at, values[at : at + BEGINNING].tobytes()
    else:
        for at, row in enumerate(np.ascontiguousarray(values)):
            yield at, hashlib.sha256(row.tobytes()).digest()[:12]


def digest(values: Array) -> str:
    """The sha256 of an array's bytes, row by row."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()
