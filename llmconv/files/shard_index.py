"""Shards against the index that lists their tensors.

A tensor may be in two shards (verl 6259). transformers takes the last copy, and other programs that of the index, so
copies have to be equal, and count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor


def require_listed(
    shards: Mapping[str, set[str]],
    found: Mapping[str, Iterable[str]],
    index: str,
    tensor: Callable[[str, str], LazyTensor],
) -> None:
    """Raises MalformedInput if the names that are `found` in the shards are not those that an index lists for them.

    Further copies of a tensor in other shards may be there if they are equal; `tensor(shard, name)` reads one.
    """
    names = {shard: {*content} for shard, content in found.items()}
    homes = {name: shard for shard, listed in shards.items() for name in listed if name in names[shard]}
    for shard, listed in shards.items():
        copies = sorted(name for name in names[shard] - listed if name in homes)
        if different := sorted((listed ^ names[shard]) - {*copies}):
            problem = f"`{index}` and `{shard}` differ in {len(different)} tensors: {listing(different)}"
            raise MalformedInput(problem, hint="shards of different models are mixed; copy the folder again")
        for name in copies:
            if not _are_equal(tensor(homes[name], name), tensor(shard, name)):
                raise MalformedInput(
                    f"two shards have `{name}`, with different values: `{homes[name]}`, where `{index}` lists it, and "
                    f"`{shard}`",
                    hint="the program that saved it wrote one of them by mistake, and nothing tells which: save the "
                    "model again, or give the checkpoint of its training run to `llmconv to-hf`",
                )


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = ((one.rows(*span), other.rows(*span)) for span in one.blocks())
    return all(np.array_equal(first.view(np.uint8), second.view(np.uint8)) for first, second in pairs)
