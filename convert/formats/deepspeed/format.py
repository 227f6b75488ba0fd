"""DeepSpeed: `latest` and a folder such as `global_step500`, as DeepSpeed, transformers and Lightning save it.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `utils/zero_to_fp32.py`): ZeRO stages 0 to 3, and universal
checkpoints. The names are those of the trained module; transformers' Trainer saves `config.json` next to it.

Universal checkpoints (`checkpoint/ds_to_universal.py`, `merge_tp_slices`): `zero/NAME/fp32.pt` for each parameter, a
dict with the whole float32 master weight as `param`; next to it the optimizer's moments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, HEADS, INDEX, SINGLE, Checkpoint, read_json
from llmconv.convert.algebra import reshaped
from llmconv.convert.assembly import OPTIONS, config_of_run, dropped_outside, opened_with_adapter, side_files_of
from llmconv.convert.formats import Format
from llmconv.convert.formats.deepspeed import save_folder
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import OPTION, causal_lm_config, other_class_config
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.convert.state_dicts.files import Sign, select
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, word
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import BY_NAME, LazyTensor, cast


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    save = save_folder.open_save(path)
    model = open_model(save)
    given = {name: value for name, value in config.items() if name not in (*OPTIONS, "drop")}
    heads = [name for name in model.tensors if VALUE_HEAD.match(name)]
    left_out = dropped_outside(heads, save.name, drop=bool(config.get("drop")))
    rest = {name: tensor for name, tensor in model.tensors.items() if name not in heads}
    model = replace(model, tensors=rest, dropped=(*model.dropped, *left_out))
    _require_one_model(model.tensors, save.name)
    adapted = any("lora_" in name for name in model.tensors)
    if adapted and not given.keys() < config.keys() and not any(".base_layer." in name for name in model.tensors):
        saved = (save.home / ADAPTER_CONFIG).is_file()
        raise UnsupportedInput(
            f"`{save.home.name}` belongs to a PEFT (LoRA) run; its adapter is not part of a plain model",
            hint=f"use `llmconv merge-lora BASE {word(save.home if saved else 'ADAPTER')} -o OUT`"
            + ("" if saved else " after saving the adapter with PEFT"),
        )
    tensors = select(model.tensors, lambda _, tensor: tensor, save.name, []) if adapted else dict(model.tensors)

    def open_model_of(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        warnings, settings = [*model.warnings], dict[str, Any]()
        stored = read_json(save.home / "config.json") if (save.home / "config.json").is_file() else {}
        side_files = {**(base.side_files if base else {}), **side_files_of(save.home, tokenizer)}
        fields = stored or (base.config if base else {})
        drop = bool(config.get("drop"))
        if tensors and (other := other_class_config(fields, given, tensors, warnings, drop=drop)):
            settings = other
            tensors = select(tensors, lambda _, tensor: tensor, save.name, warnings)
        elif tensors:
            settings = causal_lm_config(config_of_run(stored, base, warnings), given, path.name, warnings)
            own, names = AUTO_MAP in settings, [WRAPPERS.sub("", name) for name in tensors]
            # what a trainer put before every name, such as `_forward_module.`: before that of the output head
            prefix = next((name.removesuffix(end) for name in names for end in HEADS if name.endswith(f".{end}")), "")
            tensors = select(tensors, lambda _, tensor: tensor, save.name, warnings, prefix=prefix, buffers=own)
            settings = settings if own else as_loaded(tensors, settings)
        if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in side_files):
            warnings.append(f"`{path.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
        if any((save.home / name).is_file() for name in (SINGLE, INDEX)):
            note = "also contains safetensors: it already is a Hugging Face folder, without master weights"
            warnings.append(f"`{save.home.name}` {note}")
        opened = replace(model, path=path, tensors=tensors, config=settings)
        return replace(opened, side_files=side_files, warnings=tuple(warnings))

    return opened_with_adapter(tensors, save.home, config, open_model_of)


VALUE_HEAD = re.compile(r"(?:module\.)?v_head\.")  # of TRL's models, beside `pretrained_model.`


def _require_one_model(names: Collection[str], source: str) -> None:
    """Refuses a wrapper of several models, such as the `policy` and `value_model` of TRL and open-instruct."""
    first = {name.partition(".")[0] for name in names}
    whole = {name.partition(".")[0] for name in names if name.endswith(tuple(f".{end}" for end in EMBEDDINGS))}
    if len(first) > 1 and first == whole:
        prefixes = listing([f"{one}." for one in sorted(first)])
        raise UnsupportedInput(
            f"`{source}` contains {len(first)} models, with the prefixes {prefixes}",
            hint="save the `state_dict()` of one model alone, or give the Hugging Face folder that the trainer wrote",
        )


def _is_neox(path: Path) -> bool:
    from llmconv.convert.formats.neox import is_neox  # noqa: PLC0415 - of no other folder

    return is_neox(path)


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO: a folder with `latest` and one such as `global_step500`",
    detect=lambda path: save_folder.is_deepspeed(path) and not _is_neox(path),
    sign=Sign(keys=("ds_version", "ds_config", "param_shapes")),
    open=_open,
    options=("drop", *OPTIONS, OPTION),
    peek=lambda path: open_model(save_folder.open_save(path)),
    covers="ZeRO stages 0 to 3 of any number of ranks, frozen and tied weights, universal checkpoints; classifiers "
    "such as reward and value models; `--drop` leaves out TRL's value head; LoRA runs, merged or kept apart; float32 "
    "master weights",
)


HALF_DTYPES = ("bfloat16", "float16")


def open_model(save: save_folder.Save) -> Checkpoint:
    """The weights by the module's names, without configuration; InputRefused if missing, malformed, or unsupported."""
    if save.model and save.zero_models:
        raise MalformedInput(
            f"`{save.name}` contains model states of ZeRO-3 and of a lower stage",
            hint="two saves were written into one folder; keep the files of one of them",
        )
    if (file := save.model or save.zero_models.get(0)) is None:
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if save.zero_models else "mp_rank_00_model_states.pt"
        raise MalformedInput(
            f"`{save.name}` has no model states: `{name}` is missing",
            hint="the first rank writes it; copy it too, it contains names and shapes",
        )
    states = save_folder.ModelStates(file)
    module = states.tensors("module")
    names = states.content.get("buffer_names")
    release = states.content.get("ds_version")
    # the module's persistent buffers; those of 16 bits become float32, as in `zero_to_fp32`
    persistent = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    tensors = {name: cast(module[name], BY_NAME["float32"]) for name in module if name in persistent}
    masters: dict[str, LazyTensor] = {}
    if save.universal:
        shapes = states.param_shapes() or []
        masters = open_universal(save.universal, {name: shape for group in shapes for name, shape in group.items()})
    elif save.optimizers:
        masters = save_folder.open_masters(save, states)
    elif save.model is None:
        raise InputRefused(
            f"`{save.name}` was saved by ZeRO-3 and lacks the optimizer states, which contain the weights",
            hint="copy the files `*_optim_states.pt` of all ranks into it",
        )
    tensors |= save_folder.open_frozen(save, states) | masters
    for name, stored in states.table("shared_params").items():  # tied parameters
        if isinstance(name, str) and isinstance(stored, str) and stored in tensors and name not in masters:
            tensors[name] = tensors[stored]
    rest = _rest(save, states, module, tensors)
    known = release[:40] if isinstance(release, str) and release.isprintable() else ""
    version = f"deepspeed {known}".strip()
    shards = len(masters) if save.universal else len(save.optimizers) or 1
    warnings = []
    half = _half_dtype(states, module)
    if masters and half:
        warnings.append(f"these are the float32 master weights; `--dtype {half}` converts to the dtype of the run")
    if not masters and states.param_shapes() is not None:
        warnings.append(f"`{save.name}` has no optimizer states: the weights are the module's, not the master weights")
    copies = [name for name, tensor in module.items() if prod(tensor.shape) and name not in rest]
    parts = {
        "the optimizer's moments": masters,
        "the module's copies of the master weights": copies,
        "the optimizer's state": isinstance(states.content.get("optimizer"), dict),
        "the schedule of the learning rate": states.content.get("lr_scheduler") is not None,
    }
    dropped = tuple(part for part, is_there in parts.items() if is_there)
    return Checkpoint(save.path, FORMAT.name, tensors | rest, {}, {}, tuple(warnings), version, shards, dropped)


