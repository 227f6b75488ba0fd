"""A model split among tensor-parallel ranks of PaddleNLP: the rules of its family, applied backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmconv.convert.algebra.operations import concat, require, split
from llmconv.convert.algebra.row_groups import interleave_rows
from llmconv.convert.formats.paddle.join_ranks import unrolled
from llmconv.convert.formats.paddle.names import TensorRule
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed


def split_among_ranks(
    rules: Sequence[TensorRule], tensors: Mapping[str, LazyTensor], layers: int, count: int, source: str
) -> list[dict[str, LazyTensor]]:
    """Paddle's name to tensor for each of `count` ranks; the reverse of `apply_rules`.

    Args:
        rules: the family's.
        tensors: Hugging Face name to tensor.
        layers: number of layers.
        count: number of ranks.
        source: name of the model's folder, for error messages.

    Raises:
        MalformedInput: missing keys, unexpected keys, or a shape mismatch with the configuration.
    """
    all_rules = unrolled(rules, layers)
    targets = [name for rule in all_rules for name in rule.targets]
    require(targets, tensors, source)
    if unknown := sorted(tensors.keys() - targets):
        raise MalformedInput(
            f"`{source}` has {len(unknown)} unexpected keys: {listing(unknown)}",
            hint="the model has parts that its `config.json` does not declare",
        )
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    for rule in all_rules:
        wholes = _sources(rule, [tensors[name] for name in rule.targets], source)
        for name, whole in zip(rule.sources, wholes, strict=True):
            for rank, part in zip(ranks, _parts(rule, whole, count), strict=True):
                rank[name] = transposed(part) if rule.linear else part
    return ranks


def _sources(rule: TensorRule, targets: Sequence[LazyTensor], source: str) -> list[LazyTensor]:
    """The whole sources of a rule, still [out, in] if it is linear."""
    outputs = 0 if rule.linear else len(rule.shape) - 1
    try:
        if len(targets) > 1:
            found = [concat(targets, outputs) if rule.groups == 1 else interleave_rows(targets, rule.pieces)]
        else:
            found = split(targets[0], outputs, len(rule.sources))
    except ValueError as error:
        raise _mismatch(rule, source, str(error)) from error
    expected = rule.shape[::-1] if rule.linear else rule.shape
    wrong = next((tensor.shape for tensor in found if tensor.shape != expected), None)
    if wrong is not None:
        raise _mismatch(rule, source, f"expected {list(expected)}, got {list(wrong)}")
    return found


def _mismatch(rule: TensorRule, source: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"shape mismatch for `{rule.targets[0]}` of `{source}`: {problem}",
        hint="the config belongs to another model; copy the folder again",
    )


def _parts(rule: TensorRule, whole: LazyTensor, count: int) -> Sequence[LazyTensor]:
    """The part of a source for each rank; split before it is transposed, so that nothing is read twice."""
    if rule.split is None or rule.units % count:
        return [whole] * count
    return split(whole, 1 - rule.split if rule.linear else rule.split, count)
