"""The audit of quantized weights: every matrix must equal a tensor of the model up to rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmconv.tensors import LazyTensor
from llmconv.verify.other_exporters.quantized.expected_codes import ANY_ROUNDING, ExpectedCodes
from llmconv.verify.other_exporters.quantized.rounding_error import RoundingError, rounding_errors
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix
from llmconv.verify.results.report import Check

SHOWN = 4
CHANGED = "weights that were changed before quantization (AWQ, rotations) need a folder with them as `--reference`"


def audit_quantized(
    graph: str,
    quantized: Sequence[MatchedMatrix],
    reference: Mapping[str, LazyTensor],
    expected: ExpectedCodes = ANY_ROUNDING,
) -> tuple[Check, list[dict[str, Any]]]:
    """Compares the quantized matrices with the model's tensors.

    Args:
        graph: name of the graph.
        quantized: the matrices.
        reference: tensors of the model by name.
        expected: what the codes must be, in graphs of llmconv.

    Returns:
        One check, and a row of the report for every tensor in a matrix.
    """
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
