"""Checks of graphs that choose tokens (`--postprocess`): the tokens are the likeliest, scores are log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmconv.runtime.runner import Choices
from llmconv.tensors import Array
from llmconv.verify.results.sigma import GATES, ExpectedOutput, Measure, measure, rms

ULP = 2.0**-23
"""Unit in the last place of float32 scores, which are large even where all logits are tiny."""


def expected_count(postprocess: str) -> int:
    """Number of chosen tokens: K for `topk:K`, 1 for `argmax`."""
    return int(postprocess.partition(":")[2] or 1)


def measure_choices(logits: ExpectedOutput, choices: Choices, count: int) -> dict[str, Measure]:
    """Compares `tokens` and `scores` with the logits of the eager model.

    The token of rank k must have the k-th largest logit, up to near-ties; a score is compared with the log-probability
    of the chosen token.

    Args:
        logits: expected logits, rows [batch, tokens, vocabulary].
        choices: tokens and scores of the graph, [batch, tokens, K].
        count: K as recorded in the manifest.
    """
    tokens, shape = choices.tokens, (*logits.exact.shape[:2], count)
    if tokens.shape != shape or choices.scores.shape != shape:
        return _both(f"shape mismatch: expected {list(shape)}, got {list(tokens.shape)} (batch, tokens, choices)")
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= logits.exact.shape[-1]:
        return _both("a token is outside the vocabulary")
    ordered = np.sort(tokens, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return _both("a token is chosen twice")
    chosen = np.take_along_axis(logits.exact, tokens, -1)
    return {
        "tokens": Measure(flips=_misplaced(logits, chosen)),
        "scores": measure(_expected_scores(logits, chosen), choices.scores),
    }


def _both(problem: str) -> dict[str, Measure]:
    return {name: Measure(problem=problem) for name in ("tokens", "scores")}


def _misplaced(logits: ExpectedOutput, chosen: Array) -> int:
    """Number of rows with a token whose logit differs from that of its rank by more than noise."""
    largest = -np.sort(-logits.exact, axis=-1)[..., : chosen.shape[-1]]
    near = 2 * np.maximum(logits.max_noise, GATES["float32"].row * logits.noise)[..., None]
    wrong: Array = (np.abs(largest - chosen) > near).any(axis=-1) & logits.valid
    return int(wrong.sum())


def _expected_scores(logits: ExpectedOutput, chosen: Array) -> ExpectedOutput:
    """Expected scores: logit minus log-sum-exp; both have the noise of the logits, and the sum its own rounding."""
    top = logits.exact.max(axis=-1, keepdims=True)
    total = top + np.log(np.exp(logits.exact - top).sum(axis=-1, keepdims=True))
    rounding = ULP * np.abs(total[..., 0])
    noise = np.hypot(2**0.5 * np.maximum(logits.noise, logits.total_noise), rounding)
    return replace(logits, exact=chosen - total, noise=noise, total_noise=rms(noise[logits.valid]) or 1e-300)
