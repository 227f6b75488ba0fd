"""MindSpore's parallel strategy: how the ranks of a run have divided each tensor, and the tensors put together.

Layout (mindspore `node_strategy.proto`, `parallel/_parallel_serialization.py`, `parallel/_tensor.py`): a map of
parameter name to device matrix, tensor map and optimizer sharding. `tensor_map[i] = k` divides axis i by
`dev_matrix[-1 - k]`, -1 does not divide it; ranks count through the matrix row by row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.convert.algebra.operations import concat, listing
from llmconv.convert.formats.mindformers.protobuf import BYTES, Field, ProtobufFile
from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import NAME_LIMIT
from llmconv.tensors import LazyTensor

FOLDER = "strategy"
FILE = re.compile(r".*strategy.*\.(?:ckpt|json)")
STAGE = re.compile(r"\d+-")
DEVICE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Layout:
    """How one tensor is divided.

    Attributes:
        devices: the device matrix.
        axes: for each axis of the tensor, the dimensions of the matrix that divide it, counted from its end.
        step: ranks over which the model itself is divided, where the optimizer divides further.
        size: parts into which the optimizer divides axis 0; 0 where it does not.
        uneven: divided in parts of different sizes, which is not read here.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    step: int = 0
    size: int = 0
    uneven: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks that the matrix describes."""
        return prod(self.devices)

    def parts(self) -> tuple[int, ...]:
        """Into how many parts each axis is divided by the model's parallelism."""
        return tuple(prod(self.devices[-1 - k] for k in axis) for axis in self.axes)

    def place(self, rank: int) -> tuple[int, ...]:
        """Which part of each axis a rank holds, the optimizer's division of axis 0 included."""
        if self.size:
            first, *others = self._within(rank % self.step)
            return (first * self.size + rank // self.step % self.size, *others)
        coordinates = []
        for count in reversed(self.devices):
            rank, part = divmod(rank, count)
            coordinates.append(part)
        place = []
        for axis in self.axes:
            part = 0
            for k in axis:
                part = part * self.devices[-1 - k] + coordinates[k]
            place.append(part)
        return tuple(place)

    def _within(self, rank: int) -> list[int]:
        """The parts of a rank among those of the model, counted row by row."""
        place: list[int] = []
        for count in reversed(self.parts()):
            rank, part = divmod(rank, count)
            place.insert(0, part)
        return place

    def grid(self) -> tuple[int, ...]:
        """Into how many parts each axis is divided in all."""
        parts = self.parts()
        return (parts[0] * self.size, *parts[1:]) if self.size and parts else parts

    def is_sound(self) -> bool:
        """Whether the numbers fit together."""
        inside = all(0 <= k < len(self.devices) for axis in self.axes for k in axis)
        counts = all(count > 0 for count in self.devices) and self.ranks <= DEVICE_LIMIT
        if not inside or not counts or not self.axes:
            return inside and counts
        return not self.size or self.step == prod(self.parts())


def find_layouts(folder: Path) -> dict[str, Layout] | None:
    """The layouts of all strategy files in or beside a folder of ranks; None where there is no such file.

    Raises:
        MalformedInput: two files contradict each other, or one cannot be read.
    """
    places = (folder, folder / FOLDER, folder.parent / FOLDER, folder.parent)
    for place in places:
        files = sorted(entry for entry in place.iterdir() if FILE.fullmatch(entry.name)) if place.is_dir() else []
        if files:
            break
    else:
        return None
    layouts: dict[str, Layout] = {}
    for file in files:
        for name, layout in read_strategy(file).items():
            if layouts.setdefault(name, layout) != layout:
                raise MalformedInput(
                    f"the strategy files in `{place}` disagree about `{name}`",
                    hint="keep those of this run only",
                )
    return layouts


def read_strategy(path: Path) -> dict[str, Layout]:
    """Parameter name to layout, from a strategy file (protobuf, or JSON if it is named so).

    Raises:
        MalformedInput: not such a file.
    """
    try:
        layouts = _read_json(path) if path.suffix == ".json" else _read_protobuf(path)
        odd = [name for name, layout in layouts.items() if not layout.is_sound()]
    except (AttributeError, KeyError, TypeError, ValueError, LlmconvError) as error:
        raise MalformedInput(
            f"`{path.name}` is no strategy file", hint="it should be a `ckpt_strategy_rank_N.ckpt` of the run"
        ) from error
    if odd:
        raise MalformedInput(
            f"`{path.name}` gives {len(odd)} tensors an impossible layout: {listing(odd)}", hint="copy the file again"
        )
    return {STAGE.sub("", name, count=1) if STAGE.match(name) else name: layout for name, layout in layouts.items()}


def _read_protobuf(path: Path) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    with ProtobufFile(path) as source:
        for item in source.fields(0, source.size):
            if item.number == 3 and item.wire == BYTES:
                parts = {field.number: field for field in source.fields(item.start, item.stop)}
                layouts[source.text(parts[1], NAME_LIMIT)] = _layout(source, parts[2])
    return layouts


def _layout(source: ProtobufFile, message: Field) -> Layout:
    """ParallelLayouts: dev_matrix 1, tensor_map 2, param_split_shape 3, indices_offset 4, field 5, step 6, size 7."""
    fields = list(source.fields(message.start, message.stop))
    lists = {number: [_dims(source, field) for field in fields if field.number == number] for number in (1, 2)}
    single = {field.number: field.signed for field in fields if field.number in (5, 6, 7)}
    split = any(_dims(source, field) for field in fields if field.number == 3)
    devices = [size for dims in lists[1] for size in dims]
    maps = lists[2] if len(lists[2]) > 1 else [[k] for dims in lists[2] for k in dims]
    return _make(devices, maps, (single.get(5, 0), single.get(6, 0), single.get(7, 0)), split)


def _dims(source: ProtobufFile, field: Field) -> list[int]:
    return [value for dim in source.fields(field.start, field.stop) if dim.number == 1 for value in source.numbers(dim)]


def _read_json(path: Path) -> dict[str, Layout]:
    items = read_json(path)["parallel_layout_item"]
    return {name: _json_layout(item) for name, item in items.items()}


def _json_layout(item: Mapping[str, Any]) -> Layout:
    maps = [axis if isinstance(axis, list) else [axis] for axis in item["tensor_map"]]
    further = (item.get("field", 0), item.get("opt_weight_shard_step", 0), item.get("opt_weight_shard_size", 0))
    return _make(item["dev_matrix"], maps, further, bool(item.get("param_split_shape")))


def _make(devices: Sequence[int], maps: Sequence[Sequence[int]], further: Sequence[int], split: bool) -> Layout:
    field, step, size = further
    axes = tuple(tuple(k for k in axis if k != -1) for axis in maps)
    nested = any(len(axis) > 1 for axis in axes) and size > 1
    sharded = size > 1
    return Layout(
        tuple(devices), axes, step if sharded else 0, size if sharded else 0, uneven=field > 0 or split or nested
    )


def merge_ranks(
    folder: Path, shards: Mapping[int, Mapping[str, LazyTensor]], layouts: Mapping[str, Layout]
) -> dict[str, LazyTensor]:
    """The whole tensors; of equal copies the one of the lowest rank is read.

    Args:
        folder: for error messages.
        shards: rank to its tensors.
        layouts: from `find_layouts`.

    Raises:
        UnsupportedInput: a division that is not read here.
        MalformedInput: a tensor without layout, a missing rank, or parts that do not fit.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in sorted(shards.items()):
        for name in tensors:
            holders.setdefault(name, []).append(rank)
    unknown = [name for name in holders if name not in layouts]
    if unknown:
        raise MalformedInput(
            f"the strategy of `{folder.name}` does not tell how {len(unknown)} tensors are divided: {listing(unknown)}",
            hint="give the strategy files of all stages of this run",
        )
    return {
        name: _merge(folder, name, {rank: shards[rank][name] for rank in ranks}, layouts[name], len(shards))
        for name, ranks in holders.items()
    }


def _merge(folder: Path, name: str, parts: Mapping[int, LazyTensor], layout: Layout, ranks: int) -> LazyTensor:
    """One tensor from the ranks that hold it, which need not be all (`remove_redundancy` keeps one copy of each part).

    Args:
        folder: for error messages.
        name: of the tensor.
        parts: rank to its part; a tensor of several pipeline stages is the first one's.
        layout: of the tensor.
        ranks: how many there are in all.
    """
    if layout.uneven:
        raise _unread(folder, name, "unevenly or in nested parts")
    if ranks % layout.ranks:
        raise MalformedInput(
            f"`{folder.name}` has {ranks} ranks, but its strategy divides `{name}` over {layout.ranks}",
            hint="a rank folder is missing, or the strategy is of another run",
        )
    pieces = {layout.place(rank % layout.ranks): parts[rank] for rank in sorted(parts, reverse=True)}
    if any(len(layout.axes) > len(part.shape) for part in pieces.values()) or len(pieces) != prod(layout.grid()):
        raise MalformedInput(
            f"`{name}` of `{folder.name}` is there in {len(pieces)} of {prod(layout.grid())} parts, or has other axes",
            hint="a rank folder is incomplete, or the strategy is of another run",
        )
    return _assemble(folder, name, pieces, layout.grid())


def _unread(folder: Path, name: str, how: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{name}` of `{folder.name}` is divided {how}, which is not read here",
        hint="merge it first with MindSpore's `transform_checkpoints(src, dst, prefix, src_strategy, None)`",
    )


def _assemble(
    folder: Path, name: str, pieces: Mapping[tuple[int, ...], LazyTensor], grid: tuple[int, ...]
) -> LazyTensor:
    if any(count > 1 for count in grid[2:]):
        raise _unread(folder, name, f"along {len(grid)} axes")
    rows, columns = (*grid[:2], 1, 1)[:2] if grid else (1, 1)
    rest = (0,) * max(0, len(grid) - 2)
    try:
        lines = [
            concat([pieces[(row, column, *rest)[: len(grid)]] for column in range(columns)], 1) for row in range(rows)
        ]
        return concat(lines, 0)
    except ValueError as error:
        raise MalformedInput(
            f"`{name}` of `{folder.name}` does not join: {error}", hint="ranks of different runs are mixed"
        ) from error
