"""What each rank of a model-parallel MindFormers run holds, as its strategy file then says.

Which axis is cut: the `shard` methods in mindformers `models/*`, with `vocab_emb_dp`, by which all have the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmconv.convert.algebra.operations import listing, split
from llmconv.convert.formats.mindformers.ckpt_writer import WHOLE
from llmconv.convert.formats.mindformers.strategy import ParallelLayout
from llmconv.errors import UsageProblem
from llmconv.tensors import LazyTensor

CUT = (
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
"""Names, and the axis along which ranks have parts of them; every rank has all of any other."""


@dataclass(frozen=True)
class SplitModel:
    """The tensors of each rank, and how they divide the whole ones."""

    tensors: list[dict[str, LazyTensor]]
    layouts: dict[str, ParallelLayout]


def ranks_of(tensors: Mapping[str, LazyTensor], count: int, source: str) -> SplitModel:
    """The tensors cut over `count` ranks; the reverse of `strategy.merge_ranks`.

    Raises:
        UsageProblem: a tensor does not divide among so many.
    """
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    layouts: dict[str, ParallelLayout] = {}
    odd = []
    for name, tensor in tensors.items():
        axis = next((axis for sign, axis in CUT if sign.search(name)), WHOLE)
        if axis != WHOLE and tensor.shape[axis] % count:
            odd.append(f"{name} {list(tensor.shape)}")
            continue
        layouts[name] = ParallelLayout(
            (count,), tuple((0,) if place == axis else () for place in range(len(tensor.shape)))
        )
        parts = [tensor] * count if axis == WHOLE else split(tensor, axis, count)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    if odd:
        raise UsageProblem(
            f"{len(odd)} tensors of `{source}` do not divide among {count} shards: {listing(odd)}",
            hint="choose another number for `--shards`",
        )
    return SplitModel(ranks, layouts)
