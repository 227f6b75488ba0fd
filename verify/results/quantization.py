"""Quantization: what a report says of a graph whose weights are quantised, beside whether the graph is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cost:
    """A graph as it is shipped against the model at full precision, over the tokens of some pieces of text.

    Attributes:
        graph: its name.
        tokens: how many were compared.
        divergence: KL(model || graph) of the next token in nats: `mean`, `median`, `p99`, `p99_9`, `max`.
        agreement: share of tokens after which both find the same one likeliest.
        perplexity: of the text, by the model and by the graph; None for random tokens, which have none.
    """

    graph: str
    tokens: int
    divergence: Mapping[str, float]
    agreement: float
    perplexity: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """One line."""
        nats = self.divergence
        kl = f"KL divergence mean {nats['mean']:.3g}, p99 {nats['p99']:.3g}, max {nats['max']:.3g} nats"
        same = f"likeliest token the same in {self.agreement:.1%} of {self.tokens} tokens"
        if self.perplexity is None:
            return f"{kl}; {same}; no perplexity, as the tokens are random (`--text FILE`)"
        model, graph = self.perplexity
        return f"{kl}; {same}; perplexity {model:.4g} before, {graph:.4g} after (x {graph / model:.4f})"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
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
        weights: of every quantised matrix `graph`, `tensor`, `stored` (how) and `relative_error`.
        rounded: operators that round activations at run time, which the verdict on the graph is without.
        cost: None where it could not be measured.
        max_divergence, min_agreement: limits that a user gave.
    """

    weights: list[dict[str, Any]] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    cost: Cost | None = None
    max_divergence: float | None = None
    min_agreement: float | None = None

    def lines(self) -> list[str]:
        """For people."""
        errors = sorted((one["relative_error"], one["tensor"]) for one in self.weights)
        lines = []
        if errors:
            least, most = errors[0], errors[-1]
            span = f"relative error {least[0]:.2g} to {most[0]:.2g} (`{most[1]}`)"
            lines.append(f"{len(errors)} quantised matrices, {span}")
        return lines + ([self.cost.text] if self.cost else [])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "weights": self.weights,
            "rounded_activations": self.rounded,
            "cost": self.cost.as_dict() if self.cost else None,
            "limits": {"max_divergence": self.max_divergence, "min_agreement": self.min_agreement},
        }
