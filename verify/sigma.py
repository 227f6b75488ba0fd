"""Sigma: the error of a graph in units of the eager model's own rounding noise, and the gates that it must pass.

    sigma = RMS(graph - eager in float64) / RMS(eager in the graph's dtype - eager in float64)

A correct graph has a sigma of about 1, because its rounding errors are as large as those of the eager model; `SCALE`
gives typical values of faults. Sigma is computed over all rows of an output and for each row (one position of one
sequence), so that a single broken position is not diluted by correct ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.scenarios.calls import Call

SCALE = (  # how to read sigma, for reports and documentation; measured values: docs/calibration.json
    "A correct graph has a sigma of about 1, another form of GELU hundreds, "
    "a wrong epsilon a thousand or more, a wrong structure ten thousand or more."
)


def sigma_text(sigma: float) -> str:
    """A sigma in a report: two decimals near the gates, fewer digits where it only says how large a fault is."""
    return f"{sigma:.2f}" if sigma < 100 else f"{sigma:.0f}" if sigma < 10_000 else f"{sigma:.1e}"


@dataclass(frozen=True)
class Gates:
    """The largest sigma that passes."""

    aggregate: float  # over all rows of an output
    row: float  # of the worst row
    # judge only the calmest tenth of all rows of a scenario, by `aggregate`. In half precision a router may choose
    # other experts for a token than the eager model did, in a correct graph, too; that token and those after it differ
    # then. A fault of some rows only is found by the float32 copy of the graph, of which all rows are judged.
    calmest: bool = False


GATES = {
    "float64": Gates(3.5, 8.0),
    "float32": Gates(3.5, 8.0),
    "float16": Gates(1.8, 5.0),
    "bfloat16": Gates(2.5, 5.0),
}
"""By the graph's dtype: 1.5 times the largest sigma of correct exports, 2.4 times for rows; docs/calibration.md."""

ULPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""One unit in the last place of 1.0, by dtype."""

ULP_SHARE = 0.5  # lower limit of the noise in units in the last place, for eager runs that happen to be exact
NORM_SHARE = 1 / 12
"""Lower limit of the noise in units in the last place of float32, by the root of the width.

onnxruntime sums the squares of a norm one by one, torch in blocks: the error of n additions grows with the root of n,
and the root of the mean halves it. On bfloat16 embeddings of width 8192, the norm of onnxruntime differed by 1.1e-6 of
its size, that of torch by 6e-8.
"""

LEAST_ROWS = 8  # minimum number of rows of which the calmest are judged
AT_ONCE = 8  # rows of logits per block, to limit the memory of their logarithms
CHANCE = 16
"""The largest factor by which the noise of one run may be below the usual noise by chance.

