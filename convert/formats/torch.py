"""A plain torch state dict in Hugging Face's names: one `.bin`/`.pt`/`.pth` file, or a folder of `pytorch_model*.bin`.

Layout: `convert/torch_state/`. The state dict is flat, or under `model`, `state_dict`, `model_state_dict` or `module`;
`config.json` lies beside it, or comes with `--config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats import Format
from llmconv.convert.torch_state.dialects import dialect_of
from llmconv.convert.torch_state.files import StateFile, open_state
from llmconv.convert.torch_state.folders import is_bin_folder, is_shard, open_bin_folder
from llmconv.convert.torch_state.whole import assemble
from llmconv.errors import InputRefused, MalformedInput
from llmconv.tensors import LazyTensor
from llmconv.torch_file import is_torch_file


def _detect(path: Path) -> bool:
    if path.is_dir():
        return is_bin_folder(path)
    return dialect_of(path) == FORMAT.name or (is_shard(path) and is_torch_file(path) and dialect_of(path) is None)


def _read(path: Path) -> StateFile:
    if path.is_dir():
        return open_bin_folder(path)
    if is_shard(path):
        raise InputRefused(
            f"`{path.name}` is one shard of several", hint=f"give the folder that all of them lie in: `{path.parent}`"
        )
    found = open_state(path)
    if found is None:
        raise MalformedInput(f"`{path.name}` holds no state dict", hint="it should hold tensors by name")
    return found


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    return assemble(_read(path), FORMAT.name, config, tokenizer)


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    return _read(path).tensors()


FORMAT = Format(
    name="torch",
    title="Plain torch in Hugging Face's names: `.bin`, `.pt` or `.pth`, or a folder of `pytorch_model*.bin`",
    detect=_detect,
    open=_open,
    covers="any causal language model of transformers; flat or nested once; shards with or without an index; files "
    "from before torch 1.6; models saved without their head; `--drop` leaves out what is no part of the model",
    options=("drop",),
    peek=_peek,
)
