"""Matches initializers and quantized matrices of a graph with the model's tensors by content, because names differ.

Exporters transpose matrices for `MatMul`, concatenate several (`q`, `k` and `v` in one), split them, and add one to
the norms of Gemma. Whole tensors are found by the sha256 of their bytes, parts by the bytes of their rows, quantized
ones by the cosine of some rows: a row and its rounded values have one near 1 (0.99 at four bits, 0.9 at two),
different rows near 0; zeros have no direction (`audit.match_zeros`). Folders of llmconv name codes after the tensors,
`X.codes`, and those of joined products `X.codes+Y.codes`; a name only says where to look first. One tensor and one
initializer are in memory at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.quantized.quantized_matrix import (
    CODES,
    JOINED,
    QuantizedMatrix,
    is_zero,
    name_in_file,
)

FLOATS = {"float16", "float32", "float64", "bfloat16"}
PREFIX = 8  # number of equal elements of a vector after which the rest is compared


@dataclass(frozen=True)
class TensorRows:
    """Indices of an initializer's rows, or columns if `transposed`, that are rows of a tensor."""

    name: str
    rows: range
    transposed: bool = False


@dataclass
class InitializerContent:
    """One initializer and the matching tensors of the model."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]
    whole: str = ""  # the tensor with the same content; empty if there is none
    form: str = ""  # how the tensor was changed, such as `transposed`
    parts: list[TensorRows] = field(default_factory=list)  # tensors that it contains, or that it was split from
    # further tensors with the content of `whole`, such as norms that are all ones
    others: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
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


def _digests(
    tensor: LazyTensor, dtypes: Iterable[np.dtype[Any]], shapes: Collection[tuple[int, ...]]
) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], str]]:
    """Form, dtype, shape and digest of a tensor in the forms that have one of these shapes.

    A matrix is read a block of rows at a time, unless its transpose has such a shape, too.
    """
    if tensor.shape in shapes and len(tensor.shape) > 1:
        hashes = {dtype: hashlib.sha256() for dtype in dtypes}
        for start, stop in tensor.blocks():
            rows = tensor.rows(start, stop)
            for dtype, made in hashes.items():
                made.update(_bytes(rows.astype(dtype, copy=False)))
        yield from (("", dtype, tensor.shape, made.hexdigest()) for dtype, made in hashes.items())
        if (*tensor.shape[:-2], *tensor.shape[:-3:-1]) not in shapes:
            return
    values = tensor.read()
    for dtype in dtypes:
        for form, changed in _forms_in(values, dtype):
            if changed.shape in shapes:
                yield form, changed.dtype, changed.shape, digest(changed)


def match_contents(contents: Mapping[str, InitializerContent], reference: Mapping[str, LazyTensor]) -> None:
    """Finds every tensor of the model among the initializers and adds it there; both are given by name."""
    by_digest: dict[tuple[str, tuple[int, ...]], list[tuple[str, InitializerContent]]] = defaultdict(list)
    for initializer, content in contents.items():
        by_digest[digest(content.read()), content.shape].append((reference_name(initializer, reference), content))
    dtypes, shapes = {content.dtype for content in contents.values()}, {shape for _, shape in by_digest}
    for name, tensor in _floats(reference):
        if not shapes & {tensor.shape, (*tensor.shape[:-2], *tensor.shape[:-3:-1])}:
            continue
        for form, dtype, shape, found in _digests(tensor, dtypes, shapes):
            for own, content in by_digest.get((found, shape), []):
                if content.dtype == dtype:
                    content.match(name, form, is_own=name == own)
    rest = [content for content in contents.values() if not content.whole and len(content.shape) <= 2]
    sizes = {(len(content.shape), size) for content in rest for size in content.shape}
    near = {  # a part has rows of the same length
        name: tensor
        for name, tensor in reference.items()
        if len(tensor.shape) == 1 and any(axes == 1 for axes, _ in sizes) or sizes & {(2, n) for n in tensor.shape}
    }
    if rest:
        _find_parts(rest, _each(near, dtypes))


def _each(reference: Mapping[str, LazyTensor], dtypes: Iterable[np.dtype[Any]]) -> Iterator[tuple[str, Array]]:
    for name, tensor in _floats(reference):
        values = tensor.read()
        yield from ((name, values.astype(dtype, copy=False)) for dtype in dtypes)


def _floats(reference: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
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
    return hashlib.sha256(_bytes(values)).hexdigest()


def _bytes(values: Array) -> memoryview:
    return np.ascontiguousarray(values).view(np.uint8).data


ROWS = 8  # number of compared rows
ALIKE = 0.7  # minimum median cosine of rows that are equal up to rounding
MATRIX = 2
BEGINNING = 512  # number of compared elements of a row whose tensor is known by name


@dataclass(frozen=True)
class TensorMatch:
    """A window (`rows`, `columns`) of a quantized matrix that equals a window of a tensor, or of its transpose."""

    name: str
    transposed: bool
    rows: range
    columns: range
    first_row: int = 0  # start of the window in the tensor, or in its transpose, like the next
    first_column: int = 0


@dataclass
class MatchedMatrix:
    """A quantized matrix and the matching windows of tensors, or a probable cause if there are none."""

    stored: QuantizedMatrix
    matches: list[TensorMatch] = field(default_factory=list)
    problem: str = ""

    @property
    def names(self) -> set[str]:
        return {match.name for match in self.matches}

    @property
    def whole(self) -> bool:
        covered = sum(len(match.rows) * len(match.columns) for match in self.matches)
        return covered >= self.stored.shape[0] * self.stored.shape[1]


@dataclass(frozen=True)
class _SampledRows:
    """Some rows of a tensor or of its transpose, normalized to length 1."""

    name: str
    transposed: bool
    shape: tuple[int, int]
    at: Array
    rows: Array


def match_matrices(stored: Sequence[QuantizedMatrix], reference: Mapping[str, LazyTensor]) -> list[MatchedMatrix]:
    """Matches every matrix with the model's tensors, of which one is in memory at a time."""
    found = [MatchedMatrix(one, _as_named(one, reference)) for one in stored]
    if all(one.matches for one in found):
        return found
    samples = [sample for name in reference for sample in _sampled(name, reference[name])]
    return [one if one.matches else _find(one.stored, samples, reference) for one in found]


