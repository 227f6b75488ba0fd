"""The logits that a client's tokens are judged by: of the eager model, or of the same graphs in llmconv's own loop.

The client's tokens are fed, so one that is chosen by a near-tie does not make all tokens after it differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.quantized_entries import shipped_runner
from llmconv.verify.reference.cost_estimate import CostEstimate
from llmconv.verify.results.sigma import ExpectedOutput, NoiseFloor


class LogitsSource(Protocol):
    """Computes the logits before each new token; `title` is the model's in reports."""

    title: str

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        """The logits [prompts, new, vocabulary] after each prompt and all but the last of its new tokens."""


class EagerLogits:
    """The eager model in float64; the noise is that of the eager model in the graphs' dtype.

    `dtype` is its numpy name; `code` is a trusted folder whose own code builds the model, None to run no code of it.
    """

    title = "the eager model"

    def __init__(self, folder: Path, dtype: str, code: Path | None) -> None:
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone

        estimate = CostEstimate.of(folder, 1)
        kind = StreamedRunner if estimate.lacking(estimate.whole) else EagerRunner
        options: dict[str, Any] = {"code": code, "extra_inputs": extra_inputs_of(folder)}
        self._runners = [kind(folder, name, **options) for name in ("float64", dtype)]
        width = int(getattr(self._runners[0].config, "hidden_size", 0) or 0)
        self._floor = NoiseFloor(dtype, width)

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        """See `LogitsSource.logits`."""
        ids, mask = batch.ids[:, :-1], batch.mask[:, :-1]
        positions = default_positions(mask, mask.shape[1])
        exact, rounded = (_before_new(batch, run.prefill(ids, mask, positions).logits) for run in self._runners)
        return self._floor.truth("logits", exact, rounded, _valid(batch))


@dataclass
class OwnLogits:
    """The graphs of the folder in llmconv's own loop, for codes whose cost is judged elsewhere.

    Each token is computed twice: by one call over all tokens before it, and by a step after the step before. The
    difference is the noise.
    """

    runner: Runner
    title = "llmconv's own loop over the graphs"

    @classmethod
    def of(cls, verified: VerifiedFolder) -> OwnLogits:
        """Opens the graphs of a folder."""
        return cls(shipped_runner(verified)[1])

    def logits(self, batch: PaddedBatch) -> ExpectedOutput:
        """See `LogitsSource.logits`."""
        first = np.concatenate([self._of_prompt(prompt) for prompt in batch.prompts])
        exact = np.stack([first, *self._calls(batch)], axis=1).astype(np.float64)
        rounded = np.stack([first, *self._steps(batch)], axis=1)
        return NoiseFloor("float32").truth("logits", exact, rounded, _valid(batch))

    def _of_prompt(self, prompt: Sequence[int]) -> Array:
        """The logits after a prompt without padding, [1, vocabulary]; a graph may return no others."""
        mask = np.ones((1, len(prompt)), dtype=np.int64)
        return _last(self.runner.prefill(np.array([prompt]), mask, default_positions(mask, len(prompt))))

    def _calls(self, batch: PaddedBatch) -> Iterator[Array]:
        """The logits after each new token but the last, each from a call over all tokens."""
        for length in range(batch.longest + 1, batch.longest + batch.new):
            mask = batch.mask[:, :length]
            yield _last(self.runner.prefill(batch.ids[:, :length], mask, default_positions(mask, length)))

    def _steps(self, batch: PaddedBatch) -> Iterator[Array]:
        """The same logits, each from a step."""
        mask = batch.mask[:, : batch.longest]
        step = self.runner.prefill(batch.ids[:, : batch.longest], mask, default_positions(mask, batch.longest))
        for length in range(batch.longest + 1, batch.longest + batch.new):
            mask, new = batch.mask[:, :length], batch.ids[:, length - 1 : length]
            step = self.runner.decode(new, mask, default_positions(mask, 1), step.present)
            yield _last(step)


def _last(step: Step) -> Array:
    return step.logits[:, -1].astype(np.float32)


def _before_new(batch: PaddedBatch, logits: Array) -> Array:
    """The logits before each new token, [prompts, new, vocabulary], from those of all tokens of a padded batch."""
    ends = [batch.longest if batch.side == "left" else len(prompt) for prompt in batch.prompts]
    first = logits[np.arange(len(ends)), np.array(ends) - 1][:, None]
    return np.concatenate([first, logits[:, batch.longest :]], axis=1)


def _valid(batch: PaddedBatch) -> Array:
    """Which new tokens there are, bool [prompts, new]."""
    valid: Array = batch.mask[:, batch.longest :] == 1
    return valid


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of prompts (token ids), padded on one side, and the new tokens after them.

    `side` is `left` or `right`. On the right the padding stays between prompt and new tokens, where a sliding window
    counts it.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Sequence[int]]
    side: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def new(self) -> int:
        """Largest number of new tokens of a row."""
        return max(map(len, self.rows))

    @property
    def ids(self) -> Array:
        """Token ids, int64 [prompts, longest + new]; 0 for padding."""
        return self._filled(self.prompts, self.rows)

    @property
    def mask(self) -> Array:
        """1 for tokens, 0 for padding, int64 [prompts, longest + new]."""
        return self._filled(*([[1] * len(row) for row in some] for some in (self.prompts, self.rows)))

    def _filled(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> Array:
        found = []
        for prompt, row in zip(prompts, rows, strict=True):
            padding = [0] * (self.longest - len(prompt))
            start = [*padding, *prompt] if self.side == "left" else [*prompt, *padding]
            found.append([*start, *row, *[0] * (self.new - len(row))])
        return np.array(found, dtype=np.int64)
