"""Safetensors in Hugging Face's names, of any trainer: one file, or shards with or without an index, and a config.

Layout: `convert/state_dicts/files.py`, as accelerate's `save_model` and `save_state` write it.
`config.json` is next to the weights, or given with `--config`. A folder that already is a Hugging Face model does not
have this format, unless its tensor names still have those of a trainer's wrappers, or parts of an adapter that is not
merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import HEADS, WRAPPED, Checkpoint, is_model_folder, unmerged
from llmconv.convert.assembly import OPTIONS, assembled_run, stored_config
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.formats import Format, owner
from llmconv.convert.formats.paddle.read import names_paddle
from llmconv.convert.models.completeness import WRAPPERS
from llmconv.convert.models.config_file import OPTION
from llmconv.convert.models.transformers_source import EMBEDDINGS, model_names
from llmconv.convert.state_dicts import files as state_files
from llmconv.errors import InputRefused
from llmconv.not_a_model_folder import training_files_in


def _detect(path: Path) -> bool:
    if path.is_dir():
        if (path / DELTA_FILE).is_file() or not state_files.one_checkpoint(path):
            return False
    elif path.suffix != state_files.SUFFIX:
        return False
    found = None if names_paddle(path) else state_files.peek_safetensors_state(path)
    if found is None or not _in_hugging_face_names(found):
        return False
    if not path.is_dir() or not is_model_folder(path) or all(map(WRAPPERS.match, found.state)):
        return True
    if any(map(WRAPPED.search, found.state)):  # around single modules, as those of activation checkpointing
        return True
    return bool(unmerged(found.state, {})) and bool(unmerged(found.state, stored_config(path)))


def _in_hugging_face_names(found: state_files.StateFile) -> bool:
    """Whether the names are those of a transformers model, possibly with the embedding only under the head's name."""
    files = [found.path] if found.path.is_file() else state_files.one_checkpoint(found.path)
    if any(state_files.header_of(file).metadata.get("format") == "ms" for file in files[:1]):
        return False
    if owner(found) is None and state_files.has_hugging_face_names(found):
        return True
    if all(state_files.ADAPTER_NAMES.search(name) for name in found.state):
        return False
    has_layers = any(".layers." in name or ".h." in name for name in found.state)
    has_head = any(name.endswith(HEADS) for name in found.state)
    return has_layers and (has_head or state_files.is_safetensors_shard(found.path))


def _read(path: Path, config: Mapping[str, Any]) -> state_files.StateFile:
    if path.is_file() and state_files.is_safetensors_shard(path):
        raise InputRefused(f"`{path.name}` is one shard of several", hint=f"give their folder: `{path.parent}`")
    found = state_files.open_safetensors_state(path)
    # the embedding of a tied model may be saved only under the name of its head
    fields = {**stored_config(found.home or path), **config}
    names = model_names(str(fields.get("model_type")))
    head = next((name for name in found.state if names.head and name.endswith(names.head)), None)
    if head is None or any(name.endswith(EMBEDDINGS) for name in found.state):
        return found
    embedding = head.removesuffix(names.head) + names.embedding
    tied = fields.get("tie_word_embeddings", names.tied)
    return replace(found, state={embedding: found.state[head], **found.state}) if tied else found


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    if path.is_file() and not config and tokenizer is None and is_model_folder(path.parent):
        raise InputRefused(
            f"`{path.name}` belongs to the Hugging Face folder `{path.parent}`",
            hint=f"give the folder: `{path.parent}`",
        )
    opened = assembled_run(_read(path, config), FORMAT.name, config, tokenizer)
    return replace(opened, dropped=(*training_files_in(path), *opened.dropped))


FORMAT = Format(
    name="safetensors",
    title="Safetensors in Hugging Face's names: one file, or a folder of shards, as accelerate writes them",
    detect=_detect,
    open=_open,
    covers="any causal language model of transformers, also with images, and classifiers; accelerate's `save_model` "
    "and `save_state`, merged FSDP "
    "weights; shards with or without an index; the files of all ranks of torch's `HuggingFaceStorageWriter` (NeMo "
    "Automodel, NeMo RL); shared tensors that are stored once; LoRA runs saved with their base, "
    "merged or kept apart; `--drop` leaves out what is not part of the model",
    options=("drop", *OPTIONS, OPTION),
    peek=lambda path: state_files.open_safetensors_state(path).tensors(),
)
