"""Matches quantized matrices with the model's tensors by content: by the cosine similarity of some of their rows.

Names differ, as for other weights, and matrices may be transposed, concatenated or split. A row and its rounded values
have a cosine near 1 (0.99 at four bits, 0.9 at two bits), different rows one near 0. Zeros have no direction;
`audit.match_zeros` matches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.content_matching import FLOATS
from llmconv.verify.other_exporters.quantized.quantized_matrix import QuantizedMatrix, is_zero

ROWS = 8
"""Number of compared rows."""
ALIKE = 0.7
"""Minimum median cosine of rows that are equal up to rounding."""
MATRIX = 2


@dataclass(frozen=True)
class TensorMatch:
    """A window (`rows`, `columns`) of a quantized matrix that equals a window of a tensor, or of its transpose.

    `first_row` and `first_column` are the start of the window in the tensor, or in its transpose.
    """

    name: str
    transposed: bool
    rows: range
    columns: range
    first_row: int = 0
    first_column: int = 0


@dataclass
class MatchedMatrix:
    """A quantized matrix and the matching windows of tensors, or a probable cause if there are none."""

    stored: QuantizedMatrix
    matches: list[TensorMatch] = field(default_factory=list)
    problem: str = ""

    @property
    def names(self) -> set[str]:
        """Names of the matching tensors."""
        return {match.name for match in self.matches}

    @property
    def whole(self) -> bool:
        """Whether the matches cover the whole matrix."""
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
    samples = [sample for name in reference for sample in _sampled(name, reference[name])]
    return [_find(one, samples, reference) for one in stored]


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
    """Where rows are not zero."""
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
    """The match with the most similar tensor of the same shape."""
    known: dict[bytes, Array] = {}

    def rows_at(at: Array) -> Array:
        if at.tobytes() not in known:
            known[at.tobytes()] = _stored_rows(stored, at, swapped_pairs=swapped_pairs)
        return known[at.tobytes()]

    same = [sample for sample in samples if sample.shape == stored.shape]
    scores = [_similarity(sample.rows, rows_at(sample.at)) for sample in same]
    if not scores or max(scores) < ALIKE:
        return None
    best = same[int(np.argmax(scores))]
    return TensorMatch(best.name, best.transposed, range(stored.shape[0]), range(stored.shape[1]))


def _stored_rows(stored: QuantizedMatrix, at: Array, *, swapped_pairs: bool) -> Array:
    """Some rows, normalized, with each pair of columns exchanged if `swapped_pairs`."""
    mine = np.concatenate([stored.rows(row, row + 1) for row in at])
    pairs = np.arange(mine.shape[1]) ^ 1
    return _normalized(mine[:, np.minimum(pairs, mine.shape[1] - 1)] if swapped_pairs else mine)


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
    """Tensors that are a part of the matrix."""
    for sample in samples:
        if sample.shape[1] == lines.shape[1] and sample.shape[0] <= len(lines):
            first = _offset(sample.rows, sample.at, lines)
            if first >= 0:
                rows = range(first, first + sample.shape[0])
                yield _as_match(sample, by_columns, rows, range(lines.shape[1]), 0)


def _around(
    lines: Array, samples: list[_SampledRows], by_columns: bool, reference: Mapping[str, LazyTensor]
) -> Iterator[TensorMatch]:
    """Tensors that the matrix is a part of."""
    at = _sample_indices(len(lines))
    for sample in samples:
        if sample.shape[1] == lines.shape[1] and sample.shape[0] > len(lines):
            whole = reference[sample.name].read()
            start = _offset(lines[at], at, _normalized(whole.T if sample.transposed else whole))
            if start >= 0:
                yield _as_match(sample, by_columns, range(len(lines)), range(lines.shape[1]), start)


def _as_match(sample: _SampledRows, by_columns: bool, lines: range, across: range, start: int) -> TensorMatch:
    """The match in the orientation of the quantized matrix."""
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
    directions: Array = rows / np.where(lengths > 0, lengths, 1)
    return directions


def _similarity(rows: Array, others: Array) -> float:
    """Median cosine of the rows, without zero rows."""
    cosines = (rows * others).sum(axis=1)
    some = rows.any(axis=1)
    return float(np.median(cosines[some])) if some.any() else 0.0
