"""Whether errors in steps can be those of rounding with error feedback (GPTQ), whose codes are not the nearest.

Columns make up for the errors of others, so that the errors of a block nearly cancel each other; a zero point that is
off moves all of them. Single codes, and zero points that are one off, look like codes of this method, but for the first
column, which has no error to make up for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array

MEAN = 1.5
"""Maximum absolute mean error of a block in steps; of 3.3 million blocks of a 135 M model the largest had 0.98."""

LEAST = 0.005
"""Minimum share of a matrix's codes that are not the nearest, if any; of tiny random models it is 0.03 to 0.15."""


@dataclass
class FeedbackShare:
    """Codes of a matrix that are not the nearest to their weights.

    Attributes:
        others: their number.
        count: of all codes.
    """

    others: int = 0
    count: int = 0

    def add(self, others: Array) -> None:
        """Counts codes of some rows; `others` is true where they are not the nearest."""
        self.others += int(others.sum())
        self.count += others.size

    def problem(self) -> str:
        """Describes a matrix with too few of them; one with none was rounded without feedback, for want of tokens."""
        if not 0 < self.others < LEAST * self.count:
            return ""
        return f"{self.others:,} of {self.count:,} codes are not the nearest, fewer than error feedback causes"


def beyond_feedback(steps: Array, size: int, first: int) -> str:
    """Describes the first block with a larger mean error; empty if there is none.

    Args:
        steps: errors in steps [rows, columns].
        size: columns of a block.
        first: number of the first row.
    """
    edges = np.arange(0, steps.shape[1], size)
    counts = np.diff([*edges, steps.shape[1]])
    means = np.add.reduceat(steps, edges, axis=1) / counts
    odd = np.argwhere(np.abs(means) > MEAN)
    if not len(odd):
        return ""
    row, block = (int(at) for at in odd[0])
    shift = float(means[row, block])
    return f"row {first + row}, block {block} is off by {shift:+.1f} steps on average: its zero point may be wrong"