def _rest(
    save: save_folder.Save,
    states: save_folder.ModelStates,
    module: Mapping[str, LazyTensor],
    known: Mapping[str, LazyTensor],
) -> dict[str, LazyTensor]:
    """Tensors of the module alone (stage 0, frozen in 1); MalformedInput: empty ones, UnsupportedInput: objects."""
    stubs = [str(name) for name, value in states.table("module").items() if isinstance(value, Stub)]
    if objects := [name for name in stubs if name not in known and not name.endswith("_extra_state")]:
        raise UnsupportedInput(
            f"`{save.name}` holds {len(objects)} objects that are not plain tensors: {listing(objects)}",
            hint="save a full (unsharded, unquantized) state dict",
        )
    rest = {name: tensor for name, tensor in module.items() if name not in known}
    if empty := [name for name, tensor in rest.items() if not prod(tensor.shape)]:
        raise MalformedInput(
            f"missing keys: `{save.name}` has no weights for {len(empty)} parameters: {listing(empty)}",
            hint="they were frozen and left out (`exclude_frozen_parameters`); take them from the base model",
        )
    if not rest and not known:
        raise MalformedInput(f"`{states.path.name}` contains no weights", hint="it was saved without the module")
    return rest


def _half_dtype(states: save_folder.ModelStates, module: Mapping[str, LazyTensor]) -> str:
    """The 16-bit dtype of the training run, or empty."""
    settings = states.content.get("ds_config")
    for half, field in zip(HALF_DTYPES, ("bf16", "fp16"), strict=True):
        section = settings.get(field) if isinstance(settings, dict) else None
        if isinstance(section, dict) and section.get("enabled") is True:
            return half
    return next((tensor.dtype.name for tensor in module.values() if tensor.dtype.name in HALF_DTYPES), "")


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
        save_folder.refuse(path, f"contains no tensor for `{name}`")
    tensor = file.tensor(name, ref)
    if shape is None or tensor.shape == shape:
        return tensor
    if len(tensor.shape) != 1 or tensor.shape[0] != prod(shape):
        save_folder.refuse(path, f"has a shape mismatch for `{name}`: expected {list(shape)}, got {list(tensor.shape)}")
    return reshaped(tensor, shape)
