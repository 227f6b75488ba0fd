"""How far a graph is from the truth, in units of the model's own rounding noise.

    sigma = RMS(graph - eager in float64) / RMS(eager in the graph's dtype - eager in float64)

A correct graph has sigma about 1, because it makes rounding errors of the same size as the eager model; `SCALE` says
what others have. Sigma is taken over all rows of an output and for every row (one position of one sequence), so that
one broken position is not diluted by good ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmconv.tensors import Array

SCALE = (
    "A correct graph has a sigma of about 1, another form of GELU hundreds, "
    "a wrong epsilon a thousand or more, a wrong structure ten thousand or more."
)
"""What sigma means, as the report and the pages say it; figures: docs/calibration.json, own and scaled weights."""


@dataclass(frozen=True)
class Gates:
    """The largest sigma that passes: over an output, and of its worst row."""

    aggregate: float
    row: float


GATES = {
    "float64": Gates(3.5, 8.0),
    "float32": Gates(3.5, 8.0),
    "float16": Gates(1.8, 5.0),
    "bfloat16": Gates(2.5, 5.0),
}
"""By the graph's dtype: 1.5 times the largest sigma of clean exports, rows 2.4 times, see docs/calibration.md."""

ULPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""One unit in the last place of 1, by dtype."""

ULP_SHARE = 0.5
"""The floor is never below this share of one unit in the last place, where the eager run happens to be exact."""

FEW_ROWS = 8
"""Rows of an output up to which its noise is measured once more before it is said to differ."""

AT_ONCE = 8
"""Rows of logits that are taken at once, where their logarithms are of no use later."""

LUCK = 16
"""How many times smaller than usual the noise of a row may have been by chance."""


@dataclass(frozen=True)
class ExpectedOutput:
    """One output of the eager model, as rows [batch, tokens, features], and its noise.

    Attributes:
        exact: computed in float64.
        noise: RMS of the eager model's own rounding error per row, [batch, tokens].
        total_noise: the same over all valid rows.
        max_noise: largest absolute rounding error per row, [batch, tokens].
        valid: bool [batch, tokens]; rows under padding are not compared.
        other: the run in the graph's dtype once more, [batch, tokens, features], in another order of operations; None
            where there is no other order.
        excess: the noise as it was measured over what was usual for the output before, of all rows or of the worst, in
            units of the gates of float32; 0 where nothing was measured before.
    """

    exact: Array
    noise: Array
    total_noise: float
    max_noise: Array
    valid: Array
    other: Callable[[], Array] | None = field(default=None, compare=False, repr=False)
    excess: float = 0.0

    @property
    def near_tie(self) -> Array:
        """Margin of likeliest tokens that noise could overturn, [batch, tokens]: twice the gate's worst row of it."""
        return 2 * np.maximum(self.max_noise, GATES["float32"].row * self.noise)

    def margins(self, logits: Array) -> Array:
        """By how much the truth prefers its own likeliest token to that of some logits, [batch, tokens]."""
        best, chosen = (array.argmax(axis=-1)[..., None] for array in (self.exact, logits))
        at = np.take_along_axis
        margins: Array = at(self.exact, best, -1)[..., 0] - at(self.exact, chosen, -1)[..., 0]
        return margins

    def flipped(self, logits: Array) -> Array:
        """Rows that are not padding whose likeliest token is another, bool [batch, tokens]."""
        flipped: Array = (self.exact.argmax(axis=-1) != logits.argmax(axis=-1)) & self.valid
        return flipped

    def last(self) -> ExpectedOutput:
        """The last token only, for graphs that give no other logits."""
        noise, valid, other = self.noise[:, -1:], self.valid[:, -1:], self.other
        total = max(rms(noise[valid]), 1e-300)
        again = (lambda: other()[:, -1:]) if other else None
        return ExpectedOutput(self.exact[:, -1:], noise, total, self.max_noise[:, -1:], valid, again)

    @property
    def is_doubtful(self) -> bool:
        """Whether luck may have made the noise small: of so few rows none is typical."""
        return self.other is not None and int(self.valid.sum()) <= FEW_ROWS

    def again(self) -> ExpectedOutput:
        """The larger of two noises, row by row: of the run that was measured, and of another order of operations.

        What is far more is no noise: rotary frequencies that depend on the length make two orders two computations.
        """
        assert self.other
        error = self.other().astype(np.float64) - self.exact
        noise = rms_rows(error)
        unlucky = (noise > self.noise) & (noise < LUCK * self.noise)
        rows = np.where(unlucky, noise, self.noise)
        most = np.where(unlucky, np.abs(error).max(axis=-1, initial=0.0), self.max_noise)
        total = max(self.total_noise, rms(rows[self.valid & unlucky]))
        return replace(self, noise=rows, total_noise=total, max_noise=np.maximum(most, self.max_noise), other=None)


