"""Quantization: the section of a report on quantized weights and the loss of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TEXT, OWN_TEXT, RANDOM = "text", "evaluation text", "random tokens"
"""Sources of tokens: a file of the user, the text that ships with llmconv, a random generator."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, and its standard error, as if the tokens were independent."""

    value: float
    error: float

    def __str__(self) -> str:
        """Both without exponents, such as `1018 ± 10`."""
        value, error = float(f"{self.value:.4g}"), float(f"{self.error:.1g}")
        return " ± ".join(np.format_float_positional(number, trim="-") for number in (value, error))


UNSUITED = 2
"""Perplexity of the full model, relative to equal probabilities, above which the text is reported as unsuitable."""


@dataclass(frozen=True)
class Perplexities:
    """Perplexity of a text for the model and for a graph, and their ratio, whose error is that of paired tokens."""

    model: Estimate
    graph: Estimate
    ratio: Estimate


@dataclass(frozen=True)
class AccuracyCost:
    """The difference between a graph and the model at full precision over the tokens of some texts.

    Attributes:
        graph: name of the graph.
        tokens: number of compared tokens.
        divergence: KL(model || graph) of the next token in nats: `mean`, `median`, `p99`, `p99_9`, `max`.
        divergence_error: standard error of the mean.
        agreement: share of tokens with the same most likely next token.
        source: `text`, `evaluation text` or `random tokens`.
        perplexities: None for random tokens.
        uniform: mean divergence of equal probabilities for all tokens, in nats.
        vocabulary: number of logits; the perplexity of equal probabilities.
    """

    graph: str
    tokens: int
    divergence: Mapping[str, float]
    divergence_error: float
    agreement: float
    source: str = RANDOM
    perplexities: Perplexities | None = None
    uniform: float = float("inf")
    vocabulary: int = 0

    @property
    def text(self) -> str:
        """One line for the report."""
        nats = self.divergence
        spread = f"median {nats['median']:.3g}, p99 {nats['p99']:.3g}, max {nats['max']:.3g}"
        kl = f"KL divergence mean {Estimate(nats['mean'], self.divergence_error)}, {spread} nats"
        same = f"same most likely token after {self.agreement:.1%} of {self.tokens} tokens ({self.source})"
        if self.perplexities is None:
            return f"{kl}; {same}; no perplexity for random tokens (give `--text FILE`)"
        found = self.perplexities
        text = f"{kl}; {same}; perplexity {found.model} before, {found.graph} after (x {found.ratio})"
        if 0 < UNSUITED * self.vocabulary < found.model.value:
            text += (
                f"; equal probabilities have {self.vocabulary}: the text does not suit the model, give `--text FILE`"
            )
        return text

    @property
    def summary(self) -> str:
        """What it costs, in a few words."""
        factor = f", perplexity x {self.perplexities.ratio.value:.3g}" if self.perplexities else ""
        same = f"same most likely token in {self.agreement:.0%}"
        return f"{same}{factor}, KL {self.divergence['mean']:.2g}" + (" (random tokens)" if not factor else "")

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        perplexity = None
        if found := self.perplexities:
            perplexity = {
                "model": found.model.value,
                "graph": found.graph.value,
                "ratio": found.ratio.value,
                "errors": {"model": found.model.error, "graph": found.graph.error, "ratio": found.ratio.error},
            }
        return {
            "graph": self.graph,
            "tokens": self.tokens,
            "source": self.source,
            "divergence": dict(self.divergence),
            "divergence_error": self.divergence_error,
            "uniform": self.uniform,
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
        rounding: the same with codes of plain rounding to nearest, for a folder of llmconv with 4 bits; else None.
        excess: mean divergence of the graph less that of plain rounding.
        preset: the preset of a folder of llmconv; else empty.
        max_divergence, min_agreement: limits of the loss of accuracy, if any.
    """

    weights: list[dict[str, Any]] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    cost: AccuracyCost | None = None
    rounding: AccuracyCost | None = None
    excess: Estimate | None = None
    preset: str = ""
    max_divergence: float | None = None
    min_agreement: float | None = None

    def lines(self) -> list[str]:
        """Lines for the report."""
        errors = sorted((one["relative_error"], one["tensor"]) for one in self.weights)
        lines = []
        if errors:
            least, most, count = errors[0], errors[-1], len({tensor for _, tensor in errors})
            span = f"relative error {least[0]:.2g} to {most[0]:.2g} (`{most[1]}`)"
            lines.append(f"{count} quantized matrices, {span}")
        lines += [self.cost.text] if self.cost else []
        return lines + ([f"plain rounding with the same bits: {self.rounding.text}"] if self.rounding else [])

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "weights": self.weights,
            "rounded_activations": self.rounded,
            "cost": self.cost.as_dict() if self.cost else None,
            "preset": self.preset,
            "plain_rounding": self.rounding.as_dict() if self.rounding else None,
            "excess": {"mean": self.excess.value, "error": self.excess.error} if self.excess else None,
            "limits": {"max_divergence": self.max_divergence, "min_agreement": self.min_agreement},
        }
