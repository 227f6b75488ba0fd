"""DeepSpeed: `latest` and a folder such as `global_step500`, as DeepSpeed, transformers and Lightning save it.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `utils/zero_to_fp32.py`): ZeRO stages 0 to 3, and universal
checkpoints. The names are those of the trained module; transformers' Trainer saves `config.json` next to it.

Universal checkpoints (`checkpoint/ds_to_universal.py`, `merge_tp_slices`): `zero/NAME/fp32.pt` for each parameter, a
dict with the whole float32 master weight as `param`; next to it the optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, INDEX, SINGLE, Checkpoint, read_json
from llmconv.convert.assembly import OPTIONS, opened_with_adapter, side_files_of
from llmconv.convert.formats import Format
from llmconv.convert.formats.deepspeed.save_folder import (
    FlatSlice,
    ModelStates,
    Save,
    is_deepspeed,
    joined,
    open_frozen,
    open_masters,
    open_save,
    refuse,
)
from llmconv.convert.models.completeness import WRAPPERS, as_loaded, select
from llmconv.convert.models.config_file import OPTION, causal_lm_config
from llmconv.convert.models.transformers_source import HEADS
from llmconv.convert.state_dicts.files import Sign
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    save = open_save(path)
    model = open_model(save)
    given = {name: value for name, value in config.items() if name not in OPTIONS}
    adapted = any("lora_" in name for name in model.tensors)
    if adapted and not given.keys() < config.keys() and not any(".base_layer." in name for name in model.tensors):
        raise _without_base(save.home)
    tensors = select(model.tensors, lambda _, tensor: tensor, save.name, []) if adapted else model.tensors
    return opened_with_adapter(tensors, save.home, config, partial(_open_model, path, save, model, given, tokenizer))


def _open_model(
    path: Path,
    save: Save,
    model: SavedModel,
    given: Mapping[str, Any],
    tokenizer: Path | None,
    stored_tensors: dict[str, LazyTensor],
    base: Checkpoint | None,
) -> Checkpoint:
    """The model of `stored_tensors`, with the configuration of the save, or that of `base` if it has none."""
    warnings = [*model.warnings]
    stored = read_json(save.home / "config.json") if (save.home / "config.json").is_file() else {}
    side_files = {**(base.side_files if base else {}), **side_files_of(save.home, tokenizer)}
    tensors, settings = stored_tensors, dict[str, Any]()
    if stored_tensors:
        settings = causal_lm_config(stored or (base.config if base else {}), given, path.name, warnings)
        prefix, own = _prefix(stored_tensors), AUTO_MAP in settings
        tensors = select(stored_tensors, lambda _, tensor: tensor, save.name, warnings, prefix=prefix, buffers=own)
        settings = settings if own else as_loaded(tensors, settings)
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in side_files):
        warnings.append(f"`{path.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    if any((save.home / name).is_file() for name in (SINGLE, INDEX)):
        warnings.append(
            f"`{save.home.name}` also contains safetensors: it already is a Hugging Face folder, without master weights"
        )
    return Checkpoint(
        path, FORMAT.name, tensors, settings, side_files, tuple(warnings), model.version, model.shards, model.dropped
    )


def _without_base(home: Path) -> UnsupportedInput:
    saved = (home / ADAPTER_CONFIG).is_file()
    return UnsupportedInput(
        f"`{home.name}` belongs to a PEFT (LoRA) run; its adapter is not part of a plain model",
        hint=f"use `llmconv merge-lora BASE {home if saved else 'ADAPTER'} -o OUT`"
        + ("" if saved else " after saving the adapter with PEFT"),
    )


def _prefix(tensors: Mapping[str, LazyTensor]) -> str:
    """The prefix that a trainer gave every name, such as `_forward_module.`: that of the output head's name."""
    names = [WRAPPERS.sub("", name) for name in tensors]
    return next((name.removesuffix(head) for name in names for head in HEADS if name.endswith(f".{head}")), "")


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO: a folder with `latest` and one such as `global_step500`",
    detect=is_deepspeed,
    sign=Sign(keys=("ds_version", "ds_config", "param_shapes")),
    open=_open,
    options=(*OPTIONS, OPTION),
    peek=lambda path: open_model(open_save(path)).tensors,
    covers="ZeRO stages 0 to 3 of any number of ranks, frozen and tied weights, universal checkpoints; "
    "LoRA runs, merged or kept apart; float32 master weights",
)


