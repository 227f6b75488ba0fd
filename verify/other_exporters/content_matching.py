"""Matches the initializers of an external graph with the model's tensors by content, because names differ.

Exporters transpose matrices for `MatMul`, concatenate several (`q`, `k` and `v` in one), split them, and add one to the
norms of Gemma. Whole tensors are found by the sha256 of their bytes; parts by the bytes of their rows. One tensor and
one initializer are in memory at a time.
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
PREFIX = 8
"""Number of equal elements of a vector after which the rest is compared."""


@dataclass(frozen=True)
class TensorRows:
    """Indices of an initializer's rows, or columns if `transposed`, that are rows of a tensor."""

    name: str
    rows: range
    transposed: bool = False


@dataclass
class InitializerContent:
    """One initializer and the matching tensors of the model.

    Attributes:
        whole: the tensor with the same content; empty if there is none.
        form: how the tensor was changed, such as `transposed`.
        parts: tensors that it contains, or that it was split from.
        others: further tensors with the content of `whole`, such as norms that are all ones.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]
    whole: str = ""
    form: str = ""
    parts: list[TensorRows] = field(default_factory=list)
    others: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """Names of all matching tensors."""
        return {self.whole, *self.others} if self.whole else {part.name for part in self.parts}

    def match(self, name: str, form: str, *, is_own: bool) -> None:
        """Adds a tensor with the same content, changed as in `forms`; one of the same name (`is_own`) is preferred."""
        if not self.whole or is_own:
            self.others |= {self.whole} - {"", name}
            self.whole, self.form = name, form
        elif name != self.whole:
            self.others.add(name)

    @property
    def matched(self) -> bool:
        """Whether the model has all of its content."""
        return bool(self.whole) or any(self.covered(transposed) for transposed in (False, True)[: len(self.shape)])

    def covered(self, transposed: bool) -> bool:
        """Whether the parts cover all rows, or all columns if `transposed`."""
        rows = np.zeros(self.shape[-1 if transposed else 0], dtype=bool)
        for part in self.parts:
            rows[part.rows.start : part.rows.stop] |= part.transposed is transposed
        return bool(rows.all())


def forms(values: Array) -> Iterator[tuple[str, Array]]:
    """The forms in which exporters store a tensor, by their names."""
    yield "", values
    if values.ndim > 1:
        yield "transposed", values.swapaxes(-1, -2)
    else:
        yield "plus one", values + values.dtype.type(1)


def _forms_in(values: Array, dtype: np.dtype[Any]) -> Iterator[tuple[str, Array]]:
    """The forms in the graph's dtype; a sum may be rounded before or after the addition."""
    yield from forms(values.astype(dtype, copy=False))
    if values.ndim == 1 and values.dtype.itemsize > dtype.itemsize:
        yield "plus one", (values + values.dtype.type(1)).astype(dtype)


def match_contents(contents: Mapping[str, InitializerContent], reference: Mapping[str, LazyTensor]) -> None:
    """Finds every tensor of the model among the initializers and adds it there; both are given by name."""
    by_digest: dict[tuple[str, tuple[int, ...]], list[tuple[str, InitializerContent]]] = defaultdict(list)
    for initializer, content in contents.items():
        by_digest[digest(content.read()), content.shape].append((reference_name(initializer, reference), content))
    dtypes = {content.dtype for content in contents.values()}
    for name, tensor in _floats(reference):
        values = tensor.read()
        for form, made in (pair for dtype in dtypes for pair in _forms_in(values, dtype)):
            for own, content in by_digest.get((digest(made), made.shape), []):
                if content.dtype == made.dtype:
                    content.match(name, form, is_own=name == own)
    rest = [content for content in contents.values() if not content.whole and len(content.shape) <= 2]
    if rest:
        _find_parts(rest, _each(reference, dtypes))


def _each(reference: Mapping[str, LazyTensor], dtypes: Iterable[np.dtype[Any]]) -> Iterator[tuple[str, Array]]:
    """The model's tensors in the dtypes of the graph."""
    for name, tensor in _floats(reference):
        values = tensor.read()
        yield from ((name, values.astype(dtype, copy=False)) for dtype in dtypes)


def _floats(reference: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The model's float tensors that are not scalars."""
    return ((name, tensor) for name, tensor in reference.items() if tensor.dtype.name in FLOATS and tensor.shape)


def _find_parts(contents: list[InitializerContent], tensors: Iterator[tuple[str, Array]]) -> None:
    """Finds tensors that are parts of an initializer, and initializers that are parts of a tensor."""
    rows: dict[bytes, list[tuple[InitializerContent, bool, int]]] = defaultdict(list)
    for content in contents:
        values = content.read()
        for transposed in (False, True)[: values.ndim]:
            for at, key in _keys(values.T if transposed else values):
                rows[key].append((content, transposed, at))
    for name, values in tensors:
        for oriented in (values, values.T)[: values.ndim if values.ndim < 3 else 0]:
            for first, key in _keys(oriented):
                for content, transposed, at in rows.get(key, []):
                    if first == 0 or at == 0:  # the start of the tensor, or of the initializer
                        _add_part(content, transposed, at, name, oriented[first:])


def _add_part(content: InitializerContent, transposed: bool, at: int, name: str, values: Array) -> None:
    """Adds the rows of an initializer from `at` on as a part, if they equal the rows of `values`."""
    own = content.read()
    own = (own.T if transposed else own)[at:]
    count = min(len(own), len(values))
    if np.array_equal(own[:count], values[:count]) and (count == len(values) or at == 0):
        content.parts.append(TensorRows(name, range(at, at + count), transposed))


def _keys(values: Array) -> Iterator[tuple[int, bytes]]:
    """Lookup keys: hashes of the rows of a matrix; the next few elements at each index of a vector."""
    if values.ndim == 1:
        for at in range(len(values) - PREFIX + 1):
            yield at, values[at : at + PREFIX].tobytes()
    else:
        for at, row in enumerate(np.ascontiguousarray(values)):
            yield at, hashlib.sha256(row.tobytes()).digest()[:12]


def digest(values: Array) -> str:
    """The sha256 of an array's bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()