def named_tensors(stored: QuantizedMatrix, reference: Mapping[str, LazyTensor]) -> list[str]:
    """The tensors that codes are named after, in their order; `X.codes[3]` are those of the expert `X[3]`."""
    parts = [re.sub(rf"{re.escape(CODES)}(?=$|\[)", "", part) for part in name_in_file(stored.name).split(JOINED)]
    return [name for part in parts if (name := reference_name(part, reference))]


def _as_named(stored: QuantizedMatrix, reference: Mapping[str, LazyTensor]) -> list[TensorMatch]:
    """The tensors that codes are named after, one behind the other; none if some of their rows are others."""
    names, shape = named_tensors(stored, reference), stored.shape
    if any(len(reference[name].shape) != MATRIX or reference[name].dtype.name not in FLOATS for name in names):
        return []
    for transposed in (False, True):
        rows, columns = shape[::-1] if transposed else shape
        sizes = [reference[name].shape for name in names]
        if any(size[1] != columns for size in sizes) or sum(size[0] for size in sizes) != rows:
            continue
        starts = [sum(size[0] for size in sizes[:at]) for at in range(len(sizes))]
        placed = [(name, range(at, at + reference[name].shape[0])) for name, at in zip(names, starts, strict=True)]
        if all(_is_there(stored, reference[name], lines, transposed) for name, lines in placed):
            every = range(columns)
            return [TensorMatch(name, transposed, *((every, at) if transposed else (at, every))) for name, at in placed]
    return []


def _is_there(stored: QuantizedMatrix, tensor: LazyTensor, lines: range, transposed: bool) -> bool:
    """Whether some rows of a tensor are like those lines of a matrix, of which the beginning is compared."""
    at = _sample_indices(len(lines))
    theirs = np.concatenate([tensor.rows(row, row + 1) for row in at])[:, :BEGINNING]
    if transposed:
        mine = stored.rows(0, min(BEGINNING, stored.shape[0])).T[lines.start + at]
    else:
        mine = np.concatenate([stored.rows(lines.start + row, lines.start + row + 1) for row in at])[:, :BEGINNING]
    return _similarity(_normalized(theirs), _normalized(mine)) >= ALIKE


def _sampled(name: str, tensor: LazyTensor) -> list[_SampledRows]:
    if len(tensor.shape) != MATRIX or tensor.dtype.name not in FLOATS or not tensor.nbytes:
        return []
    values = tensor.read()
    found = []
    for transposed, rows in ((False, values), (True, values.T)):
        at = _sample_indices(len(rows))
        if not _has_sizes(rows[at]).all() and (some := np.flatnonzero(_has_sizes(rows))).size:
            at = some[_sample_indices(len(some))]  # padding of a vocabulary has no direction
        found.append(_SampledRows(name, transposed, (rows.shape[0], rows.shape[1]), at, _normalized(rows[at])))
    return found


def _has_sizes(rows: Array) -> Array:
    return np.array([not is_zero(row) for row in rows], dtype=bool)