All rows attend to the first token, whose noise may be many times theirs: with other roundings, 33 tokens differed 2.4
times as much from the exact result (SmolLM2-135M with 4 bits). In bfloat16 the residual of a first token moves by few
and large steps, and one run may make none: 2 of 138 rows of a correct graph had 5.9 times their noise.
"""


@dataclass(frozen=True)
class ExpectedOutput:
    """One output of the eager model as rows [batch, tokens, features], with its rounding noise."""

    exact: Array  # the output computed in float64
    noise: Array  # RMS of the eager model's rounding error per row, [batch, tokens]
    total_noise: float  # RMS of the rounding error over all valid rows
    max_noise: Array  # largest absolute rounding error per row, [batch, tokens]
    valid: Array  # bool [batch, tokens]; False for padding, which is not compared
    # functions that compute the output in the graph's dtype again, [batch, tokens, features], by the same calls with
    # other rounding
    others: Sequence[Callable[[], Array]] = field(default=(), compare=False, repr=False)
    # the same, by the same tokens in other calls
    orders: Sequence[Callable[[], Array]] = field(default=(), compare=False, repr=False)
    # the measured noise relative to the usual noise of the output so far (the larger ratio of all rows and of the worst
    # row), in units of the float32 gates; 0 without earlier measurements
    excess: float = 0.0

    @property
    def near_tie(self) -> Array:
        """Largest top-1 margin that noise can overturn, [batch, tokens]: twice the noise that the row gate allows."""
        return 2 * np.maximum(self.max_noise, GATES["float32"].row * self.noise)

    def margins(self, logits: Array) -> Array:
        """Exact logit of the exact likeliest token minus that of the likeliest token of `logits`, [batch, tokens]."""
        best, chosen = (array.argmax(axis=-1)[..., None] for array in (self.exact, logits))
        at = np.take_along_axis
        margins: Array = at(self.exact, best, -1)[..., 0] - at(self.exact, chosen, -1)[..., 0]
        return margins

    def flipped(self, logits: Array) -> Array:
        """Valid rows whose likeliest token differs, bool [batch, tokens]."""
        flipped: Array = (self.exact.argmax(axis=-1) != logits.argmax(axis=-1)) & self.valid
        return flipped

    def last(self, count: int = 1) -> ExpectedOutput:
        """The last tokens only, for graphs that return logits of the last token, or runs of a part of the prompt."""
        noise, valid = self.noise[:, -count:], self.valid[:, -count:]
        total = max(rms(noise[valid]), 1e-300)
        others, orders = (
            [partial(lambda run: run()[:, -count:], run) for run in runs] for runs in (self.others, self.orders)
        )
        return ExpectedOutput(self.exact[:, -count:], noise, total, self.max_noise[:, -count:], valid, others, orders)

    def is_doubtful(self, found: Measure, gates: Gates) -> bool:
        """Whether the noise of one run may be small by chance; larger errors than `again` can explain are not."""
        again = bool(self.others or self.orders)
        return again and found.sigma <= CHANCE * gates.aggregate and found.row_sigma <= CHANCE * gates.row

    def again(self) -> ExpectedOutput:
        """The same output with the largest noise, row by row, of the measured run and of those that round otherwise.

        A far larger difference in another order is not noise: with rotary frequencies that depend on the length, the
        same tokens in other calls are different computations. The same calls are the same computations: a row that they
        move far is one whose rounding is chaotic.
        """
        noise, most, usual = self.noise, self.max_noise, self.noise
        for limit, runs in ((CHANCE, self.orders), (np.inf, self.others)):
            for run in runs:
                error = run().astype(np.float64) - self.exact
                rows = rms_rows(error)
                understated = (rows > noise) & (rows < limit * self.noise)
                noise = np.where(understated, rows, noise)
                usual = np.where(understated & (rows < CHANCE * self.noise), rows, usual)
                most = np.where(understated, np.maximum(np.abs(error).max(axis=-1, initial=0.0), most), most)
        raised = rms(usual[self.valid & (usual > self.noise)])
        total = max(self.total_noise, raised, rms(noise[self.valid]))
        return replace(self, noise=noise, total_noise=total, max_noise=most, others=(), orders=())


@dataclass(frozen=True)
class Measure:
    """The measured errors of one output of one call."""

    sigma: float = 0.0  # over all valid rows
    row_sigma: float = 0.0  # of the worst row
    row: tuple[int, int] = (0, 0)  # (sequence in the batch, token) of the worst row
    max_abs: float = 0.0  # largest absolute difference
    flips: int = 0  # rows whose likeliest token differs without a near-tie (logits only)
    problem: str = ""  # why the output could not be measured, or another defect; empty if there is none
    divergence: float = 0.0  # largest Kullback-Leibler divergence of a row from the exact one, in nats (logits only)
    agreement: float = 1.0  # share of rows with the same likeliest token as the exact logits (logits only)
    # sigma of every row, [batch, tokens]; 0 under padding
    ratios: Array | None = field(default=None, compare=False, repr=False)
    # the noise that a sigma of 1 stands for, [batch, tokens]
    noise: Array | None = field(default=None, compare=False, repr=False)

    def passes(self, gates: Gates, share: float = 1) -> bool:
        """Whether sigma is within this share of the gates, and no other problem was found."""
        within = self.sigma <= share * gates.aggregate and self.row_sigma <= share * gates.row
        return not self.problem and not self.flips and within


CALMEST = 0.1  # share of the rows that `calmest_sigma` judges


def calmest_sigma(measures: Sequence[Measure]) -> float | None:
    """Sigma of the calmest tenth of all rows: its largest error relative to its largest noise; None for few rows."""
    known = [(found.ratios, found.noise) for found in measures if found.ratios is not None and found.noise is not None]
    pairs = [(ratios[ratios > 0], noise[ratios > 0]) for ratios, noise in known]
    if sum(len(ratios) for ratios, _ in pairs) < LEAST_ROWS:
        return None
    errors = np.concatenate([ratios * noise for ratios, noise in pairs])
    return float(np.quantile(errors, CALMEST) / np.quantile(np.concatenate([noise for _, noise in pairs]), CALMEST))


class NoiseFloor:
    """Rounding noise of the eager model, pooled per output over the scenarios so far.

    A single row of a small output may be nearly exact by chance, and would make any graph look wrong; the pooled noise
    is the usual noise of that output. `dtype`: numpy name of the graph's dtype. `width`: size of the hidden state; 0
    where no norm is involved.
    """

    def __init__(self, dtype: str, width: int = 0) -> None:
        self.dtype = dtype
        self._least = max(ULPS[dtype] * ULP_SHARE, ULPS["float32"] * NORM_SHARE * width**0.5)
        self._pool: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def copy(self) -> NoiseFloor:
        other = copy(self)
        other._pool = self._pool.copy()
        for name, sums in self._pool.items():
            other._pool[name] = [*sums]
        return other

    @property
    def knows_noise(self) -> bool:
        return bool(self._pool)

    def truth(self, name: str, exact: Array, rounded: Array, valid: Array) -> ExpectedOutput:
        """The expected output of one call, and its noise, which is pooled by the name of the output.

        `exact` are rows of the float64 run, [batch, tokens, features], `rounded` the same in the graph's dtype; `valid`
        is bool [batch, tokens], False for padding.
        """
        error = rounded.astype(np.float64) - exact
        noise, size = rms_rows(error), rms_rows(exact)
        pool = self._pool[name]
        seen, before = pool[1] > 0, (pool[0] / pool[1]) ** 0.5 if pool[1] else 0.0
        pool[0] += float((noise[valid] ** 2).sum())
        pool[1] += float((size[valid] ** 2).sum())
        usual = (pool[0] / pool[1]) ** 0.5 if pool[1] else 0.0
        total_size = rms(size[valid])
        total = max(rms(noise[valid]), usual * total_size, self._least * total_size, 1e-300)
        median = float(np.median(noise[valid])) if valid.any() else 0.0
        rows = np.maximum(noise, max(median, usual * total_size))
        rows = np.maximum(rows, np.maximum(self._least * size, 1e-300))
        excess = _excess(noise[valid], before * size[valid], self._least * size[valid]) if seen else 0.0
        return ExpectedOutput(exact, rows, total, np.abs(error).max(axis=-1, initial=0.0), valid, excess=excess)


def _excess(noise: Array, usual: Array, ulp: Array) -> float:
    least, gates = np.maximum(np.maximum(usual, ulp), 1e-300), GATES["float32"]
    return max(rms(noise) / rms(least) / gates.aggregate, float((noise / least).max(initial=0.0)) / gates.row)


def measure(truth: ExpectedOutput, output: Array, *, tokens: bool = False) -> Measure:
    """Measures the error of an output, rows [batch, tokens, features]; of logits (`tokens`), likeliest tokens too."""
    if output.shape != truth.exact.shape:
        expected, got = list(truth.exact.shape), list(output.shape)
        return Measure(problem=f"shape mismatch: expected {expected}, got {got} (batch, tokens, features)")
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
        noise=truth.noise,
    )
    if not tokens:
        return found
    flipped = truth.flipped(output)
    return replace(
        found,
        flips=int((flipped & (truth.margins(output) > truth.near_tie)).sum()),
        divergence=float(divergences(truth.exact[truth.valid], output[truth.valid]).max(initial=0.0)),
        agreement=1.0 - float(flipped[truth.valid].mean()),
    )


def divergences(exact: Array, logits: Array) -> Array:
    """Kullback-Leibler divergence from the exact token probabilities, in nats: [rows], at least 0.

    Both arguments are logits, [rows, vocabulary].
    """
    parts = [
        divergence_of(*(log_probabilities(rows[at : at + AT_ONCE].astype(np.float64)) for rows in (exact, logits)))
        for at in range(0, len(exact), AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def divergence_of(wanted: Array, found: Array) -> Array:
    """Kullback-Leibler divergence of log-probabilities over the last axis; tokens of probability 0 add nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isfinite(wanted), np.exp(wanted) * (wanted - found), 0.0)
    nats: Array = np.maximum(terms.sum(axis=-1), 0.0)
    return nats


