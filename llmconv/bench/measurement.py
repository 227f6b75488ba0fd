"""Measurement and BenchResult: the figures per batch size, prompt length and candidate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measurement:
    """One candidate at one batch size and length, with one figure per round.

    Attributes:
        candidate: its name.
        batch: number of prompts.
        length: tokens of each prompt.
        first: seconds to the first token.
        step: seconds per step after the first token; a step gives one token of every prompt.
        peak: largest resident set of its process, in bytes.
        differs: row and index of the earliest new token that differs from the first candidate's; None if none does.
        error: why there are no figures; empty if there are.
    """

    candidate: str
    batch: int
    length: int
    first: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    peak: int = 0
    differs: tuple[int, int] | None = None
    error: str = ""

    def take(self, answer: dict[str, Any]) -> None:
        """Adds the answer of a worker."""
        times = answer["times"]
        self.first.append(times[0])
        if len(times) > 1:
            self.step.append((times[-1] - times[0]) / (len(times) - 1))
        self.peak = max(self.peak, answer["peak"])

    @property
    def prefill(self) -> list[float]:
        """Prompt tokens per second until the first new token, for every round."""
        return [self.batch * self.length / seconds for seconds in self.first]

    @property
    def decode(self) -> list[float]:
        """New tokens per second after the first, over all rows, for every round."""
        return [self.batch / seconds for seconds in self.step]

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON and CSV: median, minimum and maximum."""
        return {
            "candidate": self.candidate,
            "batch_size": self.batch,
            "length": self.length,
            **_summary("prefill_tokens_per_second", self.prefill),
            **_summary("decode_tokens_per_second", self.decode),
            **_summary("time_to_first_token", self.first),
            **_summary("seconds_per_step", self.step),
            "peak_bytes": self.peak,
            "differs_from_token": self.differs[1] if self.differs else None,
            "error": self.error,
        }


@dataclass(frozen=True)
class BenchResult:
    """All measurements, by batch size, then length, then candidate.

    Attributes:
        candidates: names; the others are compared with the first.
        versions: candidate to package to version.
        cells: the measurements.
        new: number of new tokens after each prompt.
        repeat: number of rounds.
        threads: threads of each candidate.
    """

    candidates: list[str]
    versions: dict[str, dict[str, str]]
    cells: list[Measurement]
    new: int
    repeat: int
    threads: int

    def __repr__(self) -> str:
        names, tokens = ", ".join(self.candidates), "same tokens" if self.agrees else "different tokens"
        return f"<BenchResult of {names}: {len(self.cells)} measurements, {tokens}>"

    @property
    def agrees(self) -> bool:
        """Whether all candidates that ran gave the same tokens."""
        return not any(cell.differs for cell in self.cells)

    def cell(self, candidate: str, batch: int, length: int) -> Measurement:
        """The measurement of a candidate at a batch size and length."""
        place = candidate, batch, length
        return next(cell for cell in self.cells if (cell.candidate, cell.batch, cell.length) == place)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "new_tokens": self.new,
            "repeat": self.repeat,
            "threads": self.threads,
            "versions": self.versions,
            "same_tokens": self.agrees,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Row and index of the earliest token that differs; None if all are the same."""
    places = [
        (at, row)
        for row, (a, b) in enumerate(zip(expected, found, strict=True))
        for at in range(max(len(a), len(b)))
        if at >= min(len(a), len(b)) or a[at] != b[at]
    ]
    return (min(places)[1], min(places)[0]) if places else None


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    figures = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return dict(zip((name, f"{name}_min", f"{name}_max"), figures, strict=True))
