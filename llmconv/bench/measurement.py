"""What a comparison gave: per batch size, length and candidate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measurement:
    """One candidate at one batch size and length; a figure per round.

    Attributes:
        candidate: its name.
        batch: prompts side by side.
        length: tokens of each prompt.
        first: seconds to the first token.
        step: seconds per token of every prompt after that, over the rest of the run.
        peak: bytes of its process's largest resident set.
        differs: new tokens of which row, and from which on, are not those of the first candidate; None for none.
        error: why there are no figures.
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
        """Adds what a worker answered."""
        times = answer["times"]
        self.first.append(times[0])
        if len(times) > 1:
            self.step.append((times[-1] - times[0]) / (len(times) - 1))
        self.peak = max(self.peak, answer["peak"])

    @property
    def prefill(self) -> list[float]:
        """Prompt tokens per second until the first new token, of every round."""
        return [self.batch * self.length / seconds for seconds in self.first]

    @property
    def decode(self) -> list[float]:
        """New tokens per second after the first, of every round and over all rows."""
        return [self.batch / seconds for seconds in self.step]

    def as_dict(self) -> dict[str, Any]:
        """For JSON and CSV: medians with the least and the most."""
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
    """All cells, by batch size, then length, then candidate.

    Attributes:
        candidates: names, the one that the others are compared with first.
        versions: candidate to package to version.
        cells: measured.
        new: tokens after each prompt.
        repeat: rounds.
        threads: of every candidate.
    """

    candidates: list[str]
    versions: dict[str, dict[str, str]]
    cells: list[Measurement]
    new: int
    repeat: int
    threads: int

    def __repr__(self) -> str:
        names, said = ", ".join(self.candidates), "same tokens" if self.agrees else "other tokens"
        return f"<BenchResult of {names}: {len(self.cells)} cells, {said}>"

    @property
    def agrees(self) -> bool:
        """Whether all candidates gave the same tokens wherever they ran."""
        return not any(cell.differs for cell in self.cells)

    def cell(self, candidate: str, batch: int, length: int) -> Measurement:
        """One of the cells."""
        place = candidate, batch, length
        return next(cell for cell in self.cells if (cell.candidate, cell.batch, cell.length) == place)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "new_tokens": self.new,
            "repeat": self.repeat,
            "threads": self.threads,
            "versions": self.versions,
            "same_tokens": self.agrees,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Row and place of the earliest token that differs; None where all are the same."""
    places = [
        (at, row)
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for at in range(max(len(a), len(b)))
        if at >= min(len(a), len(b)) or a[at] != b[at]
    ]
    return (min(places)[1], min(places)[0]) if places else None


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    figures = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return dict(zip((name, f"{name}_min", f"{name}_max"), figures, strict=True))
