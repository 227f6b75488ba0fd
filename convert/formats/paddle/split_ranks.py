"""What each tensor-parallel rank of a PaddleNLP model holds: the rows of its family read backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmconv.convert.algebra.operations import concat, listing, require, split
from llmconv.convert.algebra.row_groups import interleave_rows
from llmconv.convert.algebra.transpose import transposed
from llmconv.convert.formats.paddle.apply_rules import unrolled
from llmconv.convert.formats.paddle.names import TensorRule
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor


def ranks_of(
    rows: Sequence[TensorRule], tensors: Mapping[str, LazyTensor], layers: int, count: int, source: str
) -> list[dict[str, LazyTensor]]:
    """Paddle's name to tensor for each of `count` ranks; the reverse of `rows.place`.

    Args:
        rows: of the family, for what the files shall hold.
        tensors: by Hugging Face name.
        layers: how many there are.
        count: number of ranks.
        source: folder name for error messages.

    Raises:
        MalformedInput: tensors are missing, left over, or of another shape than the configuration declares.
    """
    steps = unrolled(rows, layers)
    targets = [name for row in steps for name in row.targets]
    require(targets, tensors, source)
    if unknown := sorted(tensors.keys() - targets):
        raise MalformedInput(
            f"`{source}` holds {len(unknown)} tensors that no rule places: {listing(unknown)}",
            hint="the model has parts that its `config.json` does not tell of",
        )
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    for row in steps:
        wholes = _sources(row, [tensors[name] for name in row.targets], source)
        for name, whole in zip(row.sources, wholes, strict=True):
            for rank, part in zip(ranks, _parts(row, whole, count), strict=True):
                rank[name] = transposed(part) if row.linear else part
    return ranks


def _sources(row: TensorRule, targets: Sequence[LazyTensor], source: str) -> list[LazyTensor]:
    """The whole sources of a row, still (out, in) where the row is linear."""
    outputs = 0 if row.linear else len(row.shape) - 1
    try:
        if len(targets) > 1:
            found = [concat(targets, outputs) if row.groups == 1 else interleave_rows(targets, row.pieces)]
        else:
            found = split(targets[0], outputs, len(row.sources))
    except ValueError as error:
        raise _misshapen(row, source, str(error)) from error
    wanted = row.shape[::-1] if row.linear else row.shape
    odd = next((tensor.shape for tensor in found if tensor.shape != wanted), None)
    if odd is not None:
        raise _misshapen(row, source, f"it is {list(odd)}, its configuration declares {list(wanted)}")
    return found


def _misshapen(row: TensorRule, source: str, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{row.targets[0]}` of `{source}` has another shape than its `config.json` declares: {problem}",
        hint="the config belongs to another model; copy the folder again",
    )


def _parts(row: TensorRule, whole: LazyTensor, count: int) -> Sequence[LazyTensor]:
    """What each rank holds of a source; cut before it is transposed, so that nothing is read twice."""
    if row.split is None or row.units % count:
        return [whole] * count
    return split(whole, 1 - row.split if row.linear else row.split, count)
