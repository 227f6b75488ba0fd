"""The loss of accuracy by quantization: the unchanged graph and the model at full precision, token by token.

Divergence is KL(model || graph) of the next token, in nats; perplexity is exp of the mean negative log-likelihood of a
text's tokens, without the first token of each of its non-overlapping pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.runtime.runner import Cache, Runner, default_positions
from llmconv.tensors import Array
from llmconv.verify.other_exporters.quantized.token_sample import TokenSample
from llmconv.verify.results.quantization import AccuracyCost, Estimate, Perplexities
from llmconv.verify.results.sigma import divergence_of, log_probabilities

PERCENTILES = {"median": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass
class TokenCosts:
    """The figures of a graph by token.

    Attributes:
        graph: its name.
        source: where the tokens are from.
        nats: divergence of the next token.
        agreed: whether the most likely next token is the model's.
        losses: negative log-likelihoods of the text's tokens, of the model and of the graph.
        uniform: divergence of equal probabilities for all tokens.
        vocabulary: number of logits.
    """

    graph: str
    source: str
    nats: list[Array] = field(default_factory=list)
    agreed: list[Array] = field(default_factory=list)
    losses: list[tuple[Array, Array]] = field(default_factory=list)
    uniform: list[Array] = field(default_factory=list)
    vocabulary: int = 0

    def add(self, wanted: Array, found: Array, ids: Array) -> None:
        """Adds a piece.

        Args:
            wanted, found: log-probabilities of the model and of the graph, float64 `[tokens, vocabulary]`.
            ids: the tokens, int64 `[1, tokens]`.
        """
        self.vocabulary = wanted.shape[-1]
        self.nats.append(divergence_of(wanted, found))
        self.uniform.append(divergence_of(wanted, np.full_like(wanted, -np.log(wanted.shape[-1]))))
        self.agreed.append(wanted.argmax(axis=-1) == found.argmax(axis=-1))
        following = ids[0, 1:]
        named = np.flatnonzero(following < wanted.shape[1])  # an embedding may have rows for tokens without a logit
        model, graph = (-one[named, following[named]] for one in (wanted, found))
        self.losses.append((model, graph))

    def summary(self, *, is_text: bool) -> AccuracyCost:
        """The means and percentiles; perplexities of a text only."""
        each = np.concatenate(self.nats)
        mean = estimate(each)
        return AccuracyCost(
            graph=self.graph,
            tokens=len(each),
            source=self.source,
            divergence={
                "mean": mean.value,
                **{name: float(np.percentile(each, share)) for name, share in PERCENTILES.items()},
                "max": float(each.max()),
            },
            divergence_error=mean.error,
            agreement=float(np.concatenate(self.agreed).mean()),
            perplexities=self._perplexities() if is_text else None,
            uniform=float(np.concatenate(self.uniform).mean()),
            vocabulary=self.vocabulary,
        )

    def _perplexities(self) -> Perplexities:
        """The error of an exponential is that of the exponent times its value."""
        model, graph = (np.concatenate(one) for one in zip(*self.losses, strict=True))
        logs = [estimate(one) for one in (model, graph, graph - model)]
        return Perplexities(*(Estimate(float(np.exp(log.value)), float(np.exp(log.value)) * log.error) for log in logs))


def estimate(values: Array) -> Estimate:
    """The mean of values of tokens, and its standard error."""
    error = float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), error)


def difference(one: TokenCosts, other: TokenCosts) -> Estimate:
    """The mean divergence of one graph less that of another on the same tokens, with the error of this difference."""
    return estimate(np.concatenate(one.nats) - np.concatenate(other.nats))


def measure_costs(graphs: Sequence[tuple[str, Runner]], model: Runner, sample: TokenSample) -> list[TokenCosts]:
    """Runs the model and the graphs on every piece, and compares the logits of each graph with the model's.

    Args:
        graphs: names and runners of unchanged graphs.
        model: the model at full precision.
        sample: the tokens.
    """
    costs = [TokenCosts(name, sample.source) for name, _ in graphs]
    for piece in sample.pieces:
        wanted = log_probabilities(_logits(model, piece))
        for cost, (_, runner) in zip(costs, graphs, strict=True):
            cost.add(wanted, log_probabilities(_logits(runner, piece)), piece)
    return costs


def _logits(runner: Runner, ids: Array) -> Array:
    """Logits of every token, float64 `[tokens, vocabulary]`; one step per token if a graph returns the last only."""
    mask = np.ones_like(ids)
    step = runner.prefill(ids, mask, default_positions(mask, ids.shape[1]))
    if step.logits.shape[1] == ids.shape[1]:
        return _float64(step.logits)
    found: list[Array] = []
    past: Cache | None = None
    for end in range(1, ids.shape[1] + 1):
        run, seen = (runner.decode if past else runner.prefill), mask[:, :end]
        step = run(ids[:, end - 1 : end], seen, default_positions(seen, 1), past)
        found.append(step.logits)
        past = step.present
    return _float64(np.concatenate(found, axis=1))


def _float64(logits: Any) -> Array:
    rows: Array = logits[0].astype(np.float64)
    return rows