HALF_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class SavedModel:
    """A save's weights by the module's names, version, number of files; `warnings` and `dropped` as in Checkpoint."""

    tensors: dict[str, LazyTensor]
    version: str
    shards: int
    warnings: tuple[str, ...]
    dropped: tuple[str, ...]


def open_model(save: Save) -> SavedModel:
    """Opens the files with the weights without reading tensors; InputRefused if missing, malformed, or unsupported."""
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
    warnings = []
    half = _half_dtype(states)
    if masters and half:
        warnings.append(f"these are the float32 master weights; `--dtype {half}` converts to the dtype of the run")
    if not masters and states.param_shapes() is not None:
        warnings.append(f"`{save.name}` has no optimizer states: the weights are the module's, not the master weights")
    copies = [name for name, tensor in states.tensors("module").items() if prod(tensor.shape) and name not in rest]
    parts = []
    if copies:
        parts.append("the module's copies of the master weights")
    if isinstance(states.content.get("optimizer"), dict):
        parts.append("the optimizer's state")
    if states.content.get("lr_scheduler") is not None:
        parts.append("the schedule of the learning rate")
    return SavedModel(tensors | rest, version, shards, tuple(warnings), dropped + tuple(parts))


def _states_path(save: Save) -> Path:
    if save.model and save.zero_models:
        raise MalformedInput(
            f"`{save.name}` contains model states of ZeRO-3 and of a lower stage",
            hint="two saves were written into one folder; keep the files of one of them",
        )
    if (path := save.model or save.zero_models.get(0)) is None:
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
    """Tensors of the module alone (stage 0, frozen in 1); MalformedInput: empty ones, UnsupportedInput: objects."""
    objects = [name for name in states.objects("module") if name not in known and not name.endswith("_extra_state")]
    if objects:
        raise UnsupportedInput(
            f"`{save.name}` holds {len(objects)} objects that are not plain tensors: {listing(objects)}",
            hint="save a full (unsharded, unquantized) state dict",
        )
    rest = {name: tensor for name, tensor in states.tensors("module").items() if name not in known}
    if empty := [name for name, tensor in rest.items() if not prod(tensor.shape)]:
        raise MalformedInput(
            f"missing keys: `{save.name}` has no weights for {len(empty)} parameters: {listing(empty)}",
            hint="they were frozen and left out (`exclude_frozen_parameters`); take them from the base model",
        )
    if not rest and not known:
        raise MalformedInput(f"`{states.path.name}` contains no weights", hint="it was saved without the module")
    return rest


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


WEIGHTS = "fp32.pt"


def open_universal(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """Name to master weight of every parameter (MalformedInput if missing); those from stage 3 are stored flat."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    whole = {name for name in names if (folder / name / WEIGHTS).is_file()}
    if missing := sorted({*shapes, *names} - whole):
        raise MalformedInput(
            f"missing keys: `{folder.name}` lacks the weights of {len(missing)} parameters: {listing(missing)}",
            hint=f"each has a folder with `{WEIGHTS}`; copy the folder again, all of it",
        )
    return {name: _read(folder / name / WEIGHTS, name, shapes.get(name)) for name in names}


def _read(path: Path, name: str, shape: tuple[int, ...] | None) -> LazyTensor:
    file = open_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        refuse(path, f"contains no tensor for `{name}`")
    tensor = file.tensor(name, ref)
    if shape is None or tensor.shape == shape:
        return tensor
    if len(tensor.shape) != 1 or tensor.shape[0] != prod(shape):
        refuse(path, f"has a shape mismatch for `{name}`: expected {list(shape)}, got {list(tensor.shape)}")
    return joined([FlatSlice(tensor, 0, tensor.shape[0])], shape, tensor.dtype)
