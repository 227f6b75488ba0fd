"""From one lazy mapping `name -> LazyTensor` to another: rename tables, and operations on tensors and their lines.

Nothing here reads data; a result reads when a writer asks for rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from llmconv.errors import LlmconvError, MalformedInput, listing
from llmconv.files.safetensors_file import FileTensor
from llmconv.tensors import BLOCK_BYTES, Array, DType, LazyTensor, cast


@dataclass(frozen=True)
class Lines:
    """A tensor as lines: vectors along its last dim (of four, all but the first), or if `swapped` the one before."""

    shape: tuple[int, ...]
    swapped: bool = False

    @property
    def width(self) -> int:
        """Numbers in a line; 1 for a vector, each of whose numbers is one."""
        return prod(self.shape) // max(1, self.count)

    @property
    def count(self) -> int:
        return prod(self._outer) if self._outer else 1

    @property
    def _outer(self) -> tuple[int, ...]:
        if self.swapped:
            return (*self.shape[:-2], self.shape[-1])
        return self.shape[:1] if len(self.shape) == 1 or len(self.shape) > 3 else self.shape[:-1]

    @property
    def _whole(self) -> bool:
        """Whether every row of the tensor has a part of every line."""
        return self.swapped and len(self.shape) == 2

    def of_rows(self, start: int, stop: int) -> tuple[int, int]:
        """The lines that rows `start:stop` of the tensor consist of, or have parts of."""
        per = prod(self._outer[1:])
        return (0, self.count) if self._whole else (start * per, stop * per)

    def as_rows(self, lines: Array, start: int, stop: int) -> Array:
        """Rows `start:stop` of the tensor from the lines [lines, width] of `of_rows`."""
        if self._whole:
            return np.ascontiguousarray(lines.T[start:stop])
        if self.swapped:
            stacked = lines.reshape(stop - start, self.shape[-1], self.shape[-2])
            return np.ascontiguousarray(stacked.swapaxes(1, 2))
        return lines.reshape(stop - start, *self.shape[1:])

    def read(self, tensor: LazyTensor, wanted: Array) -> Array:
        """Lines [lines, width] by index of a tensor of this shape; reads all rows from the first to the last."""
        low, high = int(wanted.min()), int(wanted.max()) + 1
        if self._whole:
            return np.ascontiguousarray(tensor.read().T[wanted])
        per = prod(self._outer[1:])
        first, last = low // per, -(-high // per)
        rows = tensor.rows(first, last)
        rows = rows.swapaxes(1, 2) if self.swapped else rows
        found: Array = rows.reshape(-1, self.width)[wanted - first * per]
        return found


@dataclass(frozen=True)
class Origin:
    """Where each line comes from: `owner` (position in `sources`, names) and `line` (index there), by line."""

    lines: Lines
    sources: tuple[str, ...]
    owner: Any
    line: Any


def gathered(origin: Origin, sources: Sequence[LazyTensor], layouts: Sequence[Lines], dtype: DType) -> LazyTensor:
    """The lazy tensor whose lines come from `sources` (in the order of `origin.sources`), each seen as in `layouts`."""
    typed = [cast(source, dtype) for source in sources]

    def load(start: int, stop: int) -> Array:
        first, last = origin.lines.of_rows(start, stop)
        owner, line = origin.owner[first:last], origin.line[first:last]
        result = np.empty((last - first, origin.lines.width), dtype.numpy)
        for number in np.unique(owner):
            mine = owner == number
            result[mine] = layouts[number].read(typed[number], line[mine])
        return origin.lines.as_rows(result, start, stop)

    return LazyTensor(dtype, origin.lines.shape, load, lambda other: gathered(origin, sources, layouts, other))


def rename(names: Iterable[str], table: Mapping[str, str | None], source: str) -> dict[str, str]:
    """Target name to source name, for every name that the table does not drop.

    `table` maps source to target name, with `{}` for a number; None drops the tensor. Raises MalformedInput for
    unexpected keys, which no row matches, or duplicate keys: two names with one target.
    """
    renamed: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        row, number = find_row(name, table)
        if row is None:
            unknown.append(name)
        elif (target := table[row]) is not None:
            target = target.format(number)
            if target in renamed:
                raise MalformedInput(
                    f"`{source}` holds `{renamed[target]}` and `{name}`, which are both `{target}`",
                    hint="two checkpoints are mixed in one file; save the model alone",
                )
            renamed[target] = name
    if unknown:
        raise MalformedInput(
            f"`{source}` contains {len(unknown)} tensors that no rule places; unexpected keys: {listing(unknown)}",
            hint="the model has parts that this format does not know; convert it with the code that wrote it",
        )
    return renamed


def renamed(tensors: Mapping[str, LazyTensor], table: Mapping[str, str | None], source: str) -> dict[str, LazyTensor]:
    """The tensors under their names in `table`; errors as in `rename`."""
    return {target: tensors[name] for target, name in rename(tensors, table, source).items()}


def find_row(name: str, table: Mapping[str, str | None]) -> tuple[str | None, str]:
    """The key of `table` that a name has, with `{}` for a number, and that number; None if there is none."""
    if name in table:
        return name, ""
    template = re.sub(LAYER_NUMBER, "{}", name, count=1)
    number = re.search(LAYER_NUMBER, name)
    return (template, number[0]) if number and template in table else (None, "")


def inverted(table: Mapping[str, str | None]) -> dict[str, str | None]:
    """The table of the way back, to the first of several names; what was dropped stays away."""
    back: dict[str, str | None] = {}
    for source, target in table.items():
        if target is not None:
            back.setdefault(target, source)
    return back


@contextmanager
def fitting(what: str, hint: str = "the configuration belongs to another model") -> Iterator[None]:
    """Operations on tensors that may not fit together: their ValueError becomes a MalformedInput that `what` begins."""
    try:
        yield
    except ValueError as error:
        raise MalformedInput(f"{what}: {error}", hint=hint) from error


def require(targets: Iterable[str], produced: Mapping[str, Any], source: str) -> None:
    """Raises MalformedInput, which lists the missing keys, unless `produced` has every name of `targets`."""
    if missing := [name for name in targets if name not in produced]:
        raise MalformedInput(
            f"`{source}` lacks {len(missing)} tensors of the model; missing keys: {listing(missing)}",
            hint="the checkpoint is incomplete, or its configuration is of another model",
        )


LAYER_NUMBER = r"(?<=\.)\d{1,9}(?=\.)"
"""A longer number is not a layer's, and may be longer than Python converts to an integer."""


