"""Joins the weights of ZeRO stages 1 to 3 from the flat partitions in the optimizer states of all ranks.

Layout (deepspeedai/DeepSpeed `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/engine.py` `_save_zero_checkpoint`, `checkpoint/constants.py`): stages 1 and 2 flatten a parameter group and
split it into one partition per rank; stage 3 splits every parameter.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.convert.formats.deepspeed.save_folder import ModelStates, Save, refuse
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import Array, DType, LazyTensor


def open_masters(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Master weights by name, in the optimizer's dtype; MalformedInput: a rank is missing, or sizes contradict."""
    groups = states.param_shapes()
    if groups is None:
        raise _mismatch(save, "optimizer states, but no `param_shapes` in its model states")
    ranks = open_ranks(save)
    if ranks[0].stage == 3:
        return _stage_3(save, ranks, {name: shape for group in groups for name, shape in group.items()})
    return _stage_2(save, ranks, groups)


def _stage_2(
    save: Save, ranks: Sequence[RankStates], groups: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, LazyTensor]:
    partitions = [rank.flat_weights() for rank in ranks]
    if any(len(flat_weights) != len(groups) for flat_weights in partitions):
        raise _mismatch(save, f"{len(partitions[0])} groups of flat weights for {len(groups)} groups of parameters")
    masters: dict[str, LazyTensor] = {}
    for number, group in enumerate(groups):
        masters |= _parameters(
            save, group, [flat_weights[number] for flat_weights in partitions], ranks[0].paddings(number, len(group))
        )
    return masters


