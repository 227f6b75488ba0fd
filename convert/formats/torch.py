"""A plain torch state dict in Hugging Face's names: one `.bin`/`.pt`/`.pth` file, or a folder of `pytorch_model*.bin`.

Layout: `convert/state_dicts/`. The state dict is flat, or under `model`, `state_dict`, `model_state_dict` or `module`;
`config.json` is next to it, or given with `--config`.
"""

from __future__ import annotations

from pathlib import Path

from llmconv.convert.assembly import OPTIONS, assembled_run
from llmconv.convert.formats import Format, owner
from llmconv.convert.models.config_file import OPTION
from llmconv.convert.state_dicts import files as state_files
from llmconv.errors import InputRefused
from llmconv.files.torch_reader import is_torch_file

OF_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def _detect(path: Path) -> bool:
    if path.is_dir():
        if any((path / name).is_file() for name in OF_ADAPTERS):  # PEFT's folder, next to a value head or a copy
            return False
        return state_files.is_bin_folder(path) and not any(_of_others(one) for one in state_files.model_files(path)[:1])
    if state_files.RANK_FILE.fullmatch(path.name):
        return False
    found = state_files.peek_state(path) if path.is_file() else None
    is_own = found is not None and owner(found) is None and state_files.has_hugging_face_names(found)
    return is_own or (state_files.is_shard(path) and is_torch_file(path) and not _of_others(path))


def _of_others(path: Path) -> bool:
    """Whether the file belongs to another system; torchtune also names its own files as shards."""
    found = state_files.peek_state(path)
    return found is not None and owner(found) is not None


def _read(path: Path) -> state_files.StateFile:
    if path.is_dir():
        return state_files.open_bin_folder(path)
    if state_files.is_shard(path):
        raise InputRefused(
            f"`{path.name}` is one shard of several", hint=f"give the folder that contains all of them: `{path.parent}`"
        )
    return state_files.require_state(path)


FORMAT = Format(
    name="torch",
    title="Plain torch in Hugging Face's names: `.bin`, `.pt` or `.pth`, or a folder of `pytorch_model*.bin`",
    detect=_detect,
    open=lambda path, config, tokenizer: assembled_run(_read(path), "torch", config, tokenizer),
    covers="any causal language model of transformers, also with images, and classifiers; flat or nested once; "
    "shards with or without an index; files "
    "from before torch 1.6; models saved without their head; LoRA runs saved with their base, merged or kept apart; "
    "`--drop` leaves out what is not part of the model",
    options=("drop", *OPTIONS, OPTION),
    peek=lambda path: _read(path).tensors(),
)
