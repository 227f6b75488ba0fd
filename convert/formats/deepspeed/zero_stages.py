"""Joins the weights of ZeRO stages 1 to 3 from the flat partitions of all ranks.

Layout (deepspeedai/DeepSpeed `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`):
stages 1 and 2 flatten a parameter group and split it into one partition per rank; stage 3 splits every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod

from llmconv.convert.formats.deepspeed.flat_tensor import FlatSlice, first_elements, joined, slices_of
from llmconv.convert.formats.deepspeed.model_states import ModelStates
from llmconv.convert.formats.deepspeed.optimizer_states import RankStates, check_ranks, open_ranks
from llmconv.convert.formats.deepspeed.save_folder import Save
from llmconv.errors import MalformedInput, listing
from llmconv.tensors import LazyTensor


def open_masters(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    """Name to master weight of every trained parameter, in the optimizer's dtype.

    Raises:
        MalformedInput: a rank's file is missing, or the sizes contradict each other.
    """
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

    The rest is padding up to the next multiple of twice the number of ranks (`zero2_align`); some releases store it
    only in part.
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
    """The frozen parameters, in the dtype of the model: stored whole in stage 2, as fragments in stage 3.

    Raises:
        MalformedInput: a rank's file is missing, or the sizes contradict each other.
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
