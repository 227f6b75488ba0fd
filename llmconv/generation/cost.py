"""GenerationCost: the time and memory that batches took, and the Meter that measures one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.files import system_calls

STATUS = Path("/proc/self/status")
"""Has `VmHWM`, see `proc_pid_status(5)`; `getrusage` also counts memory of the parent process."""


@dataclass(frozen=True)
class GenerationCost:
    """Time and memory of one batch, or of several batches in sequence.

    Attributes:
        prompts: number of prompts; one that is continued several times counts as several.
        prompt_tokens: total over all prompts.
        new_tokens: total over all prompts, end tokens included.
        first_seconds: from the start to the first token of the batch; summed over batches.
        seconds: from the start to the last token.
        peak_bytes: largest resident memory of the process so far, including mapped weights that were read.
        decode_seconds: the part of `seconds` in which tokens became text.
        latencies: seconds from the start of its batch to the last token, for each prompt.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    peak_bytes: int
    decode_seconds: float = 0.0
    latencies: tuple[float, ...] = ()

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.first_seconds if self.first_seconds else 0.0

    @property
    def rate(self) -> float:
        """New tokens per second after the first token of each prompt; over all tokens if they all came at once."""
        if self.first_seconds == self.seconds:
            return self.new_tokens / self.seconds if self.seconds else 0.0
        later, seconds = self.new_tokens - self.prompts, self.seconds - self.first_seconds
        return later / seconds if later > 0 and seconds > 0 else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per new token: the inverse of `rate`, of the same tokens and the same time."""
        return 1000 / self.rate if self.rate else 0.0

    def latency(self, percent: float) -> float:
        """The latency in seconds that `percent` of the prompts do not exceed, interpolated linearly."""
        return float(np.percentile(self.latencies, percent)) if self.latencies else 0.0

    def as_dict(self) -> dict[str, float]:
        """For JSON, rounded."""
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "time_to_first_token": round(self.first_seconds, 4),
            "seconds": round(self.seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "latency_p50": round(self.latency(50), 4),
            "latency_p90": round(self.latency(90), 4),
            "ms_per_token": round(self.ms_per_token, 3),
            "prompt_tokens_per_second": round(self.prompt_rate, 2),
            "tokens_per_second": round(self.rate, 2),
            "peak_bytes": self.peak_bytes,
        }

    def summary(self, batches: int = 1) -> str:
        """One line for a person; `batches` is the number of batches in the sum."""
        counts = f"{self.prompt_tokens} token{'s' * (self.prompt_tokens != 1)} in, {self.new_tokens} out"
        first = f"{'first token after' if batches == 1 else 'prompts took'} {self.first_seconds:.3f} s"
        return f"{counts}; {first}, then {self.rate:.1f} tokens/s; peak memory {self.peak_bytes / 1e9:.2f} GB"

    def times(self, encode_seconds: float) -> str:
        """One line for a person on where the time went.

        Args:
            encode_seconds: time in which all prompts became tokens.
        """
        spent = f"encode {encode_seconds:.3f} s, generate {self.seconds - self.decode_seconds:.3f} s"
        percentiles = f"p50 {self.latency(50):.3f} s, p90 {self.latency(90):.3f} s"
        return f"{spent}, decode {self.decode_seconds:.3f} s; latency {percentiles}"

    @classmethod
    def sum(cls, costs: Sequence[GenerationCost]) -> GenerationCost:
        """The total of batches that ran in sequence."""
        names = ("prompts", "prompt_tokens", "new_tokens", "first_seconds", "seconds", "decode_seconds")
        totals: dict[str, Any] = {name: sum(getattr(cost, name) for cost in costs) for name in names}
        latencies = tuple(latency for cost in costs for latency in cost.latencies)
        return cls(**totals, latencies=latencies, peak_bytes=max((cost.peak_bytes for cost in costs), default=0))


class Meter:
    """Measures one batch; `prompts` are numbers of tokens.

    With `at_once`, all tokens of a text come together, as in a beam search.
    """

    def __init__(self, prompts: Sequence[int], at_once: bool = False) -> None:
        self._prompts, self._at_once = prompts, at_once
        self._started, self._first, self._tokens = time.perf_counter(), 0.0, 0
        self._latest = [self._started] * len(prompts)

    def count(self, index: int) -> None:
        """Counts one new token of a prompt of the batch."""
        self._tokens += 1
        self._latest[index] = time.perf_counter()
        self._first = self._first or self._latest[index]

    def stop(self, decode_seconds: float = 0.0) -> GenerationCost:
        """The cost of the batch, which ends now; `decode_seconds` is the time in which tokens became text."""
        ended = time.perf_counter()
        self._first = 0.0 if self._at_once else self._first
        return GenerationCost(
            len(self._prompts),
            sum(self._prompts),
            self._tokens,
            (self._first or ended) - self._started,
            ended - self._started,
            peak_memory(),
            decode_seconds,
            tuple(latest - self._started for latest in self._latest),
        )


def peak_memory() -> int:
    """Largest resident set of the process so far, in bytes."""
    try:
        return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return system_calls.peak_memory()
