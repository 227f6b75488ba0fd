"""Limits of the loss of accuracy: those of the user, or the default gate of the preset that a folder was made with.

How much 4 bits cost depends on the model far more than on the tool (0.03 nats with 8 billion weights, 0.3 with 135
million), so their gate is relative: the graph with its codes replaced by those of plain rounding to nearest, symmetric,
with the same bits and blocks. A mean is above a limit if it is so by more than `ERRORS` standard errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmconv.verify.results.quantization import AccuracyCost, Estimate
from llmconv.verify.results.report import Check

CHECK = "cost of quantization"
ERRORS = 3.0
"""Standard errors by which a mean must exceed a limit."""

NEGLIGIBLE = 0.01
"""Mean divergence in nats that is small with any number of bits."""

KNOWING = 0.999
"""A graph whose divergence is a larger share of that of equal probabilities knows nothing of the model."""


@dataclass(frozen=True)
class AccuracyLimits:
    """Limits of the user; None for no limit.

    Attributes:
        divergence: maximum mean divergence in nats per token.
        agreement: minimum share of tokens with the same most likely next token.
    """

    divergence: float | None = None
    agreement: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.divergence is not None or self.agreement is not None


@dataclass(frozen=True)
class AccuracyGate:
    """The default gate of a preset.

    Attributes:
        divergence: maximum mean divergence in nats per token; None without one.
        against_rounding: fails if the mean divergence is above that of plain rounding to nearest, unless negligible.
    """

    divergence: float | None = None
    against_rounding: bool = False


CACHE = "kv-cache int8"
RELATIVE = AccuracyGate(against_rounding=True)
GATES = {
    "int8": AccuracyGate(NEGLIGIBLE),
    CACHE: AccuracyGate(NEGLIGIBLE),
    "a8w8": AccuracyGate(0.2),
    "int4": RELATIVE,
    "int4-mixed": RELATIVE,
    "int4-small": RELATIVE,
}
"""By preset of `llmconv export --quant`.

`a8w8`, measured with SmolLM2-135M: 0.07 nats on a text, but 0.50 if activations with outliers are rounded to 8 bits.
"""
STORED = AccuracyGate(NEGLIGIBLE)
"""For the codes of a quantized model: rounding them again to 8 bits, and activations, costs less than 0.01 nats."""


def gate_of(preset: str) -> AccuracyGate:
    """The gate of a folder.

    Args:
        preset: that of `llmconv export --quant`, or the method of a model that was quantized before; empty for graphs
            of other exporters, which are measured, and judged by limits of the user alone.
    """
    return GATES.get(preset, STORED) if preset else AccuracyGate()


def check_limits(cost: AccuracyCost, limits: AccuracyLimits) -> list[Check]:
    """One check if there are limits of the user, else none."""
    problems = []
    mean = cost.divergence["mean"]
    if limits.divergence is not None and not mean <= limits.divergence:
        problems.append(f"mean divergence {mean:.3g} nats, limit {limits.divergence:g}")
    if limits.agreement is not None and not cost.agreement >= limits.agreement:
        problems.append(f"agreement {cost.agreement:.4f}, limit {limits.agreement:g}")
    return [_check(cost, "; ".join(problems), cost.text)] if limits.given else []


def check_gate(preset: str, gate: AccuracyGate, cost: AccuracyCost, excess: Estimate | None) -> list[Check]:
    """One check by the default gate.

    Args:
        preset: its name.
        gate: its gate.
        cost: the loss of accuracy on a text.
        excess: mean divergence of the graph less that of plain rounding; None if that was not measured.
    """
    mean, error = cost.divergence["mean"], cost.divergence_error
    if not preset and not (mean <= NEGLIGIBLE or mean < cost.uniform * KNOWING):
        return [_check(cost, f"mean divergence {mean:.3g} nats: that of equal probabilities for all tokens", "")]
    if gate.divergence is not None:
        limit = f"limit {gate.divergence:g} of `{preset}`"
        found = f"mean divergence {mean:.3g} ± {error:.2g} nats, {limit}"
        return [_check(cost, "" if mean - ERRORS * error <= gate.divergence else found, found)]
    if excess is None:
        return []
    side = "less" if excess.value < 0 else "more"
    against = f"{abs(excess.value):.2g} ± {excess.error:.2g} {side} than with plain rounding"
    found = f"mean divergence {mean:.3g} nats, {against}"
    worse = not mean <= NEGLIGIBLE and not excess.value <= ERRORS * excess.error
    return [_check(cost, f"worse than plain rounding: {found}" if worse else "", found)]


def _check(cost: AccuracyCost, problem: str, found: str) -> Check:
    verdict, detail = ("fail", problem) if problem else ("pass", found)
    mean = cost.divergence["mean"]
    return Check(CHECK, cost.graph, "", verdict=verdict, detail=detail, agreement=cost.agreement, divergence=mean)
