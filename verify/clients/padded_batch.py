"""PaddedBatch: prompts of several lengths and the tokens that a client added, laid out as the client had them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.tensors import Array


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of prompts, padded on one side, and new tokens after them.

    Attributes:
        prompts: token ids of each prompt.
        rows: new tokens of each prompt.
        side: of the padding, `left` or `right`. On the right it stays between prompt and new tokens, where a sliding
            window counts it.
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
