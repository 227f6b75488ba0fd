"""Describes a fault in words: one function per kind, tried in order; a new kind is one function and one row."""

from __future__ import annotations

from collections.abc import Callable

from llmconv.verify.bisect.findings import activation, masks, numbers, positions, weights, wiring
from llmconv.verify.bisect.findings.suspect import Finding, Suspect

FINDINGS: tuple[Callable[[Suspect], Finding | None], ...] = (
    weights.audited,
    weights.other_weight,
    weights.transposed,
    weights.missing_bias,
    numbers.epsilon,
    numbers.product_factor,
    numbers.attention_scale,
    numbers.attention_softcap,
    numbers.final_softcap,
    numbers.sliding_window,
    masks.mask,
    positions.rotary_table,
    positions.alibi_slopes,
    positions.positions,
    activation.activation,
    wiring.other_cache,
    wiring.missing_term,
    wiring.other_output,
    wiring.optimized,
    wiring.swapped_inputs,
    wiring.other_input,
    wiring.constant,
)
"""Each returns a finding, or None if the fault is of another kind."""


def find(suspect: Suspect) -> Finding | None:
    """The first finding; None if no row fits."""
    return next((found for row in FINDINGS if (found := row(suspect))), None)


__all__ = ["FINDINGS", "Finding", "Suspect", "find"]