def first_missing(numbers: Collection[int], count: int) -> int | None:
    """The lowest of 0 … `count` - 1 that is not among `numbers`, which a file's name may make as large as it likes."""
    return next((number for number in range(min(count, len(numbers) + 1)) if number not in numbers), None)


def concat(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """The parts one after the other along `dim` (0 or 1); ValueError if other sizes or dtypes differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    rest = {(part.dtype, part.shape[:dim] + part.shape[dim + 1 :]) for part in parts}
    if len(rest) != 1 or len(first.shape) <= dim:
        raise ValueError(f"cannot join {[part.shape for part in parts]} along dim {dim}")
    shape = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
    if dim == 0:
        return LazyTensor(first.dtype, shape, lambda start, stop: _stacked_rows(parts, start, stop))
    return LazyTensor(
        first.dtype, shape, lambda start, stop: np.concatenate([part.rows(start, stop) for part in parts], axis=1)
    )


def _stacked_rows(parts: Sequence[LazyTensor], start: int, stop: int) -> Array:
    pieces = []
    for part in parts:
        low, high = max(start, 0), min(stop, part.num_rows)
        if low < high:
            pieces.append(part.rows(low, high))
        start, stop = start - part.num_rows, stop - part.num_rows
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def slice_rows(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    shape = (stop - start, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda first, last: tensor.rows(start + first, start + last))


def slice_columns(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Columns `start:stop` of `tensor`, a matrix; whole rows are read, a block at a time."""
    rows = max(1, BLOCK_BYTES * tensor.num_rows // max(1, tensor.nbytes))

    def load(first: int, last: int) -> Array:
        columns = np.empty((last - first, stop - start), tensor.dtype.numpy)
        for row in range(first, last, rows):
            block = tensor.rows(row, min(row + rows, last))
            columns[row - first : row - first + len(block)] = block[:, start:stop]
        return columns

    return LazyTensor(tensor.dtype, (tensor.shape[0], stop - start), load)


def split(tensor: LazyTensor, dim: int, count: int) -> list[LazyTensor]:
    """`count` equal parts along `dim` (0 or 1), the reverse of `concat`; ValueError if they would not be equal."""
    if count <= 1:
        return [tensor] * count
    if len(tensor.shape) <= dim or tensor.shape[dim] % count:
        raise ValueError(f"{list(tensor.shape)} has no {count} equal parts along dim {dim}")
    part, size = (slice_columns if dim else slice_rows), tensor.shape[dim] // count
    return [part(tensor, number * size, (number + 1) * size) for number in range(count)]


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """The elements of `tensor`, row after row, in another shape of as many; reads the rows that hold those wanted."""
    if isinstance(tensor, FileTensor):
        return FileTensor(tensor.path, tensor.offset, tensor.dtype, shape, tensor.record)
    if not prod(shape):
        return zeros(tensor.dtype, shape)
    width, own = prod(shape[1:]), prod(tensor.shape[1:])

    def load(start: int, stop: int) -> Array:
        first, last = start * width, stop * width
        low = first // own
        rows = tensor.rows(low, -(-last // own)).reshape(-1)[first - low * own : last - low * own]
        return np.ascontiguousarray(rows.reshape(stop - start, *shape[1:]))

    return tensor if tensor.shape == shape else LazyTensor(tensor.dtype, shape, load)


def permute_rows(tensor: LazyTensor, order: Sequence[int]) -> LazyTensor:
    """Row `k` of every group of `len(order)` rows becomes the old row `order[k]`; ValueError if groups do not fit."""
    group, index = len(order), np.asarray(order)
    if tensor.num_rows % group:
        raise ValueError(f"{tensor.num_rows} rows do not divide into groups of {group}")

    def load(start: int, stop: int) -> Array:
        low, high = start // group * group, -(-stop // group) * group
        rows = tensor.rows(low, high)
        grouped = rows.reshape(-1, group, *rows.shape[1:])
        return np.ascontiguousarray(grouped[:, index].reshape(rows.shape)[start - low : stop - low])

    return LazyTensor(tensor.dtype, tensor.shape, load)


def reordered(tensors: Mapping[str, LazyTensor], sign: re.Pattern[str], order: Sequence[int]) -> dict[str, LazyTensor]:
    """The tensors, with `permute_rows` for those whose names `sign` finds; ValueError if groups do not fit."""
    return {name: permute_rows(one, order) if sign.search(name) else one for name, one in tensors.items()}


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes `order`: `permute_rows` with the one, then with the other, changes nothing."""
    return tuple(int(place) for place in np.argsort(order))


HEAD_LIMIT = 1 << 16  # maximum number of rows of a head; real ones have a few hundred at most


@lru_cache(maxsize=8)
def rope_order(head_dim: int) -> tuple[int, ...]:
    """For each row of a head in Hugging Face's order, its row in Meta's; ValueError for an impossible size.

    Meta rotates neighbors (2i, 2i + 1), Hugging Face rotates halves (i, i + D/2): row `j * D/2 + i` is row `2i + j`
    (transformers `convert_llama_weights_to_hf.py`, `permute`). Four rows: 0, 2, 1, 3.
    """
    if not 2 <= head_dim <= HEAD_LIMIT:
        raise ValueError(f"a head has {head_dim} rows")
    return tuple(2 * i + j for j in range(2) for i in range(head_dim // 2))


def equal(one: LazyTensor, other: LazyTensor, *, sampled: bool = False) -> bool:
    """Whether dtype, shape and bits are equal, block by block; with `sampled` the first block alone (`inspect`)."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    blocks = islice(one.blocks(), 1 if sampled else None)
    return all(np.array_equal(_bits(one.rows(*block)), _bits(other.rows(*block))) for block in blocks)


def all_zero(tensor: LazyTensor) -> bool:
    """Whether all elements are zero; reads the tensor block by block."""
    return not any(tensor.rows(*block).any() for block in tensor.blocks())


def _bits(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def replicated(copies: Sequence[LazyTensor], difference: LlmconvError) -> LazyTensor:
    """One of several tensors that must be equal; `difference` is raised while reading if they are not."""
    if len(copies) == 1:
        return copies[0]

    def load(start: int, stop: int) -> Array:
        rows = copies[0].rows(start, stop)
        for copy in copies[1:]:
            if not np.array_equal(_bits(rows), _bits(copy.rows(start, stop))):
                raise difference
        return rows

    return LazyTensor(copies[0].dtype, copies[0].shape, load)


def pick_rows(tensor: LazyTensor, group: int, first: int, count: int) -> LazyTensor:
    """Rows `first:first + count` of every group of `group` rows, in order; ValueError if groups do not fit."""
    if group <= 0 or count <= 0 or tensor.num_rows % group or not 0 <= first <= group - count:
        raise ValueError(f"{tensor.num_rows} rows have no rows {first}:{first + count} in groups of {group}")
    row_bytes = max(1, tensor.nbytes // max(1, tensor.num_rows))

    def load(start: int, stop: int) -> Array:
        low, high = start // count, -(-stop // count)
        if group * row_bytes < BLOCK_BYTES:
            rows = tensor.rows(low * group, high * group)
            picked = rows.reshape(high - low, group, *rows.shape[1:])[:, first : first + count]
            return np.ascontiguousarray(picked.reshape(-1, *rows.shape[1:])[start - low * count : stop - low * count])
        pieces = []
        for number in range(low, high):
            begin, end = max(start - number * count, 0), min(stop - number * count, count)
            pieces.append(tensor.rows(number * group + first + begin, number * group + first + end))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return LazyTensor(tensor.dtype, (tensor.num_rows // group * count, *tensor.shape[1:]), load)


def deal_rows(tensor: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """The parts that `interleave_rows` joined, `counts` rows of each in turn; ValueError if groups do not fit."""
    return [pick_rows(tensor, sum(counts), sum(counts[:part]), count) for part, count in enumerate(counts)]


def zeros(dtype: DType, shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(dtype, shape, lambda start, stop: np.zeros((stop - start, *shape[1:]), dtype.numpy))


def interleave_rows(parts: Sequence[LazyTensor], counts: Sequence[int]) -> LazyTensor:
    """The next `counts[k]` rows of each part in turn, the reverse of `deal_rows`; ValueError if parts do not match."""
    kinds = {(part.dtype, part.shape[1:], part.num_rows / count) for part, count in zip(parts, counts, strict=True)}
    group = sum(counts)
    groups = parts[0].num_rows // counts[0]
    if len(kinds) != 1 or groups * counts[0] != parts[0].num_rows:
        raise ValueError(f"cannot interleave {[part.shape for part in parts]} by {list(counts)} rows")

    def load(start: int, stop: int) -> Array:
        low, high = start // group, -(-stop // group)
        pieces = [
            part.rows(low * count, high * count).reshape(high - low, count, *part.shape[1:])
            for part, count in zip(parts, counts, strict=True)
        ]
        rows = np.concatenate(pieces, axis=1).reshape((high - low) * group, *parts[0].shape[1:])
        return np.ascontiguousarray(rows[start - low * group : stop - low * group])

    return LazyTensor(parts[0].dtype, (groups * group, *parts[0].shape[1:]), load)


def fuse(
    tensors: Mapping[str, LazyTensor],
    parts: Sequence[str],
    whole: str,
    join: Callable[[Sequence[LazyTensor]], LazyTensor] = lambda parts: concat(parts, 0),
    counts: Sequence[int] = (),
) -> dict[str, LazyTensor]:
    """The tensors with the weights and biases of the modules `parts` of each layer joined as those of `whole`.

    `counts` are the rows of each part, up to a common factor. Without them gate and up have equally many, keys as many
    as values, and queries a multiple of that. Raises ValueError if one of the parts is missing, or they do not fit
    together: the whole has the right shape with a row of one part in another, too.
    """
    ends = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    fused = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for name in tensors:
        root, _, kind = name.rpartition(f".{parts[0]}.")
        if root and kind in ("weight", "bias"):
            found = [tensors.get(f"{root}.{part}.{kind}") for part in parts]
            present = [tensor for tensor in found if tensor is not None]
            if len(present) < len(parts):
                raise ValueError(f"`{name}` is present without one of {', '.join(parts[1:])}")
            rows = [tensor.num_rows for tensor in present]
            queries = rows[0] // max(1, rows[-1]) if len(rows) > 2 else 1
            wanted = counts or (queries, *[1] * (len(rows) - 1))
            if any(one * wanted[-1] != rows[-1] * count for one, count in zip(rows, wanted, strict=True)):
                raise ValueError(f"{', '.join(parts)} of `{root}` have {', '.join(map(str, rows))} rows")
            fused[f"{root}.{whole}.{kind}"] = join(present)
    return fused
