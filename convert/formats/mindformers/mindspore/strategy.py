"""MindSpore's strategy files: how the ranks of a run divide each tensor.

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
from llmconv.convert.formats.mindformers.mindspore.protobuf import BYTES, Field, ProtobufFile
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, listing
from llmconv.files.safetensors_file import NAME_LIMIT

FOLDER = "strategy"
FILE = re.compile(r".*strategy.*\.(?:ckpt|json)")
STAGE = re.compile(r"^\d+-")
DEVICE_LIMIT = 1 << 20


@dataclass(frozen=True)
class ParallelLayout:
    """How one tensor is divided among ranks.

    Attributes:
        devices: the device matrix.
        axes: for each axis of the tensor, the dimensions of the matrix that divide it, counted from the last one.
        step: number of ranks among which the model itself is divided, if the optimizer divides axis 0 further.
        size: number of parts into which the optimizer divides axis 0; 0 if it does not.
        uneven: whether the parts have different sizes, which is unsupported.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    step: int = 0
    size: int = 0
    uneven: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks in the matrix."""
        return prod(self.devices)

    def parts(self) -> tuple[int, ...]:
        """Number of parts of each axis, by the model's parallelism alone."""
        return tuple(prod(self.devices[-1 - k] for k in axis) for axis in self.axes)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Index, along each axis, of the part that a rank holds, the optimizer's division of axis 0 included."""
        if self.size:
            first, *others = self._within(rank % self.step)
            return (first * self.size + rank // self.step % self.size, *others)
        coordinates = []
        for count in reversed(self.devices):
            rank, part = divmod(rank, count)
            coordinates.append(part)
        indices = []
        for axis in self.axes:
            part = 0
            for k in axis:
                part = part * self.devices[-1 - k] + coordinates[k]
            indices.append(part)
        return tuple(indices)

    def _within(self, rank: int) -> list[int]:
        """Index, along each axis, of a rank's part of the model, counted row by row."""
        indices: list[int] = []
        for count in reversed(self.parts()):
            rank, part = divmod(rank, count)
            indices.insert(0, part)
        return indices

    def grid(self) -> tuple[int, ...]:
        """Number of parts of each axis in total."""
        parts = self.parts()
        return (parts[0] * self.size, *parts[1:]) if self.size and parts else parts

    def is_sound(self) -> bool:
        """Whether the numbers are consistent."""
        inside = all(0 <= k < len(self.devices) for axis in self.axes for k in axis)
        counts = all(count > 0 for count in self.devices) and self.ranks <= DEVICE_LIMIT
        if not inside or not counts or not self.axes:
            return inside and counts
        return not self.size or self.step == prod(self.parts())


@dataclass(frozen=True)
class Strategy:
    """Parameter name to layout, from the strategy file or folder `path`."""

    path: Path
    layouts: Mapping[str, ParallelLayout]


def find_strategy(folder: Path, given: Path | None = None) -> Strategy | None:
    """The layouts of all strategy files in or next to a folder of ranks; None if there are none.

    `given` is a strategy file, of one rank or merged from all stages, or a folder of them, to use instead (InputRefused
    if there is none). Raises MalformedInput if files are unreadable or contradict each other.
    """
    if given and given.is_file():
        return Strategy(given, _layouts([given]))
    places = (given, given / FOLDER) if given else (folder, folder / FOLDER, folder.parent / FOLDER, folder.parent)
    for place in places:
        files = sorted(entry for entry in place.iterdir() if FILE.fullmatch(entry.name)) if place.is_dir() else []
        if files:
            return Strategy(place, _layouts(files))
    if given:
        raise InputRefused(
            f"`{given}` is not a strategy file, and contains none",
            hint="give a `ckpt_strategy_rank_N.ckpt`, or a folder of them",
        )
    return None


def _layouts(files: Sequence[Path]) -> dict[str, ParallelLayout]:
    """The layouts of several files of one run, which must agree."""
    layouts: dict[str, ParallelLayout] = {}
    for file in files:
        for name, layout in read_strategy(file).items():
            if layouts.setdefault(name, layout) != layout:
                raise MalformedInput(
                    f"the strategy files in `{file.parent}` contradict each other for `{name}`",
                    hint="keep those of this run only",
                )
    return layouts


def read_strategy(path: Path) -> dict[str, ParallelLayout]:
    """Parameter name to layout, from a strategy file (`.json` or protobuf); MalformedInput if it is inconsistent."""
    try:
        layouts = _read_json(path) if path.suffix == ".json" else _read_protobuf(path)
        invalid = [name for name, layout in layouts.items() if not layout.is_sound()]
    except (AttributeError, KeyError, TypeError, ValueError, LlmconvError) as error:
        raise MalformedInput(
            f"`{path.name}` is not a strategy file", hint="it should be a `ckpt_strategy_rank_N.ckpt` of the run"
        ) from error
    if invalid:
        raise MalformedInput(
            f"`{path.name}` has invalid layouts for {len(invalid)} tensors: {listing(invalid)}",
            hint="copy the file again",
        )
    found: dict[str, ParallelLayout] = {}
    for name, layout in layouts.items():
        if found.setdefault(STAGE.sub("", name, count=1), layout) != layout:
            raise MalformedInput(
                f"the stages in `{path.name}` contradict each other for `{name}`", hint="merge those of one run"
            )
    return found


def _read_protobuf(path: Path) -> dict[str, ParallelLayout]:
    layouts: dict[str, ParallelLayout] = {}
    with ProtobufFile(path) as source:
        for item in source.fields(0, source.size):
            if item.number == 3 and item.wire == BYTES:
                parts = {field.number: field for field in source.fields(item.start, item.stop)}
                layouts[source.text(parts[1], NAME_LIMIT)] = _layout(source, parts[2])
    return layouts


def _layout(source: ProtobufFile, message: Field) -> ParallelLayout:
    """Numbers: dev_matrix 1, tensor_map 2, param_split_shape 3, indices_offset 4, field 5, step 6, size 7."""
    fields = list(source.fields(message.start, message.stop))
    lists = {number: [_dims(source, field) for field in fields if field.number == number] for number in (1, 2)}
    single = {field.number: field.signed for field in fields if field.number in (5, 6, 7)}
    split = any(_dims(source, field) for field in fields if field.number == 3)
    devices = [size for dims in lists[1] for size in dims]
    maps = lists[2] if len(lists[2]) > 1 else [[k] for dims in lists[2] for k in dims]
    return _make(devices, maps, (single.get(5, 0), single.get(6, 0), single.get(7, 0)), split)


def _dims(source: ProtobufFile, field: Field) -> list[int]:
    return [value for dim in source.fields(field.start, field.stop) if dim.number == 1 for value in source.numbers(dim)]


def _read_json(path: Path) -> dict[str, ParallelLayout]:
    items = read_json(path)["parallel_layout_item"]
    return {name: _json_layout(item) for name, item in items.items()}


def _json_layout(item: Mapping[str, Any]) -> ParallelLayout:
    maps = [axis if isinstance(axis, list) else [axis] for axis in item["tensor_map"]]
    further = (item.get("field", 0), item.get("opt_weight_shard_step", 0), item.get("opt_weight_shard_size", 0))
    return _make(item["dev_matrix"], maps, further, bool(item.get("param_split_shape")))


def _make(devices: Sequence[int], maps: Sequence[Sequence[int]], further: Sequence[int], split: bool) -> ParallelLayout:
    field, step, size = further
    axes = tuple(tuple(k for k in axis if k != -1) for axis in maps)
    nested = any(len(axis) > 1 for axis in axes) and size > 1
    sharded = size > 1
    return ParallelLayout(
        tuple(devices), axes, step if sharded else 0, size if sharded else 0, uneven=field > 0 or split or nested
    )
