"""Picks the next token of one sequence, with transformers' filters in their order.

    repetition penalty, then (when sampling) temperature, top-k, top-p, min-p

A filter narrows `TokenCandidates` down; one uniform random number then picks among them in the order of the vocabulary,
so that a seed always gives the same text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmconv.errors import MalformedInput, UsageProblem
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.tensors import Array

BINS, BINS_PER_E = 2048, 16
"""Number of bins of scores, and bins per power of e."""


@dataclass(frozen=True)
class TokenCandidates:
    """Tokens that may be picked.

    Attributes:
        tokens: int64 [n], ascending.
        scores: logits over temperature, float64 [n].
    """

    tokens: Array
    scores: Array

    def __getitem__(self, kept: Array) -> TokenCandidates:
        return TokenCandidates(self.tokens[kept], self.scores[kept])

    def sample(self, generator: np.random.Generator) -> int:
        """One token, sampled by the inverse of the cumulative distribution."""
        cumulative = softmax(self.scores).cumsum()
        return int(self.tokens[np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")])


def pick_token(logits: Array, settings: GenerationSettings, generator: np.random.Generator, seen: Array | None) -> int:
    """The next token; the greedy choice takes the lowest id among equals.

    Args:
        logits: [vocabulary]; not changed.
        settings: how to pick.
        generator: gives one number when sampling.
        seen: tokens of the sequence so far, for the repetition penalty; None for no penalty.

    Raises:
        MalformedInput: the logits are NaN.
    """
    if seen is not None:
        logits = penalized(logits, seen, settings.repetition_penalty)
    likeliest = int(logits.argmax())
    if math.isnan(logits[likeliest]):
        raise MalformedInput("the logits of the model are NaN", hint="run `llmconv verify` on the folder")
    if settings.is_greedy:
        return likeliest
    kept = keep_top_k(logits, settings.top_k)
    candidates = TokenCandidates(kept, logits[kept].astype(np.float64) / settings.temperature)
    return narrowed(candidates, settings).sample(generator)


def pick_choice(tokens: Array, scores: Array, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """The next token from the likeliest ones that the graph chose; the same as from all logits, except for ties.

    Args:
        tokens: int64 [K], likeliest first.
        scores: their log-probabilities [K].
        settings: to sample, `top_k` is from 1 to K.
        generator: gives one number when sampling.

    Raises:
        UsageProblem: the settings need tokens that the graph does not return.
    """
    if settings.is_greedy:
        return int(tokens[0])
    if not 0 < settings.top_k <= len(tokens):
        raise UsageProblem(
            f"the graph returns {len(tokens)} tokens to sample from, but top-k {settings.top_k or 'of all'} needs more",
            hint=f"give `--temperature 0`, or `--top-k {len(tokens)}` or less, or export another `--postprocess`",
        )
    kept = np.sort(keep_top_k(scores, settings.top_k))
    kept = kept[np.argsort(tokens[kept])]
    candidates = TokenCandidates(tokens[kept], scores[kept].astype(np.float64) / settings.temperature)
    return narrowed(candidates, settings).sample(generator)


def pick_scored(scores: Array, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """The next token by scores that are filtered already: minus infinity for tokens that may not be picked.

    Args:
        scores: [vocabulary].
        settings: greedy or sampling.
        generator: of random numbers.
    """
    if settings.is_greedy:
        return int(np.argmax(scores))
    kept = np.flatnonzero(scores > -np.inf)
    return TokenCandidates(kept, scores[kept].astype(np.float64)).sample(generator)


def narrowed(candidates: TokenCandidates, settings: GenerationSettings) -> TokenCandidates:
    """The candidates that top-p and then min-p keep."""
    candidates = keep_top_p(candidates, settings.top_p)
    return keep_min_p(candidates, settings.min_p or 0.0)


def penalized(logits: Array, seen: Array, penalty: float) -> Array:
    """A copy of `logits` with the repetition penalty: above 1 it makes `seen` tokens less likely.

    Args:
        logits: [vocabulary].
        seen: ids of tokens.
        penalty: `repetition_penalty`.
    """
    changed = logits.copy()
    scores = logits[seen]
    changed[seen] = np.where(scores < 0, scores * penalty, scores / penalty)
    return changed


def keep_top_k(scores: Array, top_k: int) -> Array:
    """Indices of the `top_k` largest scores, ascending, including ties; all for 0."""
    if not 0 < top_k < len(scores):
        return np.arange(len(scores))
    threshold = np.partition(scores, -top_k)[-top_k]
    return np.flatnonzero(scores >= threshold)


def keep_top_p(candidates: TokenCandidates, top_p: float) -> TokenCandidates:
    """The smallest set of likeliest tokens whose probabilities add up to at least `top_p`."""
    if top_p >= 1:
        return candidates
    probabilities = softmax(candidates.scores)
    # Sorting a whole vocabulary is too slow: only the bin in which the sum reaches p is sorted.
    bins = np.minimum((candidates.scores.max() - candidates.scores) * BINS_PER_E, BINS - 1).astype(np.int64)
    sums = np.bincount(bins, weights=probabilities).cumsum()
    last = min(int(np.searchsorted(sums, top_p, side="left")), len(sums) - 1)
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(-probabilities[inside], kind="stable")]
    reached = probabilities[inside].cumsum() + (sums[last - 1] if last else 0.0)
    count = int(np.searchsorted(reached, top_p, side="left")) + 1
    return candidates[np.sort(np.concatenate([np.flatnonzero(bins < last), inside[:count]]))]


def keep_min_p(candidates: TokenCandidates, min_p: float) -> TokenCandidates:
    """The tokens that are at least `min_p` times as likely as the likeliest."""
    if min_p <= 0:
        return candidates
    probabilities = softmax(candidates.scores)
    return candidates[np.flatnonzero(probabilities >= min_p * probabilities.max())]


def softmax(scores: Array) -> Array:
    """Probabilities of one row of scores."""
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
