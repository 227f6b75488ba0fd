"""What is read from a Megatron checkpoint before it is converted: whole tensors in Megatron core's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmconv.tensors import LazyTensor


@dataclass(frozen=True)
class RunState:
    """The model of an opened checkpoint.

    Attributes:
        tensors: Megatron core's name, with the layer's number in the whole model, to the whole tensor; gate and up
            rows of a gated feed-forward follow each other, rows of queries, keys and values alternate by group.
        shards: number of files with weights.
        version: of the layout, for `inspect`.
        dropped: as in Checkpoint.
    """

    tensors: Mapping[str, LazyTensor]
    shards: int
    version: str
    dropped: tuple[str, ...] = ()
