"""The audit of quantized weights: every matrix must equal a tensor of the model up to rounding.

Matrices of zeros, which have no direction to compare, are matched by their names, else by exclusion. Folders of llmconv
name codes after the tensors, `X.codes`, and those of joined products `X.codes+Y.codes`. Elsewhere tensors of zeros of
one shape are equal, so that any of them that no matrix has yet is the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmconv.tensors import LazyTensor
from llmconv.verify.audit.weights import reference_name
from llmconv.verify.other_exporters.content_matching import FLOATS
from llmconv.verify.other_exporters.quantized.quantized_matrix import QuantizedMatrix, is_zero
from llmconv.verify.other_exporters.quantized.rounding_error import (
    ANY_ROUNDING,
    ExpectedCodes,
    RoundingError,
    rounding_errors,
)
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, TensorMatch
from llmconv.verify.results.report import Check

SHOWN = 4
CHANGED = "weights that were changed before quantization (AWQ, rotations) need a folder with them as `--reference`"


def audit_quantized(
    graph: str,
    quantized: Sequence[MatchedMatrix],
    reference: Mapping[str, LazyTensor],
    expected: ExpectedCodes = ANY_ROUNDING,
) -> tuple[Check, list[dict[str, Any]]]:
    """One check of the quantized matrices by `expected`, and a row of the report for every tensor in one."""
    problems, rows = [], []
    seen = {name for found in quantized for name in found.names}
    free = {name: tensor.shape for name, tensor in reference.items() if name not in seen}
    for found in quantized:
        known = rounding_errors(found, reference, expected)
        problems += [
            problem for problem in (_match_problem(found, free), *(_problem(found, one) for one in known)) if problem
        ]
        rows += [
            {"graph": graph, "tensor": one.name, "stored": found.stored.kind, "relative_error": one.relative_error}
            for one in known
        ]
    problems += _duplicates(quantized)
    kinds = Counter(found.stored.kind for found in quantized)
    count = len({row["tensor"] for row in rows})
    summary = f"{count} quantized matrices in {len(quantized)} operators are the model's up to rounding"
    detail = "; ".join(problems[:SHOWN]) or f"{summary} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    detail += f"; {CHANGED}" if problems and len(problems) >= len(quantized) else ""
    return Check("weights", graph, "", verdict="fail" if problems else "pass", detail=detail), rows


def _match_problem(found: MatchedMatrix, free: Mapping[str, tuple[int, ...]]) -> str:
    """The problem of a matrix without a complete match; `free` has the shapes of tensors without a matrix."""
    name, shape = f"`{found.stored.name}`", found.stored.shape
    if not found.matches:
        left = [f"`{tensor}`" for tensor, size in free.items() if size in (shape, shape[::-1])]
        rest = f"; {' and '.join(left)} of that shape are in no graph" if 0 < len(left) < SHOWN else ""
        return f"{name} {found.problem or f'matches no tensor of the model{rest}'}"
    return "" if found.whole else f"{name} contains more than {', '.join(f'`{one}`' for one in sorted(found.names))}"


def _problem(found: MatchedMatrix, one: RoundingError) -> str:
    return f"`{one.name}` in `{found.stored.name}`: {one.problem}" if one.problem else ""


def _duplicates(quantized: Sequence[MatchedMatrix]) -> list[str]:
    """Problems of tensors with two multiplied matrices, one of which must belong to another tensor."""
    uses = Counter(
        name for found in quantized if found.stored.multiplied and not _is_part(found) for name in found.names
    )
    return [f"`{name}` occurs {count} times" for name, count in uses.items() if count > 1]


def _is_part(found: MatchedMatrix) -> bool:
    """Whether a matrix is only a part of its tensor."""
    return any(match.first_row or match.first_column for match in found.matches)


CODES, JOINED = ".codes", "+"
"""Suffix of the names of codes in folders of llmconv, and what is between those of joined products."""
MATRIX = 2


def match_zeros(found: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]) -> None:
    """Adds matches of tensors of zeros, in place, to rows that have none by their direction."""
    open_ones = [one for one in found if not one.whole]
    taken = {(name, one.stored.looked_up) for one in found for name in one.names}
    zeros = _zero_tensors(open_ones, reference)
    for by_name in (True, False):
        for one in open_ones:
            named = _names(one.stored, reference)
            names = [name for name in (named if by_name else zeros) if name in zeros]
            for gap in list(_gaps(one)):
                free = [name for name in names if (name, one.stored.looked_up) not in taken]
                if by_name or is_zero(one.stored.rows(gap.start, gap.stop)):
                    made = _filled(gap, one.stored.shape[1], {name: zeros[name] for name in free})
                    one.matches += made
                    taken |= {(match.name, one.stored.looked_up) for match in made}


def _names(stored: QuantizedMatrix, reference: Mapping[str, LazyTensor]) -> list[str]:
    """The tensors that a matrix is named after."""
    parts = stored.name.split(JOINED)
    return [name for part in parts if (name := reference_name(part.removesuffix(CODES), reference))]


def _zero_tensors(
    open_ones: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]
) -> dict[str, tuple[int, int]]:
    """Shapes of the tensors of zeros, of those that have as many columns or rows as one of the matrices."""
    sizes = {size for one in open_ones for size in one.stored.shape}
    matrices = {name: tensor for name, tensor in reference.items() if len(tensor.shape) == MATRIX}
    return {
        name: (tensor.shape[0], tensor.shape[1])
        for name, tensor in matrices.items()
        if tensor.dtype.name in FLOATS and sizes & {*tensor.shape} and _is_zero(tensor)
    }


def _is_zero(tensor: LazyTensor) -> bool:
    return is_zero(tensor.rows(0, min(1, tensor.shape[0]))) and all(is_zero(tensor.rows(*at)) for at in tensor.blocks())


def _gaps(one: MatchedMatrix) -> Iterator[range]:
    """Runs of rows without a match."""
    known = np.zeros(one.stored.shape[0] + 2, dtype=bool)
    known[[0, -1]] = True
    for match in one.matches:
        known[match.rows.start + 1 : match.rows.stop + 1] = True
    edges = np.flatnonzero(np.diff(known))
    for start, stop in edges.reshape(-1, 2):
        yield range(int(start), int(stop))


def _filled(gap: range, columns: int, free: Mapping[str, tuple[int, int]]) -> list[TensorMatch]:
    """Matches of tensors, one after the other, in rows of a matrix."""
    made, start = list[TensorMatch](), gap.start
    for name, (rows, width) in free.items():
        transposed = width != columns or rows > gap.stop - start
        rows, width = (width, rows) if transposed else (rows, width)
        if width == columns and 0 < rows <= gap.stop - start:
            made.append(TensorMatch(name, transposed, range(start, start + rows), range(columns)))
            start += rows
    return made
