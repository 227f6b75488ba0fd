"""What a fault is: one row per kind, tried in order; a new kind is one function and one row."""

from __future__ import annotations

from collections.abc import Callable

from llmconv.verify.findings import activation, numbers, positions, weights, wiring
from llmconv.verify.findings.suspect import Suspect

FINDINGS: tuple[Callable[[Suspect], str], ...] = (
    weights.audited,
    weights.other_weight,
    weights.transposed,
    weights.missing_bias,
    numbers.epsilon,
    numbers.attention_scale,
    numbers.attention_softcap,
    numbers.final_softcap,
    numbers.sliding_window,
    wiring.mask,
    positions.rotary_table,
    positions.alibi_slopes,
    positions.positions,
    activation.activation,
    wiring.other_cache,
    wiring.missing_term,
    wiring.other_output,
    wiring.constant,
)
"""Each says in words what it found, or nothing."""


def find(suspect: Suspect) -> str:
    """The first finding, empty where no row fits."""
    return next((text for row in FINDINGS if (text := row(suspect))), "")


__all__ = ["FINDINGS", "Suspect", "find"]