@dataclass(frozen=True)
class Measure:
    """What was measured of one output of one call.

    Attributes:
        sigma, row_sigma: over all valid rows, and of the worst row.
        row: (sequence in the batch, token) of the worst row.
        max_abs: largest absolute difference.
        flips: rows whose likeliest token differs and no near-tie explains it (logits only).
        divergence: largest Kullback-Leibler divergence of a row from the truth, in nats (logits only).
        agreement: share of rows with the truth's likeliest token (logits only).
        ratios: sigma of every row, [batch, tokens]; 0 under padding.
        problem: why nothing could be measured, or what else is wrong; empty when all is well.
    """

    sigma: float = 0.0
    row_sigma: float = 0.0
    row: tuple[int, int] = (0, 0)
    max_abs: float = 0.0
    flips: int = 0
    problem: str = ""
    divergence: float = 0.0
    agreement: float = 1.0
    ratios: Array | None = field(default=None, compare=False, repr=False)

    def passes(self, gates: Gates) -> bool:
        """Within the gates, with nothing else wrong."""
        return not self.problem and not self.flips and self.sigma <= gates.aggregate and self.row_sigma <= gates.row


class NoiseFloor:
    """Rounding noise of the eager model, pooled per output over the scenarios so far.

    A single row of a small output may by luck be nearly exact, and would make any graph look bad; the pooled noise
    says what is usual for that output.
    """

    def __init__(self, dtype: str) -> None:
        self._ulp = ULPS[dtype]
        self._pool: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def copy(self) -> NoiseFloor:
        """The same floor, which what comes later does not change."""
        other = copy(self)
        other._pool = self._pool.copy()
        for name, sums in self._pool.items():
            other._pool[name] = [*sums]
        return other

    @property
    def knows_noise(self) -> bool:
        """Whether something was measured before."""
        return bool(self._pool)

    def truth(self, name: str, exact: Array, rounded: Array, valid: Array) -> ExpectedOutput:
        """The output `name` of one call, from the float64 run and the run in the graph's dtype, both as rows."""
        error = rounded.astype(np.float64) - exact
        noise, size = rms_rows(error), rms_rows(exact)
        pool = self._pool[name]
        seen, before = pool[1] > 0, (pool[0] / pool[1]) ** 0.5 if pool[1] else 0.0
        pool[0] += float((noise[valid] ** 2).sum())
        pool[1] += float((size[valid] ** 2).sum())
        usual = (pool[0] / pool[1]) ** 0.5 if pool[1] else 0.0
        total_size = rms(size[valid])
        total = max(rms(noise[valid]), usual * total_size, self._ulp * ULP_SHARE * total_size, 1e-300)
        median = float(np.median(noise[valid])) if valid.any() else 0.0
        rows = np.maximum(noise, max(median, usual * total_size))
        rows = np.maximum(rows, np.maximum(self._ulp * ULP_SHARE * size, 1e-300))
        excess = _excess(noise[valid], before * size[valid], self._ulp * ULP_SHARE * size[valid]) if seen else 0.0
        return ExpectedOutput(exact, rows, total, np.abs(error).max(axis=-1, initial=0.0), valid, excess=excess)