def _parameters(
    save: Save, group: Mapping[str, tuple[int, ...]], flat_weights: Sequence[LazyTensor], paddings: Sequence[int]
) -> dict[str, LazyTensor]:
    """The parameters of one group, which follow each other, each with its padding.

    The rest pads to a multiple of twice the number of ranks (`zero2_align`); some releases store only a part of it.
    """
    parameters: dict[str, LazyTensor] = {}
    end, numel, alignment = 0, sum(flat.shape[0] for flat in flat_weights), 2 * len(flat_weights)
    start = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        end = start + prod(shape)
        parameters[name] = _parameter(save, slices_of(flat_weights, start, end), shape, flat_weights)
        start = end + padding
    if end > numel or -(-start // alignment) != -(-numel // alignment):
        raise _mismatch(save, f"{numel} elements in a group of parameters that need {start}")
    return parameters


def _stage_3(save: Save, ranks: Sequence[RankStates], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    partitions = [rank.flat_weights() for rank in ranks]
    shares = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    needed = sum(shares.values())
    for rank, flat_weights in enumerate(partitions):
        numel = sum(flat.shape[0] for flat in flat_weights)
        if numel != needed:
            raise _mismatch(save, f"{numel} elements of rank {rank}, whose parameters need {needed}")
    masters: dict[str, LazyTensor] = {}
    start = 0
    for name, shape in shapes.items():
        slices = [part for flat_weights in partitions for part in slices_of(flat_weights, start, start + shares[name])]
        masters[name] = _parameter(save, first_elements(slices, prod(shape)), shape, [*chain(*partitions)])
        start += shares[name]
    return masters


def open_frozen(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Frozen parameters in the model's dtype: whole in stage 2, fragments in stage 3; errors as in `open_masters`."""
    shapes = states.frozen_shapes()
    if not shapes:
        return {}
    files = [states]
    if states.path != save.model:
        check_ranks(save, save.zero_models, len(save.optimizers) or max(save.zero_models) + 1)
        files = [ModelStates(file) for file in save.zero_models.values()]
    fragments = [file.tensors("frozen_param_fragments") for file in files]
    missing = [name for name in shapes if any(name not in rank for rank in fragments)]
    if missing:
        raise _mismatch(save, f"no weights of {len(missing)} frozen parameters: {listing(missing)}")
    return {name: _frozen(save, [rank[name] for rank in fragments], shape) for name, shape in shapes.items()}


def _frozen(save: Save, parts: Sequence[LazyTensor], shape: tuple[int, ...]) -> LazyTensor:
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]
    if any(len(part.shape) != 1 for part in parts):
        raise _mismatch(save, f"frozen weights of shape {list(parts[0].shape)} for a parameter of {list(shape)}")
    return _parameter(
        save, first_elements([FlatSlice(part, 0, part.shape[0]) for part in parts], prod(shape)), shape, parts
    )


def _parameter(
    save: Save, slices: Sequence[FlatSlice], shape: tuple[int, ...], flat_weights: Sequence[LazyTensor]
) -> LazyTensor:
    try:
        return joined(slices, shape, flat_weights[0].dtype)
    except ValueError as error:
        raise _mismatch(save, f"weights that make no parameter of shape {list(shape)}: {error}") from error


def _mismatch(save: Save, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{save.name}` has {problem}",
        hint="files of two saves are mixed, or the weights were kept elsewhere (NVMe); copy the folder again",
    )


@dataclass(frozen=True)
class FlatSlice:
    """Elements `start:stop` of a one-dimensional tensor."""

    flat: LazyTensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def read(self, start: int, stop: int) -> Array:
        """Elements `start:stop` of the slice."""
        return self.flat.rows(self.start + start, self.start + stop)


def slices_of(flats: Sequence[LazyTensor], start: int, stop: int) -> list[FlatSlice]:
    """Elements `start:stop` of the concatenated one-dimensional tensors; fewer if those end before `stop`."""
    slices = []
    for flat in flats:
        low, high = max(start, 0), min(stop, flat.shape[0])
        if low < high:
            slices.append(FlatSlice(flat, low, high))
        start, stop = start - flat.shape[0], stop - flat.shape[0]
    return slices


def first_elements(slices: Sequence[FlatSlice], numel: int) -> list[FlatSlice]:
    """The first `numel` elements of the slices, without padding at the end."""
    kept = []
    for part in slices:
        if numel > 0 and part.numel:
            kept.append(FlatSlice(part.flat, part.start, min(part.stop, part.start + numel)))
        numel -= part.numel
    return kept


def joined(slices: Sequence[FlatSlice], shape: tuple[int, ...], dtype: DType) -> LazyTensor:
    """The slices' elements in row-major order; rows read what they need. ValueError: another dtype or number."""
    ends = list(accumulate((part.numel for part in slices), initial=0))[1:]
    numel, width = ends[-1] if ends else 0, prod(shape[1:])
    if numel != prod(shape):
        raise ValueError(f"expected {prod(shape)} elements, got {numel}")
    if any(part.flat.dtype != dtype for part in slices):
        raise ValueError("the dtypes differ between ranks")

    def load(start: int, stop: int) -> Array:
        first, last = start * width, stop * width
        parts = [np.empty(0, dtype.numpy)]
        for number in range(bisect_right(ends, first), bisect_left(ends, last) + 1 if last > first else 0):
            begin = ends[number] - slices[number].numel
            parts.append(slices[number].read(max(first, begin) - begin, min(last, ends[number]) - begin))
        flat = parts[1] if len(parts) == 2 else np.concatenate(parts)
        return flat.reshape(stop - start, *shape[1:])

    return LazyTensor(dtype, shape, load)


GROUPS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""The key of the flat weights, by stage; stage 1 has that of stage 2."""

OLD_GROUPS = ("local_sub_partitions_of_fp32_groups", "fp32_groups")
"""The keys in releases before 0.3.17."""


class RankStates:
    """The optimizer states of one of `count` ranks; `stage` is 2 (as stage 1 and BF16_Optimizer store theirs) or 3."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_torch_file(path)
        content = self._file.content
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict):
            refuse(path, "contains no `optimizer_state_dict`")
        self._state: Mapping[Any, Any] = state
        self.stage = self._stage()
        self.count = self._count()

    def _stage(self) -> int:
        value = self._state.get("zero_stage")
        if isinstance(value, Stub):  # an enum, stored by its value
            value = value.args[0] if value.args else None
        if value is None and GROUPS[2] in self._state:
            return 2
        if type(value) is not int or value not in (1, 2, 3):
            raise UnsupportedInput(
                f"`{self.path.name}` declares no ZeRO stage from 1 to 3",
                hint="old releases are unsupported; convert it with the `zero_to_fp32.py` next to it, in a sandbox",
            )
        return max(2, value)

    def _count(self) -> int:
        value = self._state.get("partition_count")
        counts = value if isinstance(value, list) and value else [value]
        if any(type(count) is not int or count < 1 for count in counts):
            refuse(self.path, "does not contain the number of ranks (`partition_count`)")
        return int(max(counts))

    def flat_weights(self) -> list[LazyTensor]:
        """Flat weights, one per group (else MalformedInput); UnsupportedInput: a very old layout, or experts."""
        groups = self._state.get(GROUPS[self.stage])
        if groups is None and any(field in self._state for field in OLD_GROUPS):
            raise UnsupportedInput(
                f"`{self.path.name}` was written by a DeepSpeed before 0.3.17, whose layout is unsupported",
                hint="load it with the release that wrote it, and save it with a newer one",
            )
        if self._state.get("ds_zero_partition_groups"):
            raise UnsupportedInput(
                f"`{self.path.name}` divides experts among separate ranks, which is unsupported",
                hint="gather the model with the code that trained it, and save it with `save_pretrained`",
            )
        if not isinstance(groups, list) or not groups or not all(isinstance(group, TensorRef) for group in groups):
            refuse(self.path, f"has no list of tensors in `{GROUPS[self.stage]}`")
        if any(len(group.shape) != 1 for group in groups):
            refuse(self.path, f"has tensors in `{GROUPS[self.stage]}` that are not flat")
        return [self._file.tensor(f"{GROUPS[self.stage]}.{number}", group) for number, group in enumerate(groups)]

    def paddings(self, group: int, parameters: int) -> Sequence[int]:
        """Padding elements after each parameter of a group (`parameter_alignment`, since DeepSpeed 0.19.7)."""
        stored = self._state.get("param_alignment_paddings")
        if stored is None:
            return [0] * parameters
        paddings = stored[group] if isinstance(stored, list) and group < len(stored) else None
        if (
            not isinstance(paddings, list)
            or any(type(gap) is not int or gap < 0 for gap in paddings)
            or len(paddings) != parameters
        ):
            refuse(self.path, f"has paddings that do not match the {parameters} parameters of group {group}")
        return list(paddings)


def open_ranks(save: Save) -> list[RankStates]:
    """The optimizer states of all ranks, in order; MalformedInput if files are missing, extra, or of several runs."""
    ranks = [RankStates(file) for file in save.optimizers.values()]
    check_ranks(save, save.optimizers, ranks[0].count)
    if len({(rank.stage, rank.count) for rank in ranks}) > 1:
        other = next(rank for rank in ranks if (rank.stage, rank.count) != (ranks[0].stage, ranks[0].count))
        refuse(other.path, f"belongs to another run than `{ranks[0].path.name}`: its stage or number of ranks differs")
    return ranks


def check_ranks(save: Save, files: Mapping[int, Path], count: int) -> None:
    """Raises MalformedInput unless there is one file for each of the ranks 0 to `count` - 1, and no other."""
    if len(files) > count:
        raise MalformedInput(
            f"`{save.name}` contains the files of {len(files)} ranks, but was saved by {count}",
            hint="an older save of more ranks lies in the same folder; remove its files",
        )
    for rank in range(count):
        if rank not in files:
            like = next(iter(files.values()), None)
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", like.name) if like else f"that of rank {rank}"
            raise MalformedInput(
                f"`{name}` is missing from `{save.name}`, which {count} ranks saved",
                hint="every rank writes a file on its own machine; copy all of them into one folder",
            )
