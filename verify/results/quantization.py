"""Quantization: the section of a report on quantized weights and the loss of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AccuracyCost:
    """The difference between a graph and the model at full precision over the tokens of some texts.

    Attributes:
        graph: name of the graph.
        tokens: number of compared tokens.
        divergence: KL(model || graph) of the next token in nats: `mean`, `median`, `p99`, `p99_9`, `max`.
        agreement: share of tokens with the same most likely next token.
        perplexity: perplexity of the text for the model and for the graph; None for random tokens.
    """

    graph: str
    tokens: int
    divergence: Mapping[str, float]
    agreement: float
    perplexity: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """One line for the report."""
        nats = self.divergence
        kl = f"KL divergence mean {nats['mean']:.3g}, p99 {nats['p99']:.3g}, max {nats['max']:.3g} nats"
        same = f"same most likely token after {self.agreement:.1%} of {self.tokens} tokens"
        if self.perplexity is None:
            return f"{kl}; {same}; no perplexity for random tokens (give `--text FILE`)"
        model, graph = self.perplexity
        return f"{kl}; {same}; perplexity {model:.4g} before, {graph:.4g} after (x {graph / model:.4f})"

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        perplexity = None
        if self.perplexity is not None:
            model, graph = self.perplexity
            perplexity = {"model": model, "graph": graph, "ratio": graph / model}
        return {
            "graph": self.graph,
            "tokens": self.tokens,
            "source": "text" if self.perplexity else "random tokens",
            "divergence": dict(self.divergence),
            "agreement": self.agreement,
            "perplexity": perplexity,
        }


@dataclass
class Quantization:
    """The section of a report.

    Attributes:
        weights: `graph`, `tensor`, `stored` (format) and `relative_error` of every quantized matrix.
        rounded: operators that round activations at run time; correctness is checked without this rounding.
        cost: the loss of accuracy; None if it was not measured.
        max_divergence, min_agreement: limits of the loss of accuracy, if any.
    """

    weights: list[dict[str, Any]] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    cost: AccuracyCost | None = None
    max_divergence: float | None = None
    min_agreement: float | None = None

    def lines(self) -> list[str]:
        """Lines for the report."""
        errors = sorted((one["relative_error"], one["tensor"]) for one in self.weights)
        lines = []
        if errors:
            least, most = errors[0], errors[-1]
            span = f"relative error {least[0]:.2g} to {most[0]:.2g} (`{most[1]}`)"
            lines.append(f"{len(errors)} quantized matrices, {span}")
        return lines + ([self.cost.text] if self.cost else [])

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "weights": self.weights,
            "rounded_activations": self.rounded,
            "cost": self.cost.as_dict() if self.cost else None,
            "limits": {"max_divergence": self.max_divergence, "min_agreement": self.min_agreement},
        }