def _find(stored: QuantizedMatrix, samples: list[_SampledRows], reference: Mapping[str, LazyTensor]) -> MatchedMatrix:
    whole = _whole(stored, samples)
    if whole:
        return MatchedMatrix(stored, [whole])
    parts = _parts(stored, samples, reference)
    if parts:
        return MatchedMatrix(stored, parts)
    swapped = _whole(stored, samples, swapped_pairs=True)
    problem = f"looks like `{swapped.name}` with each pair of codes swapped" if swapped else ""
    return MatchedMatrix(stored, [], problem)


def _whole(stored: QuantizedMatrix, samples: list[_SampledRows], swapped_pairs: bool = False) -> TensorMatch | None:
    """The match with the most similar tensor of its shape; `swapped_pairs` exchanges each pair of columns first."""
    known: dict[bytes, Array] = {}

    def rows_at(at: Array) -> Array:
        if at.tobytes() not in known:
            mine = np.concatenate([stored.rows(row, row + 1) for row in at])
            pairs = np.minimum(np.arange(mine.shape[1]) ^ 1, mine.shape[1] - 1)
            known[at.tobytes()] = _normalized(mine[:, pairs] if swapped_pairs else mine)
        return known[at.tobytes()]

    same = [sample for sample in samples if sample.shape == stored.shape]
    scores = [_similarity(sample.rows, rows_at(sample.at)) for sample in same]
    if not scores or max(scores) < ALIKE:
        return None
    best = same[int(np.argmax(scores))]
    return TensorMatch(best.name, best.transposed, range(stored.shape[0]), range(stored.shape[1]))


def _parts(
    stored: QuantizedMatrix, samples: list[_SampledRows], reference: Mapping[str, LazyTensor]
) -> list[TensorMatch]:
    """Tensors that are concatenated in a matrix, or the tensor that it is a part of."""
    values = stored.read()
    lines = {by_columns: _normalized(values.T if by_columns else values) for by_columns in (False, True)}
    inside = _disjoint([match for by_columns in lines for match in _inside(lines[by_columns], samples, by_columns)])
    if MatchedMatrix(stored, inside).whole:  # larger tensors, which would have to be read, add nothing
        return inside
    around = [match for by_columns in lines for match in _around(lines[by_columns], samples, by_columns, reference)]
    return _disjoint([*inside, *around])


def _inside(lines: Array, samples: list[_SampledRows], by_columns: bool) -> Iterator[TensorMatch]:
    for sample in samples:
        if sample.shape[1] == lines.shape[1] and sample.shape[0] <= len(lines):
            first = _offset(sample.rows, sample.at, lines)
            if first >= 0:
                rows = range(first, first + sample.shape[0])
                yield _as_match(sample, by_columns, rows, range(lines.shape[1]), 0)


def _around(
    lines: Array, samples: list[_SampledRows], by_columns: bool, reference: Mapping[str, LazyTensor]
) -> Iterator[TensorMatch]:
    at = _sample_indices(len(lines))
    for sample in samples:
        if sample.shape[1] == lines.shape[1] and sample.shape[0] > len(lines):
            whole = reference[sample.name].read()
            start = _offset(lines[at], at, _normalized(whole.T if sample.transposed else whole))
            if start >= 0:
                yield _as_match(sample, by_columns, range(len(lines)), range(lines.shape[1]), start)


def _as_match(sample: _SampledRows, by_columns: bool, lines: range, across: range, start: int) -> TensorMatch:
    if by_columns:
        return TensorMatch(sample.name, not sample.transposed, across, lines, 0, start)
    return TensorMatch(sample.name, sample.transposed, lines, across, start, 0)


def _offset(rows: Array, at: Array, lines: Array) -> int:
    """The index in `lines` at which a matrix with the rows `rows` at indices `at` starts; -1 if it is not there."""
    likely = int(np.argmax(lines @ rows[0]))
    there = likely - int(at[0]) + at
    if there.min() < 0 or there.max() >= len(lines) or _similarity(rows, lines[there]) < ALIKE:
        return -1
    return likely - int(at[0])


def _disjoint(found: list[TensorMatch]) -> list[TensorMatch]:
    """The matches that do not overlap an earlier one."""
    kept: list[TensorMatch] = []
    for one in found:
        if not any(_overlap(one.rows, other.rows) and _overlap(one.columns, other.columns) for other in kept):
            kept.append(one)
    return kept


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _sample_indices(count: int) -> Array:
    return np.unique(np.linspace(0, count - 1, min(ROWS, count)).astype(np.int64))


def _normalized(rows: Array) -> Array:
    rows = rows.astype(np.float32)
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    rows = rows / np.where(largest > 0, largest, 1)  # squares of small numbers vanish
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def _similarity(rows: Array, others: Array) -> float:
    cosines = (rows * others).sum(axis=1)
    some = rows.any(axis=1)
    return float(np.median(cosines[some])) if some.any() else 0.0
