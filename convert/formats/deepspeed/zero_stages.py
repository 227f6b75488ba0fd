"""The weights of ZeRO stages 1 to 3, put together from the flat partitions of all ranks.

Layout (deepspeedai/DeepSpeed `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`):
stages 1 and 2 flatten a parameter group and cut it into one partition per rank; stage 3 cuts every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod

from llmconv.convert.algebra.operations import listing
from llmconv.convert.formats.deepspeed.flat_tensor import Piece, cut, first_elements, shaped
from llmconv.convert.formats.deepspeed.model_states import ModelStates, Shape
from llmconv.convert.formats.deepspeed.optimizer_states import Rank, check_ranks, open_ranks
from llmconv.convert.formats.deepspeed.save_folder import Save
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor


def open_masters(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Name to master weight of every parameter that was trained, in the dtype in which the optimizer kept it.

    Raises:
        MalformedInput: a rank's file is missing, or the sizes do not add up.
    """
    groups = states.param_shapes()
    if groups is None:
        raise _does_not_fit(save, "optimizer states, but no `param_shapes` in its model states")
    ranks = open_ranks(save)
    if ranks[0].stage == 3:
        return _stage_3(save, ranks, {name: shape for group in groups for name, shape in group.items()})
    return _stage_2(save, ranks, groups)


def _stage_2(save: Save, ranks: Sequence[Rank], groups: Sequence[Mapping[str, Shape]]) -> dict[str, LazyTensor]:
    partitions = [rank.flats() for rank in ranks]
    if any(len(flats) != len(groups) for flats in partitions):
        raise _does_not_fit(save, f"{len(partitions[0])} groups of flat weights for {len(groups)} groups of parameters")
    masters: dict[str, LazyTensor] = {}
    for number, group in enumerate(groups):
        masters |= _place(save, group, [flats[number] for flats in partitions], ranks[0].gaps(number, len(group)))
    return masters


def _place(
    save: Save, group: Mapping[str, Shape], flats: Sequence[LazyTensor], gaps: Sequence[int]
) -> dict[str, LazyTensor]:
    """The parameters of one group, one after the other, each followed by its gap.

    What is left at the end is padding, of which nothing is known but that it does not reach the next multiple of
    twice the ranks (`zero2_align`): some releases store it, some cut part of it off.
    """
    placed: dict[str, LazyTensor] = {}
    end, there, alignment = 0, sum(flat.shape[0] for flat in flats), 2 * len(flats)
    start = 0
    for (name, shape), gap in zip(group.items(), gaps, strict=True):
        end = start + prod(shape)
        placed[name] = _shaped(save, cut(flats, start, end), shape, flats)
        start = end + gap
    if end > there or -(-start // alignment) != -(-there // alignment):
        raise _does_not_fit(save, f"{there} elements in a group of parameters that need {start}")
    return placed


def _stage_3(save: Save, ranks: Sequence[Rank], shapes: Mapping[str, Shape]) -> dict[str, LazyTensor]:
    partitions = [rank.flats() for rank in ranks]
    shares = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    needed = sum(shares.values())
    for rank, flats in enumerate(partitions):
        there = sum(flat.shape[0] for flat in flats)
        if there != needed:
            raise _does_not_fit(save, f"{there} elements of rank {rank}, whose parameters need {needed}")
    masters: dict[str, LazyTensor] = {}
    start = 0
    for name, shape in shapes.items():
        pieces = [piece for flats in partitions for piece in cut(flats, start, start + shares[name])]
        masters[name] = _shaped(save, first_elements(pieces, prod(shape)), shape, [*chain(*partitions)])
        start += shares[name]
    return masters


def open_frozen(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """The parameters that were not trained, in the dtype of the model: whole in stage 2, fragments in stage 3.

    Raises:
        MalformedInput: a rank's file is missing, or the sizes do not add up.
    """
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
        raise _does_not_fit(save, f"no weights of {len(missing)} frozen parameters: {listing(missing)}")
    return {name: _joined(save, [rank[name] for rank in fragments], shape) for name, shape in shapes.items()}


def _joined(save: Save, parts: Sequence[LazyTensor], shape: Shape) -> LazyTensor:
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]
    if any(len(part.shape) != 1 for part in parts):
        raise _does_not_fit(save, f"frozen weights of shape {list(parts[0].shape)} for a parameter of {list(shape)}")
    return _shaped(save, first_elements([Piece(part, 0, part.shape[0]) for part in parts], prod(shape)), shape, parts)


def _shaped(save: Save, pieces: Sequence[Piece], shape: Shape, flats: Sequence[LazyTensor]) -> LazyTensor:
    try:
        return shaped(pieces, shape, flats[0].dtype)
    except ValueError as error:
        raise _does_not_fit(save, f"weights that make no parameter of shape {list(shape)}: {error}") from error


def _does_not_fit(save: Save, problem: str) -> MalformedInput:
    return MalformedInput(
        f"`{save.name}` has {problem}",
        hint="files of two saves are mixed, or the weights were kept elsewhere (NVMe); copy the folder again",
    )
