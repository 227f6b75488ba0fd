"""Which of the model's tensors a quantised matrix is, by content: a few of its rows point where the tensor's do.

Names say nothing, as for weights that are not quantised, and matrices may be transposed, laid side by side, or cut.
What rounding leaves of a row has a cosine near 1 with it (0.99 at four bits, 0.9 at two), another row one near 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.content_matching import FLOATS
from llmconv.verify.other_exporters.quantized.quantized_matrix import Stored

ROWS = 8
"""Rows that are looked at."""
ALIKE = 0.7
"""Median cosine of rows that are the same but for rounding."""
MATRIX = 2


@dataclass(frozen=True)
class Placement:
    """A window of a quantised matrix that is a window of the tensor `name`, or of its transpose where `turned`.

    Attributes:
        rows, columns: of the quantised matrix.
        first_row, first_column: where the window begins in the tensor, or in its transpose.
    """

    name: str
    turned: bool
    rows: range
    columns: range
    first_row: int = 0
    first_column: int = 0


@dataclass
class Found:
    """A quantised matrix and where the model has it.

    Attributes:
        placements: of one tensor or several; empty where none was found.
        said: what is odd about it.
    """

    stored: Stored
    placements: list[Placement] = field(default_factory=list)
    said: str = ""

    @property
    def names(self) -> set[str]:
        """Of the tensors in it."""
        return {placement.name for placement in self.placements}

    @property
    def whole(self) -> bool:
        """Whether all of it was found."""
        covered = sum(len(placement.rows) * len(placement.columns) for placement in self.placements)
        return covered >= self.stored.shape[0] * self.stored.shape[1]


@dataclass(frozen=True)
class _Probe:
    """Some rows of a tensor or of its transpose, of length 1."""

    name: str
    turned: bool
    shape: tuple[int, int]
    at: Array
    rows: Array


def find_tensors(stored: Sequence[Stored], reference: Mapping[str, LazyTensor]) -> list[Found]:
    """Looks every matrix up among the model's tensors, one of which is in memory at a time."""
    probes = [probe for name in reference for probe in _probes(name, reference[name])]
    return [_find(one, probes, reference) for one in stored]


def _probes(name: str, tensor: LazyTensor) -> list[_Probe]:
    if len(tensor.shape) != MATRIX or tensor.dtype.name not in FLOATS or not tensor.nbytes:
        return []
    values = tensor.read()
    found = []
    for turned, rows in ((False, values), (True, values.T)):
        at = _spread(len(rows))
        found.append(_Probe(name, turned, (rows.shape[0], rows.shape[1]), at, _directions(rows[at])))
    return found


def _find(stored: Stored, probes: list[_Probe], reference: Mapping[str, LazyTensor]) -> Found:
    whole = _whole(stored, probes)
    if whole:
        return Found(stored, [whole])
    parts = _parts(stored, probes, reference)
    if parts:
        return Found(stored, parts)
    swapped = _whole(stored, probes, neighbours=True)
    said = f"looks like `{swapped.name}` with every two codes exchanged" if swapped else ""
    return Found(stored, [], said)


def _whole(stored: Stored, probes: list[_Probe], neighbours: bool = False) -> Placement | None:
    """The tensor of that shape that it is most alike."""
    at = _spread(stored.shape[0])
    mine = np.concatenate([stored.rows(row, row + 1) for row in at])
    if neighbours:
        pairs = np.arange(mine.shape[1]) ^ 1
        mine = mine[:, np.minimum(pairs, mine.shape[1] - 1)]
    mine = _directions(mine)
    same = [probe for probe in probes if probe.shape == stored.shape]
    scores = [_alike(probe.rows, mine) for probe in same]
    if not scores or max(scores) < ALIKE:
        return None
    best = same[int(np.argmax(scores))]
    return Placement(best.name, best.turned, range(stored.shape[0]), range(stored.shape[1]))


def _parts(stored: Stored, probes: list[_Probe], reference: Mapping[str, LazyTensor]) -> list[Placement]:
    """Tensors that lie below or beside each other in a matrix, or the tensor that it was cut out of."""
    values = stored.read()
    found: list[Placement] = []
    for side in (False, True):
        lines = _directions(values.T if side else values)
        at = _spread(len(lines))
        for probe in probes:
            if probe.shape[1] != lines.shape[1]:
                continue
            if probe.shape[0] <= len(lines):
                first = _offset(probe.rows, probe.at, lines)
                rows, start = range(first, first + probe.shape[0]), 0
            else:
                whole = reference[probe.name].read()
                start = _offset(lines[at], at, _directions(whole.T if probe.turned else whole))
                rows, first = range(len(lines)), start
            if first >= 0:
                found.append(_placement(probe, side, rows, range(lines.shape[1]), start))
    return _apart(found)


def _placement(probe: _Probe, side: bool, lines: range, across: range, start: int) -> Placement:
    """In the orientation of the quantised matrix."""
    if side:
        return Placement(probe.name, not probe.turned, across, lines, 0, start)
    return Placement(probe.name, probe.turned, lines, across, start, 0)


def _offset(rows: Array, at: Array, lines: Array) -> int:
    """Where among `lines` those begin of which `rows` are the ones `at`; -1 where they are not there."""
    likely = int(np.argmax(lines @ rows[0]))
    there = likely - int(at[0]) + at
    if there.min() < 0 or there.max() >= len(lines) or _alike(rows, lines[there]) < ALIKE:
        return -1
    return likely - int(at[0])


def _apart(found: list[Placement]) -> list[Placement]:
    """Those that do not overlap another."""
    kept: list[Placement] = []
    for one in found:
        if not any(_overlap(one.rows, other.rows) and _overlap(one.columns, other.columns) for other in kept):
            kept.append(one)
    return kept


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _spread(count: int) -> Array:
    return np.unique(np.linspace(0, count - 1, min(ROWS, count)).astype(np.int64))


def _directions(rows: Array) -> Array:
    rows = rows.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions: Array = rows / np.where(lengths > 0, lengths, 1)
    return directions


def _alike(rows: Array, others: Array) -> float:
    """Median cosine, where there is a direction at all."""
    cosines = (rows * others).sum(axis=1)
    some = rows.any(axis=1)
    return float(np.median(cosines[some])) if some.any() else 0.0
