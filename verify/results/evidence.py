"""Evidence: the data of the report's figures: error histogram, sigma by position, points, flipped tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.tensors import Array
from llmconv.verify.results.sigma import ExpectedOutput, Measure
from llmconv.verify.scenarios.calls import Call

LOWEST, HIGHEST = -12, 4
"""Range of the histogram of absolute errors, in powers of ten; errors outside are counted in the end bins."""
PER_DECADE = 4
BINS = (HIGHEST - LOWEST) * PER_DECADE
POSITIONS = 256
"""Columns of the map of positions: the first tokens of a sequence."""
POINTS = 24
"""Logits kept per call, half of them those with the largest errors."""
FLIPS = 200


@dataclass(frozen=True)
class Flip:
    """One row whose likeliest token differs from that of the exact logits.

    Attributes:
        scenario: name of the scenario.
        row: (sequence in the batch, token of the call).
        margin: exact logit of the exact likeliest token minus that of the graph's.
        noise: the largest margin that rounding explains.
    """

    scenario: str
    row: tuple[int, int]
    margin: float
    noise: float


@dataclass
class Evidence:
    """The evidence on one graph, over all scenarios.

    Attributes:
        histogram: number of logits by power of ten of the absolute error, [BINS].
        points: (exact, graph) values of some logits.
        flips: the first flipped rows.
        positions: largest sigma of a row, by output and position in the sequence.
        rows: number of compared rows of logits.
        flipped: number of all flipped rows.
    """

    histogram: Array = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    points: list[tuple[float, float]] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    positions: dict[str, Array] = field(default_factory=lambda: defaultdict(lambda: np.zeros(POSITIONS)))
    rows: int = 0
    flipped: int = 0

    def see_rows(self, output: str, found: Measure, first: int) -> None:
        """Records the sigma of each row.

        Args:
            output: name of the output.
            found: its measured errors.
            first: position in the sequence of its first row.
        """
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
        """Records errors, points and flips of the logits of a call; padding is left out.

        Args:
            scenario: name of the scenario.
            call: the call.
            truth: the expected logits.
            logits: those of the graph, [batch, tokens, vocabulary].
        """
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
        """Plain data for JSON."""
        edges = [float(f"{10 ** (LOWEST + i / PER_DECADE):.3g}") for i in range(BINS + 1)]
        return {
            "rows": self.rows,
            "flipped": self.flipped,
            "error_edges": edges,
            "error_counts": self.histogram.tolist(),
            "flips": [{**vars(flip), "row": list(flip.row)} for flip in self.flips],
        }
