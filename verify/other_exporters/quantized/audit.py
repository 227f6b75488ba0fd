"""The audit of quantised weights: every matrix is a tensor of the model up to rounding, and which one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmconv.tensors import LazyTensor
from llmconv.verify.other_exporters.quantized.rounding_error import Fidelity, fidelities
from llmconv.verify.other_exporters.quantized.tensor_matching import Found
from llmconv.verify.results.report import Check

SHOWN = 4
CHANGED = "weights that were changed before they were quantised (AWQ, rotations) need their own folder as `--reference`"


def audit_quantized(
    graph: str, quantized: Sequence[Found], reference: Mapping[str, LazyTensor]
) -> tuple[Check, list[dict[str, Any]]]:
    """One check, and for every tensor in a matrix what the report says of it."""
    problems, rows = [], []
    seen = {name for found in quantized for name in found.names}
    free = {name: tensor.shape for name, tensor in reference.items() if name not in seen}
    for found in quantized:
        known = fidelities(found, reference)
        problems += [problem for problem in (_unknown(found, free), *(_told(found, one) for one in known)) if problem]
        rows += [
            {"graph": graph, "tensor": one.name, "stored": found.stored.kind, "relative_error": one.relative_error}
            for one in known
        ]
    problems += _twice(quantized)
    kinds = Counter(found.stored.kind for found in quantized)
    said = f"{len(quantized)} quantised matrices are the model's up to rounding"
    detail = "; ".join(problems[:SHOWN]) or f"{said} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    detail += f"; {CHANGED}" if problems and len(problems) >= len(quantized) else ""
    return Check("weights", graph, "", verdict="fail" if problems else "pass", detail=detail), rows


def _unknown(found: Found, free: Mapping[str, tuple[int, ...]]) -> str:
    """What cannot be told of a matrix; `free` are the tensors that no matrix is, by their shapes."""
    name, shape = f"`{found.stored.name}`", found.stored.shape
    if not found.placements:
        left = [f"`{tensor}`" for tensor, size in free.items() if size in (shape, shape[::-1])]
        rest = f"; of its shape {' and '.join(left)} is in no graph" if 0 < len(left) < SHOWN else ""
        return f"{name} {found.said or f'is like no tensor of the model{rest}'}"
    return "" if found.whole else f"{name} holds more than {', '.join(f'`{one}`' for one in sorted(found.names))}"


def _told(found: Found, one: Fidelity) -> str:
    return f"`{one.name}` in `{found.stored.name}`: {one.problem}" if one.problem else ""


def _twice(quantized: Sequence[Found]) -> list[str]:
    """A tensor that is multiplied by in two places is in the place of another one."""
    uses = Counter(name for found in quantized if found.stored.multiplied and not _cut(found) for name in found.names)
    return [f"`{name}` is in {count} places" for name, count in uses.items() if count > 1]


def _cut(found: Found) -> bool:
    """Whether it is a part of its tensor only."""
    return any(placement.first_row or placement.first_column for placement in found.placements)