def _excess(noise: Array, usual: Array, ulp: Array) -> float:
    """See `ExpectedOutput.excess`; all of them by row."""
    least, gates = np.maximum(np.maximum(usual, ulp), 1e-300), GATES["float32"]
    return max(rms(noise) / rms(least) / gates.aggregate, float((noise / least).max(initial=0.0)) / gates.row)


def measure(truth: ExpectedOutput, output: Array, *, tokens: bool = False) -> Measure:
    """Compares one output with the truth.

    Args:
        truth: what the eager model says.
        output: the graph's rows [batch, tokens, features].
        tokens: the rows are logits, so the likeliest token is compared too.
    """
    if output.shape != truth.exact.shape:
        return Measure(
            problem=f"shape {list(output.shape)} instead of {list(truth.exact.shape)} (batch, tokens, features)"
        )
    if not np.array_equal(np.isfinite(output), np.isfinite(truth.exact)):
        return Measure(problem="NaN or infinity where the eager model has numbers, or the reverse")
    error = np.where(np.isfinite(truth.exact), output.astype(np.float64) - truth.exact, 0.0)
    if not truth.valid.any():
        return Measure()
    row_error = np.where(truth.valid, rms_rows(error), 0.0)
    ratio = row_error / truth.noise
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    found = Measure(
        sigma=rms(row_error[truth.valid]) / truth.total_noise,
        row_sigma=float(ratio[worst]),
        row=(int(worst[0]), int(worst[1])),
        max_abs=float(np.abs(error[truth.valid]).max(initial=0.0)),
        ratios=ratio,
    )
    return replace(found, **_of_tokens(truth, output)) if tokens else found


def _of_tokens(truth: ExpectedOutput, logits: Array) -> dict[str, Any]:
    """What is measured of logits alone."""
    divergence = divergences(truth.exact[truth.valid], logits[truth.valid])
    return {
        "flips": unexplained_flips(truth, logits),
        "divergence": float(divergence.max(initial=0.0)),
        "agreement": 1.0 - float(truth.flipped(logits)[truth.valid].mean()),
    }


def divergences(exact: Array, logits: Array) -> Array:
    """Kullback-Leibler divergence of the tokens' probabilities from the truth's, in nats.

    Args:
        exact, logits: [rows, vocabulary].

    Returns:
        [rows], at least 0.
    """
    parts = [
        divergence_of(*(log_probabilities(rows[at : at + AT_ONCE].astype(np.float64)) for rows in (exact, logits)))
        for at in range(0, len(exact), AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def divergence_of(wanted: Array, found: Array) -> Array:
    """`divergences` of log-probabilities; a token that the truth rules out adds nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isfinite(wanted), np.exp(wanted) * (wanted - found), 0.0)
    nats: Array = np.maximum(terms.sum(axis=-1), 0.0)
    return nats


def log_probabilities(logits: Array) -> Array:
    """Natural logarithms over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def unexplained_flips(truth: ExpectedOutput, logits: Array) -> int:
    """Rows whose likeliest token differs although the truth's margin is more than noise could overturn.

    The margin counts as a near-tie up to twice the gate's worst row of noise.
    """
    return int((truth.flipped(logits) & (truth.margins(logits) > truth.near_tie)).sum())


def cache_rows(array: Array) -> Array:
    """[batch, heads, tokens, head_dim] as rows [batch, tokens, heads x head_dim]."""
    batch, heads, tokens, size = array.shape
    return array.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * size)


def state_rows(array: Array) -> Array:
    """[batch, …] as rows [batch, 1, …]: a state has no token axis."""
    return array.reshape(len(array), 1, -1)


def rms(values: Array) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def rms_rows(values: Array) -> Array:
    """Root of the mean square over the last axis."""
    result: Array = np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=-1))
    return result
