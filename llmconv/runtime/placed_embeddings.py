"""PlacedEmbeddings: embeddings in place of those of some tokens, such as the features of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmconv.tensors import Array


@dataclass(frozen=True)
class PromptEmbeddings:
    """Embeddings in place of those of some tokens of one prompt.

    Attributes:
        at: positions of these tokens in the prompt, int64 [count], ascending.
        rows: their embeddings, float32 [count, hidden].
        before: number of them that precede the prompt and stand for no token; penalties do not count these.
        inputs: values of extra inputs of the model that belong to them, for all tokens of the prompt, by name, without
            the axis of the batch.
        read_whole: the prompt is read in one run, because some tokens attend to later ones.
    """

    at: Array
    rows: Array
    before: int = 0
    inputs: Mapping[str, Array] = field(default_factory=dict)
    read_whole: bool = False


@dataclass(frozen=True)
class PlacedEmbeddings:
    """Embeddings in place of those of some tokens of a batch: `where`, bool [batch, tokens].

    `rows`, float32 [count, hidden], are in the order of the batch's rows.
    """

    where: Array
    rows: Array

    @classmethod
    def of(cls, prompts: Sequence[PromptEmbeddings | None], lengths: Sequence[int]) -> PlacedEmbeddings | None:
        """Those of a batch of prompts of these lengths in tokens, padded on the left; None if there are none."""
        found = [one for one in prompts if one is not None]
        if not found:
            return None
        where = np.zeros((len(prompts), max(lengths)), dtype=bool)
        for row, (one, length) in enumerate(zip(prompts, lengths, strict=True)):
            if one is not None:
                where[row, where.shape[1] - length + one.at] = True
        return cls(where, np.concatenate([one.rows for one in found]))

    def columns(self, start: int, stop: int) -> PlacedEmbeddings | None:
        """Those of the tokens from column `start` to `stop`; None if there are none."""
        part = np.zeros_like(self.where)
        part[:, start:stop] = self.where[:, start:stop]
        return PlacedEmbeddings(self.where[:, start:stop], self.rows[part[self.where]]) if part.any() else None

    def into(self, embedded: Array) -> Array:
        """A copy of `embedded`, float [batch, tokens, hidden] (perhaps larger than `where`), with these in place."""
        result = embedded.copy()
        batch, tokens = self.where.shape
        result[:batch, :tokens][self.where] = self.rows.astype(embedded.dtype)
        return result
