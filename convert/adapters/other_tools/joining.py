"""Joins the factors of several modules into those of one, for a base that stores them as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llmconv.convert.adapters.other_tools.factors import ForeignPair
from llmconv.convert.algebra.operations import concat
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array, DType, LazyTensor

JoinRows = Callable[[Sequence[LazyTensor]], LazyTensor]


def join_modules(
    factors: Mapping[str, ForeignPair],
    parts: Sequence[str],
    whole: str,
    counts: Sequence[int],
    source: str,
    combine: JoinRows = lambda rows: concat(rows, 0),
) -> dict[str, ForeignPair]:
    """The factors with those of `parts` in each layer joined into one pair.

    A of the joined pair stacks the A of the trained parts; its B is block-diagonal.

    Args:
        factors: by module.
        parts: last components of the modules' paths, in the order of the rows.
        whole: last component of the joined module's path.
        counts: number of rows of each part.
        source: file or folder name, for messages.
        combine: joins the rows of all parts (default: one after the other).

    Raises:
        MalformedInput: a shape mismatch.
        UnsupportedInput: parts of different ranks, or DoRA on some of them only.
    """
    result: dict[str, ForeignPair] = {}
    for module, own in factors.items():
        last = next((part for part in parts if module.endswith(f".{part}")), "")
        root = module.removesuffix(last)
        if not last:
            result[module] = own
        elif f"{root}{whole}" not in result:
            found = [factors.get(f"{root}{part}") for part in parts]
            result[f"{root}{whole}"] = _join(f"{root}{whole}", found, counts, source, combine)
    return result


def _join(
    module: str,
    found: Sequence[ForeignPair | None],
    counts: Sequence[int],
    source: str,
    combine: JoinRows,
) -> ForeignPair:
    trained = [part for part in found if part is not None]
    first = trained[0]
    odd = [part for part, count in zip(found, counts, strict=True) if part and part.b.num_rows != count]
    if odd or any(part.a.shape[1] != first.a.shape[1] for part in trained):
        raise MalformedInput(
            f"the parts of `{module}` in `{source}` have other sizes than the base's, such as B "
            f"{list((odd or trained)[0].b.shape)}",
            hint="the adapter was trained on another model",
        )
    magnitudes = [part.magnitude for part in trained if part.magnitude is not None]
    if len({(part.rank, part.a.dtype, part.b.dtype) for part in trained}) > 1 or len(magnitudes) not in (0, len(found)):
        raise UnsupportedInput(
            f"the parts of `{module}` in `{source}` are of different kinds, and the base has them in one matrix",
            hint="merge it with the program that trained it",
        )
    rank = first.rank * len(trained)
    blocks, column = [], 0
    for part, count in zip(found, counts, strict=True):
        blocks.append(padded_columns(part.b if part else None, column, (count, rank), first.b.dtype))
        column += part.rank if part else 0
    return ForeignPair(
        concat([part.a for part in trained], 0),
        combine(blocks),
        combine(magnitudes) if magnitudes else None,
        len(trained),
    )


def padded_columns(part: LazyTensor | None, column: int, shape: tuple[int, int], dtype: DType) -> LazyTensor:
    """Zeros of `shape` with `part` in the columns from `column` on.

    Args:
        part: [rows, columns]; None for zeros alone.
        column: the first column of `part`.
        shape: of the result.
        dtype: of the result.
    """

    def rows(start: int, stop: int) -> Array:
        whole = np.zeros((stop - start, shape[1]), dtype.numpy)
        if part is not None:
            whole[:, column : column + part.shape[1]] = part.rows(start, stop)
        return whole

    return LazyTensor(dtype, shape, rows)
