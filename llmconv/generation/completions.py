"""The results of generate: completions, and the time and memory they took, per batch and in total."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.files import system_calls

STATUS = Path("/proc/self/status")
"""Has `VmHWM`, see `proc_pid_status(5)`; `getrusage` also counts memory of the parent process."""


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        prompt: as given, a text or a chat.
        text: the new text, without the prompt.
        tokens: the new tokens, without the end token.
        prompt_tokens: number of tokens of the prompt.
        finish: why it ended: `eos`, `length` or `stop`.
    """

    prompt: Any
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str

    def __repr__(self) -> str:
        return f"<Completion {shortened(self.text)!r}: {len(self.tokens)} tokens, {self.finish}>"


@dataclass(frozen=True)
class GenerationCost:
    """Time and memory of one batch, or of several batches in sequence.

    Attributes:
        prompts: number of prompts.
        prompt_tokens: total over all prompts.
        new_tokens: total over all prompts, end tokens included.
        first_seconds: from the start to the first token of the batch; summed over batches.
        seconds: from the start to the last token.
        peak_bytes: largest resident memory of the process so far, including mapped weights that were read.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    peak_bytes: int

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

    def as_dict(self) -> dict[str, float]:
        """For JSON, rounded."""
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "time_to_first_token": round(self.first_seconds, 4),
            "seconds": round(self.seconds, 4),
            "prompt_tokens_per_second": round(self.prompt_rate, 2),
            "tokens_per_second": round(self.rate, 2),
            "peak_bytes": self.peak_bytes,
        }

    def summary(self, batches: int = 1) -> str:
        """One line for a person; `batches` is the number of batches in the sum."""
        counts = f"{self.prompt_tokens} tokens in, {self.new_tokens} out"
        first = f"{'first token after' if batches == 1 else 'prompts took'} {self.first_seconds:.3f} s"
        return f"{counts}; {first}, then {self.rate:.1f} tokens/s; peak memory {self.peak_bytes / 1e9:.2f} GB"

    @classmethod
    def sum(cls, costs: Sequence[GenerationCost]) -> GenerationCost:
        """The total of batches that ran in sequence."""
        names = ("prompts", "prompt_tokens", "new_tokens", "first_seconds", "seconds")
        totals: dict[str, Any] = {name: sum(getattr(cost, name) for cost in costs) for name in names}
        return cls(**totals, peak_bytes=max((cost.peak_bytes for cost in costs), default=0))


class Meter:
    """Measures one batch.

    Args:
        prompts: number of tokens of each prompt.
        at_once: all tokens of a text come together, as in a beam search.
    """

    def __init__(self, prompts: Sequence[int], at_once: bool = False) -> None:
        self._prompts, self._at_once = prompts, at_once
        self._started, self._first, self._tokens = time.perf_counter(), 0.0, 0

    def count(self) -> None:
        """Counts one new token."""
        self._tokens += 1
        self._first = self._first or time.perf_counter()

    def stop(self) -> GenerationCost:
        """The cost of the batch, which ends now."""
        ended = time.perf_counter()
        self._first = 0.0 if self._at_once else self._first
        return GenerationCost(
            len(self._prompts),
            sum(self._prompts),
            self._tokens,
            (self._first or ended) - self._started,
            ended - self._started,
            peak_memory(),
        )


@dataclass(frozen=True)
class Generation:
    """All completions, in the order of the prompts, and their cost.

    Attributes:
        completions: one per prompt.
        backend: `onnx`, `torch` or `genai`.
        batches: cost of each batch, in the order in which they ran.
    """

    completions: list[Completion]
    backend: str
    batches: list[GenerationCost]

    def __repr__(self) -> str:
        tokens = sum(len(one.tokens) for one in self.completions)
        first = f", first {shortened(self.completions[0].text)!r}" if self.completions else ""
        return f"<Generation: {len(self.completions)} completion(s), {tokens} tokens, {self.backend}{first}>"

    @property
    def total(self) -> GenerationCost:
        """The total of all batches."""
        return GenerationCost.sum(self.batches)


def shortened(text: str, length: int = 60) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[: length - 1] + "…"


def peak_memory() -> int:
    """Largest resident set of the process so far, in bytes."""
    try:
        return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return system_calls.peak_memory()
