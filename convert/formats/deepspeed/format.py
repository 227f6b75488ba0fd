"""DeepSpeed: `latest` and a folder such as `global_step500`, as DeepSpeed, transformers and Lightning save it.

Layout (deepspeedai/DeepSpeed `runtime/engine.py`, `utils/zero_to_fp32.py`): ZeRO stages 0 to 3, and universal
checkpoints. The names are those of the trained module; transformers' Trainer saves `config.json` next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG, INDEX, SINGLE, Checkpoint, read_json, read_side_files
from llmconv.convert.formats import Format
from llmconv.convert.formats.deepspeed.read import SavedModel, open_model
from llmconv.convert.formats.deepspeed.save_folder import Save, is_deepspeed, open_save
from llmconv.convert.models.blueprint.names import HEADS
from llmconv.convert.models.completeness import WRAPPERS, as_loaded, select
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.models.trusted_code import OPTION
from llmconv.convert.peft_runs.outputs import OPTIONS, opened_with_adapter
from llmconv.convert.state_dicts.recognition import Sign
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import UnsupportedInput
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor


def _detect(path: Path) -> bool:
    return is_deepspeed(path)


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
    side_files = {**(base.side_files if base else {}), **_side_files(save.home, tokenizer)}
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


def _side_files(home: Path, tokenizer: Path | None) -> dict[str, bytes]:
    stored = read_side_files(home)
    if tokenizer is None:
        return stored
    return {name: stored[name] for name in ("generation_config.json",) if name in stored} | read_tokenizer(tokenizer)


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    return open_model(open_save(path)).tensors


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO: a folder with `latest` and one such as `global_step500`",
    detect=_detect,
    sign=Sign(keys=("ds_version", "ds_config", "param_shapes")),
    open=_open,
    options=(*OPTIONS, OPTION),
    peek=_peek,
    covers="ZeRO stages 0 to 3 of any number of ranks, frozen and tied weights, universal checkpoints; "
    "LoRA runs, merged or kept apart; float32 master weights",
)
