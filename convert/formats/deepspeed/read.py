"""Reads all weights of one save: those that `zero_to_fp32` returns, and those that only the module has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmconv.convert.formats.deepspeed.model_states import ModelStates
from llmconv.convert.formats.deepspeed.save_folder import Save
from llmconv.convert.formats.deepspeed.universal import open_universal
from llmconv.convert.formats.deepspeed.zero_stages import open_frozen, open_masters
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.tensors import LazyTensor

HALF_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class SavedModel:
    """The weights of a save.

    Attributes:
        tensors: the module's name to tensor.
        version: such as `deepspeed 0.19.8`.
        shards: number of files with weights.
        warnings, dropped: as in Checkpoint.
    """

    tensors: dict[str, LazyTensor]
    version: str
    shards: int
    warnings: tuple[str, ...]
    dropped: tuple[str, ...]


def open_model(save: Save) -> SavedModel:
    """Opens the files with the weights; no tensor is read.

    Raises:
        InputRefused: files are missing, malformed, or of an unsupported kind.
    """
    states = ModelStates(_states_path(save))
    tensors = states.buffers()
    masters = _masters(save, states)
    tensors |= open_frozen(save, states) | masters
    for name, stored in states.shared().items():
        if stored in tensors and name not in masters:
            tensors[name] = tensors[stored]
    rest = _rest(save, states, tensors)
    version = f"deepspeed {states.version}".strip()
    shards = len(masters) if save.universal else len(save.optimizers) or 1
    dropped = ("the optimizer's moments",) if masters else ()
    return SavedModel(
        tensors | rest, version, shards, _warnings(save, states, masters, rest), dropped + _dropped(states, rest)
    )


def _states_path(save: Save) -> Path:
    if save.model and save.zero_models:
        raise MalformedInput(
            f"`{save.name}` contains model states of ZeRO-3 and of a lower stage",
            hint="two saves were written into one folder; keep the files of one of them",
        )
    path = save.model or save.zero_models.get(0)
    if path is None:
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if save.zero_models else "mp_rank_00_model_states.pt"
        raise MalformedInput(
            f"`{save.name}` has no model states: `{name}` is missing",
            hint="the first rank writes it; copy it too, it contains names and shapes",
        )
    return path


def _masters(save: Save, states: ModelStates) -> dict[str, LazyTensor]:
    if save.universal:
        shapes = states.param_shapes() or []
        return open_universal(save.universal, {name: shape for group in shapes for name, shape in group.items()})
    if save.optimizers:
        return open_masters(save, states)
    if save.model is None:
        raise InputRefused(
            f"`{save.name}` was saved by ZeRO-3 and lacks the optimizer states, which contain the weights",
            hint="copy the files `*_optim_states.pt` of all ranks into it",
        )
    return {}


def _rest(save: Save, states: ModelStates, known: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Tensors that only the module has: all in stage 0, the frozen ones in stage 1.

    Raises:
        MalformedInput: a tensor is only an empty placeholder.
        UnsupportedInput: there is an object that is not a plain tensor.
    """
    objects = [name for name in states.objects("module") if name not in known and not name.endswith("_extra_state")]
    if objects:
        raise UnsupportedInput(
            f"`{save.name}` holds {len(objects)} objects that are not plain tensors: {listing(objects)}",
            hint="save a full (unsharded, unquantized) state dict",
        )
    rest = {name: tensor for name, tensor in states.tensors("module").items() if name not in known}
    empty = [name for name, tensor in rest.items() if not prod(tensor.shape)]
    if empty:
        raise MalformedInput(
            f"missing keys: `{save.name}` has no weights for {len(empty)} parameters: {listing(empty)}",
            hint="they were frozen and left out (`exclude_frozen_parameters`); take them from the base model",
        )
    if not rest and not known:
        raise MalformedInput(f"`{states.path.name}` contains no weights", hint="it was saved without the module")
    return rest


def _warnings(
    save: Save, states: ModelStates, masters: Mapping[str, LazyTensor], rest: Mapping[str, LazyTensor]
) -> tuple[str, ...]:
    warnings = []
    half = _half_dtype(states)
    if masters and half:
        warnings.append(f"these are the float32 master weights; `--dtype {half}` converts to the dtype of the run")
    if not masters and states.param_shapes() is not None:
        warnings.append(f"`{save.name}` has no optimizer states: the weights are the module's, not the master weights")
    return tuple(warnings)


def _half_dtype(states: ModelStates) -> str:
    """The 16-bit dtype of the training run, or empty."""
    settings = states.content.get("ds_config")
    for half, field in zip(HALF_DTYPES, ("bf16", "fp16"), strict=True):
        section = settings.get(field) if isinstance(settings, dict) else None
        if isinstance(section, dict) and section.get("enabled") is True:
            return half
    return next(
        (tensor.dtype.name for tensor in states.tensors("module").values() if tensor.dtype.name in HALF_DTYPES), ""
    )


def _dropped(states: ModelStates, rest: Mapping[str, LazyTensor]) -> tuple[str, ...]:
    copies = [name for name, tensor in states.tensors("module").items() if prod(tensor.shape) and name not in rest]
    parts = []
    if copies:
        parts.append("the module's copies of the master weights")
    if isinstance(states.content.get("optimizer"), dict):
        parts.append("the optimizer's state")
    if states.content.get("lr_scheduler") is not None:
        parts.append("the schedule of the learning rate")
    return tuple(parts)
