"""A model split among the ranks of a model-parallel MindFormers run, with the layouts for the strategy file.

The axes are those of the `shard` methods in mindformers `models/*`; with `vocab_emb_dp` all ranks have the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmconv.convert.algebra.operations import split
from llmconv.convert.formats.mindformers.mindspore.ckpt_writer import WHOLE
from llmconv.convert.formats.mindformers.mindspore.strategy import ParallelLayout
from llmconv.errors import UsageProblem, listing
from llmconv.tensors import LazyTensor

SPLIT_AXES = (
    (re.compile(r"\.attention\.w[qkv]\.(?:weight|bias)$|\.feed_forward\.w[13]\.weight$|^lm_head\.weight$"), 0),
    (re.compile(r"\.attention\.wo\.weight$|\.feed_forward\.w2\.weight$"), 1),
    (re.compile(r"\.attention\.dense[123]\.(?:weight|bias)$|\.(?:attention|output)\.projection\.weight$"), 0),
    (re.compile(r"\.output\.mapping\.weight$"), 1),
    (re.compile(r"\.output\.mapping\.bias$"), 0),
    (re.compile(r"\.query_key_value\.(?:weight|bias)$|\.dense_h_to_4h\.weight$|\.output_layer\.weight$"), 0),
    (re.compile(r"\.self_attention\.dense\.weight$|\.dense_4h_to_h\.weight$"), 1),
    (re.compile(r"\.linear_(?:qkv|fc1)\.weight$|^output_layer\.weight$"), 0),
    (re.compile(r"\.linear_(?:proj|fc2)\.weight$"), 1),
)
"""Name patterns, with the axis along which ranks divide the tensors; of all others every rank has a copy."""


@dataclass(frozen=True)
class SplitModel:
    """The tensors of each rank, and the layout of every tensor."""

    tensors: list[dict[str, LazyTensor]]
    layouts: dict[str, ParallelLayout]


def split_among_ranks(tensors: Mapping[str, LazyTensor], count: int, source: str) -> SplitModel:
    """Splits the tensors among `count` ranks; the reverse of `join_ranks.merge_ranks`.

    Args:
        tensors: MindFormers' name to tensor.
        count: number of ranks.
        source: name of the model's folder, for error messages.

    Raises:
        UsageProblem: a tensor cannot be divided among this number of ranks.
    """
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    layouts: dict[str, ParallelLayout] = {}
    indivisible = []
    for name, tensor in tensors.items():
        axis = next((axis for sign, axis in SPLIT_AXES if sign.search(name)), WHOLE)
        if axis != WHOLE and tensor.shape[axis] % count:
            indivisible.append(f"{name} {list(tensor.shape)}")
            continue
        layouts[name] = ParallelLayout(
            (count,), tuple((0,) if place == axis else () for place in range(len(tensor.shape)))
        )
        parts = [tensor] * count if axis == WHOLE else split(tensor, axis, count)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    if indivisible:
        raise UsageProblem(
            f"{len(indivisible)} tensors of `{source}` cannot be divided among {count} shards: {listing(indivisible)}",
            hint="choose another number for `--shards`",
        )
    return SplitModel(ranks, layouts)
