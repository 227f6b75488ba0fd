"""Picking the next token from logits: pure functions over float arrays [vocabulary]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmconv.errors import UsageProblem
from llmconv.tensors import Array


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked.

    Attributes:
        temperature: 0 picks the most likely token; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities add up to at least p; 1 keeps all.
        seed: of the random generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UsageProblem(
                f"temperature {self.temperature}, top-k {self.top_k}, top-p {self.top_p} cannot be sampled with",
                hint="temperature and top-k are numbers of at least 0, top-p is above 0 and at most 1",
            )


def pick_token(logits: Array, sampling: Sampling, generator: np.random.Generator) -> int:
    """The next token; ties of the greedy choice go to the lowest id."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scores = keep_top_k(logits.astype(np.float64) / sampling.temperature, sampling.top_k)
    probabilities = softmax(keep_top_p(scores, sampling.top_p))
    # The inverse of the cumulative distribution: one uniform number per token, so a seed gives one text.
    cumulative = probabilities.cumsum()
    return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))


def pick_choice(tokens: Array, scores: Array, sampling: Sampling, generator: np.random.Generator) -> int:
    """The next token from the likeliest ones that a graph chose; the same as from all logits, ties aside.

    Args:
        tokens: int64 [K], likeliest first.
        scores: their log-probabilities [K].
        sampling: its top-k may not be more than K, and not all tokens.
        generator: advanced by one number.

    Raises:
        UsageProblem: the sampling needs tokens that the graph does not give.
    """
    if sampling.temperature == 0:
        return int(tokens[0])
    if not 0 < sampling.top_k <= len(tokens):
        raise UsageProblem(
            f"the graph gives {len(tokens)} tokens to sample from, top-k {sampling.top_k or 'of all'} needs more",
            hint=f"give `--temperature 0`, or `--top-k {len(tokens)}` or less, or export another `--postprocess`",
        )
    order = np.argsort(tokens)  # the order of the vocabulary, so that a seed gives the text that logits give
    return int(tokens[order[pick_token(scores[order], sampling, generator)]])


def keep_top_k(scores: Array, top_k: int) -> Array:
    """`scores` with all but the `top_k` largest at minus infinity."""
    if not 0 < top_k < len(scores):
        return scores
    threshold = np.partition(scores, -top_k)[-top_k]
    return np.where(scores < threshold, -np.inf, scores)


def keep_top_p(scores: Array, top_p: float) -> Array:
    """`scores` with the unlikely tail, beyond a probability of `top_p`, at minus infinity."""
    if top_p >= 1:
        return scores
    order = np.argsort(-scores, kind="stable")
    before = softmax(scores)[order].cumsum() - softmax(scores)[order]
    kept = np.full_like(scores, -np.inf)
    kept[order[before < top_p]] = scores[order[before < top_p]]
    return kept


def softmax(scores: Array) -> Array:
    """Probabilities of one row of scores."""
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
