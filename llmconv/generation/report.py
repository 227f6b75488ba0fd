"""What a run of generate gave, and what it cost: per prompt, per batch and in all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.files import system_calls

STATUS = Path("/proc/self/status")
"""`VmHWM` of `proc_pid_status(5)`; `getrusage` counts what the parent process had, too."""


@dataclass(frozen=True)
class Completion:
    """What one prompt gave.

    Attributes:
        prompt: as given, a text or a chat.
        text: the new text, without the prompt.
        tokens: the new tokens, the end token left out.
        prompt_tokens: how many tokens the prompt has.
        finish: `eos`, `length` or `stop`.
    """

    prompt: Any
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str

    def __repr__(self) -> str:
        return f"<Completion {shortened(self.text)!r}: {len(self.tokens)} tokens, {self.finish}>"


@dataclass(frozen=True)
class Cost:
    """What one batch cost, or several one after another.

    Attributes:
        prompts: how many.
        prompt_tokens, new_tokens: over all of them; an end token is a new token.
        first_seconds: from the start to the first token of the batch; summed over batches.
        seconds: from the start to the last token.
        peak_bytes: the process's largest resident memory so far, the mapped weights that were read among it.
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
        """New tokens per second, the first of every prompt left out of both; all of both where they came at once."""
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

    @classmethod
    def sum(cls, costs: Sequence[Cost]) -> Cost:
        """Of batches one after another."""
        names = ("prompts", "prompt_tokens", "new_tokens", "first_seconds", "seconds")
        totals: dict[str, Any] = {name: sum(getattr(cost, name) for cost in costs) for name in names}
        return cls(**totals, peak_bytes=max((cost.peak_bytes for cost in costs), default=0))


class Meter:
    """Measures one batch.

    Args:
        prompts: how many tokens each has.
        at_once: a text comes when all of it is there, as with beams.
    """

    def __init__(self, prompts: Sequence[int], at_once: bool = False) -> None:
        self._prompts, self._at_once = prompts, at_once
        self._started, self._first, self._tokens = time.perf_counter(), 0.0, 0

    def count(self) -> None:
        """One more token is there."""
        self._tokens += 1
        self._first = self._first or time.perf_counter()

    def stop(self) -> Cost:
        """What it was."""
        ended = time.perf_counter()
        self._first = 0.0 if self._at_once else self._first
        return Cost(
            len(self._prompts),
            sum(self._prompts),
            self._tokens,
            (self._first or ended) - self._started,
            ended - self._started,
            peak_memory(),
        )


@dataclass(frozen=True)
class Generation:
    """All completions, in the order of the prompts, and what they cost.

    Attributes:
        completions: one per prompt.
        backend: `onnx` or `torch`.
        batches: in the order in which they ran.
    """

    completions: list[Completion]
    backend: str
    batches: list[Cost]

    def __repr__(self) -> str:
        tokens = sum(len(one.tokens) for one in self.completions)
        first = f", first {shortened(self.completions[0].text)!r}" if self.completions else ""
        return f"<Generation: {len(self.completions)} completion(s), {tokens} tokens, {self.backend}{first}>"

    @property
    def total(self) -> Cost:
        """Of all batches."""
        return Cost.sum(self.batches)


def shortened(text: str, length: int = 60) -> str:
    """The beginning of a text."""
    return text if len(text) <= length else text[: length - 1] + "…"


def peak_memory() -> int:
    """Bytes of the process's largest resident set so far."""
    try:
        return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return system_calls.peak_memory()