def log_probabilities(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def cache_rows(array: Array) -> Array:
    """Keys or values [batch, heads, tokens, head_dim] as rows [batch, tokens, heads x head_dim]."""
    batch, heads, tokens, size = array.shape
    return array.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * size)


def state_rows(array: Array) -> Array:
    """A state [batch, …] as rows [batch, 1, features]: it has no token axis."""
    return array.reshape(len(array), 1, -1)


def rms(values: Array) -> float:
    """Root mean square; 0 for an empty array."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def rms_rows(values: Array) -> Array:
    result: Array = np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=-1))
    return result


LOWEST, HIGHEST = -12, 4
"""Range of the histogram of absolute errors, in powers of ten; errors outside are counted in the end bins."""
PER_DECADE = 4
BINS = (HIGHEST - LOWEST) * PER_DECADE
POSITIONS = 256  # columns of the map of positions: the first tokens of a sequence
POINTS = 24  # logits kept per call, half of them those with the largest errors
FLIPS = 200


@dataclass(frozen=True)
class Flip:
    """One row (sequence in the batch, token of the call) with another likeliest token than the exact logits."""

    scenario: str
    row: tuple[int, int]
    margin: float  # exact logit of the exact likeliest token minus that of the graph's
    noise: float  # largest margin that rounding explains


@dataclass
class Evidence:
    """The evidence on one graph, over all scenarios."""

    # number of logits by power of ten of the absolute error, [BINS]
    histogram: Array = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    points: list[tuple[float, float]] = field(default_factory=list)  # (exact, graph) values of some logits
    flips: list[Flip] = field(default_factory=list)  # the first flipped rows; `flipped` counts all
    # largest sigma of a row, by output and position in the sequence
    positions: dict[str, Array] = field(default_factory=lambda: defaultdict(lambda: np.zeros(POSITIONS)))
    rows: int = 0  # number of compared rows of logits
    flipped: int = 0

    def see_rows(self, output: str, found: Measure, first: int) -> None:
        """Records the sigma of each row; `first` is the position in the sequence of the first."""
        if found.ratios is None:
            return
        worst = found.ratios.max(axis=0)[: max(0, POSITIONS - first)]
        there = self.positions[output][first : first + len(worst)]
        np.maximum(there, worst, out=there)

    def join_rows(self, other: Evidence) -> None:
        """Adds the row sigmas of a run with other weights or settings, whose logits cannot be added."""
        for output, worst in other.positions.items():
            np.maximum(self.positions[output], worst, out=self.positions[output])

    def see_logits(self, scenario: str, call: Call, truth: ExpectedOutput, logits: Array) -> None:
        """Records errors, points and flips of the logits [batch, tokens, vocabulary] of a call; padding is left out."""
        if logits.shape != truth.exact.shape or not truth.valid.any():
            return
        exact, found = truth.exact[truth.valid], logits[truth.valid].astype(np.float64)
        error = np.nan_to_num(np.abs(found - exact), nan=np.inf)
        for row in error:  # one by one: the logarithms of all rows would take much memory
            with np.errstate(divide="ignore"):
                at = (np.clip(np.log10(row), LOWEST, HIGHEST - 1e-9) - LOWEST) * PER_DECADE
            self.histogram += np.bincount(at.astype(np.int64), minlength=BINS)
        self._keep_points(exact.ravel(), found.ravel(), error.ravel())
        self._keep_flips(scenario, truth, logits)
        self.rows += len(exact)

    def _keep_points(self, exact: Array, found: Array, error: Array) -> None:
        half = min(POINTS // 2, len(error))
        largest = np.argpartition(error, -half)[-half:]
        spread = np.linspace(0, len(error) - 1, half, dtype=np.int64)
        self.points += [(float(exact[i]), float(found[i])) for i in [*largest, *spread] if np.isfinite(found[i])]

    def _keep_flips(self, scenario: str, truth: ExpectedOutput, logits: Array) -> None:
        flipped = np.argwhere(truth.flipped(logits))
        self.flipped += len(flipped)
        for batch, token in flipped[: FLIPS - len(self.flips)]:
            margin, noise = truth.margins(logits)[batch, token], truth.near_tie[batch, token]
            self.flips.append(Flip(scenario, (int(batch), int(token)), float(margin), float(noise)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "flipped": self.flipped,
            "error_edges": [float(f"{10 ** (LOWEST + i / PER_DECADE):.3g}") for i in range(BINS + 1)],
            "error_counts": self.histogram.tolist(),
            "flips": [{**vars(flip), "row": list(flip.row)} for flip in self.flips],
        }
