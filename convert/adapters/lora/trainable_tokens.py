"""`trainable_token_indices` of PEFT: trained rows of an embedding, which replace the base's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmconv.convert.adapters.lora.config import LoraConfig
from llmconv.errors import MalformedInput
from llmconv.tensors import Array, LazyTensor, cast

HEADS = ("lm_head", "embed_out")
"""Modules that may be tied to the embedding; some checkpoints then contain its trained rows twice."""


@dataclass(frozen=True)
class TokenRows:
    """Rows [ids, dim] of an embedding that one adapter trained, and their ids."""

    ids: tuple[int, ...]
    rows: LazyTensor


def pair_tokens(deltas: Mapping[str, LazyTensor], config: LoraConfig) -> dict[str, TokenRows]:
    """The trained rows of each module (PEFT `utils/other.py`, `set_additional_trainable_modules`).

    `config.tokens` has their ids by the end of a module's path, or by `""` for the only module; MalformedInput if
    config and tensors contradict each other.
    """
    result = {}
    for module, rows in deltas.items():
        named = {ids for key, ids in config.tokens.items() if f".{module}".endswith(f".{key}")}
        tied = set(config.tokens.values()) if module in HEADS and len(deltas) > 1 else set()
        found = {ids for key, ids in config.tokens.items() if key == ""} or named or tied
        ids = found.pop() if len(found) == 1 else None
        if ids is None:
            raise _contradiction(f"the file contains trained tokens of `{module}`, but the config lacks their indices")
        if len(rows.shape) != 2 or rows.shape[0] != len(ids):
            raise _contradiction(
                f"shape mismatch for the trained tokens of `{module}`: expected {len(ids)} rows, got {list(rows.shape)}"
            )
        result[module] = TokenRows(ids, rows)
    found = {tokens.ids for tokens in result.values()}
    # PEFT does not save the rows of a tied head, which equal the embedding's
    apart = [ids for key, ids in config.tokens.items() if key.rpartition(".")[2] not in HEADS or ids not in found]
    if len(result) < len(apart):
        raise _contradiction(f"the config has trained tokens of {len(apart)} modules, the file of {len(result)}")
    return result


def _contradiction(message: str) -> MalformedInput:
    return MalformedInput(message, hint="config and tensors belong to different adapters; copy the adapter again")


def with_rows(base: LazyTensor, trained: Sequence[TokenRows]) -> LazyTensor:
    """`base` with the trained rows in place of its own, rounded to its element type."""
    homes = {row: (tokens.rows, at) for tokens in trained for at, row in enumerate(tokens.ids)}

    def load(start: int, stop: int) -> Array:
        rows = np.array(base.rows(start, stop))
        for row in homes.keys() & range(start, stop) if len(homes) < stop - start else range(start, stop):
            if row in homes:
                tensor, at = homes[row]
                rows[row - start] = tensor.rows(at, at + 1)[0].astype(rows.dtype)
        return rows

    return LazyTensor(base.dtype, base.shape, load, lambda other: with_rows(cast(base, other), trained))
