"""Applies the rules of a PaddleNLP family to a checkpoint's tensors, over all layers and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmconv.convert.algebra.operations import concat
from llmconv.convert.formats.paddle.names import DROPPED, TensorRule
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed


def apply_rules(
    rules: Sequence[TensorRule], ranks: Sequence[Mapping[str, LazyTensor]], layers: int, source: str
) -> dict[str, LazyTensor]:
    """The converted tensors in Hugging Face's names: embedding, layers by number, final norm, head.

    All tensor-parallel ranks must have the same names. Raises MalformedInput for wrong keys or shapes.
    """
    all_rules = unrolled(rules, min(layers, len(ranks[0])))
    used = {name for rule in all_rules for name in rule.sources}
    missing = [name for rule in all_rules for name in rule.sources if name not in ranks[0]]
    if missing:
        raise MalformedInput(
            f"`{source}` has {len(missing)} missing keys: {listing(missing)}",
            hint="a file of the checkpoint is missing, or its configuration belongs to another model",
        )
    unknown = [name for name in ranks[0] if name not in used and not DROPPED.search(name)]
    if unknown:
        raise MalformedInput(
            f"`{source}` has {len(unknown)} unexpected keys: {listing(unknown)}",
            hint="the configuration belongs to another model, or the model has parts that are unsupported",
        )
    return {name: tensor for rule in all_rules for name, tensor in converted(rule, ranks, source).items()}


def unrolled(rules: Sequence[TensorRule], layers: int) -> list[TensorRule]:
    """The rules of the whole model: those of a layer are repeated for each layer number."""
    layered = [index for index, rule in enumerate(rules) if "{}" in rule.sources[0]]
    first, last = layered[0], layered[-1] + 1
    all_rules = list(rules[:first])
    for layer in range(layers):
        all_rules += [numbered(rule, layer) for rule in rules[first:last]]
    return [*all_rules, *rules[last:]]


def numbered(rule: TensorRule, layer: int) -> TensorRule:
    """The rule with a layer number in its names."""
    sources, targets = (tuple(name.format(layer) for name in names) for names in (rule.sources, rule.targets))
    return replace(rule, sources=sources, targets=targets)


def converted(rule: TensorRule, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, LazyTensor]:
    """The target tensors of one rule (with a layer number in its names) by name; MalformedInput for other shapes."""
    outputs = 0 if rule.linear else len(rule.shape) - 1
    parts = [_oriented(rule, _shards(rule, name, ranks, source)) for name in rule.sources]
    if rule.pieces:
        found = [
            concat([_piece(rule, shard, k, len(parts[0])) for shard in parts[0]], outputs)
            for k in range(len(rule.pieces))
        ]
    else:
        across = 1 - (rule.split or 0) if rule.linear else (rule.split or 0)
        found = [concat(shards, across) for shards in parts]
    if len(found) != len(rule.targets):
        found = [concat(found, outputs)]
    return dict(zip(rule.targets, found, strict=True))


def _count(rule: TensorRule) -> range:
    return range(len(rule.pieces))


def _shards(rule: TensorRule, name: str, ranks: Sequence[Mapping[str, LazyTensor]], source: str) -> list[LazyTensor]:
    """The parts of all ranks, or the first one's if each has a copy of the whole."""
    parts = [rank[name] for rank in ranks]
    shapes = {part.shape for part in parts}
    if shapes == {rule.shape}:
        return parts[:1]
    size = rule.shape[rule.split] if rule.split is not None else 0
    cut = tuple(size // len(parts) if axis == rule.split else extent for axis, extent in enumerate(rule.shape))
    if shapes != {cut} or size % len(parts) or len({part.dtype for part in parts}) != 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        of_ranks = f" in {len(parts)} files" if len(parts) > 1 else ""
        raise MalformedInput(
            f"shape mismatch for `{name}` of `{source}`: expected {list(rule.shape)}, got {shown}{of_ranks}",
            hint="the configuration belongs to another model, or a rank's file is missing or of another run",
        )
    return parts


def _oriented(rule: TensorRule, parts: list[LazyTensor]) -> list[LazyTensor]:
    return [transposed(part) for part in parts] if rule.linear else parts


def _piece(rule: TensorRule, shard: LazyTensor, which: int, shards: int) -> LazyTensor:
    """Part `which` of every group of a fused tensor; `shard` is one of `shards` parts of the tensor."""
    single = rule.groups == 1
    sizes = [size // shards if single else size for size in rule.pieces]
    start, stride = sum(sizes[:which]), sum(sizes)
    groups = 1 if single else rule.groups // shards
    ranges = [(group * stride + start, group * stride + start + sizes[which]) for group in range(groups)]
    return _rows(shard, ranges) if rule.linear or len(rule.shape) == 1 else _columns(shard, ranges)


def _rows(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    return concat([_slice(tensor, start, stop) for start, stop in ranges], 0)


def _slice(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    shape = (stop - start, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda first, last: tensor.rows(start + first, start + last))


def _columns(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    shape = (tensor.shape[0], len(index))
    return LazyTensor(tensor.dtype, shape, lambda first, last: np.ascontiguousarray(tensor.rows(first, last)[:, index]))
