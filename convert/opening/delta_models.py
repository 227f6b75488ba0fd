"""Opening either side of a delta: a Hugging Face folder, or a training checkpoint of any format, in the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmconv.causal_lm import require_model_type
from llmconv.checkpoint import ADAPTER_CONFIG, Checkpoint, open_checkpoint
from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.formats import detect
from llmconv.convert.models.code_model import with_copied_code
from llmconv.convert.models.dtype import with_cast
from llmconv.convert.opening.training_checkpoint import open_training
from llmconv.convert.state_dicts.safetensors_files import is_model_folder
from llmconv.errors import UnsupportedInput
from llmconv.files.sources import local_path, reading_safely


def open_model(name: str | Path) -> Checkpoint:
    """A model in Hugging Face names, its tensors lazy.

    Args:
        name: a Hugging Face folder, or a checkpoint that `to-hf` reads without options; a path, URI or hub id.

    Raises:
        InputRefused: not a model that can be read, or a delta or an adapter instead of one.
    """
    with reading_safely(name):
        path = local_path(name, in_parts=True)
        if (path / DELTA_FILE).is_file():
            raise UnsupportedInput(
                f"`{path}` is a delta, not a model", hint="the order is `llmconv delta apply BASE DELTA -o OUT`"
            )
        if (path / ADAPTER_CONFIG).is_file():
            raise UnsupportedInput(
                f"`{path}` is an adapter, not a model", hint="merge it: `llmconv merge-lora BASE ADAPTER -o OUT`"
            )
        if is_hugging_face(path):
            model = open_checkpoint(path)
            require_model_type(model.config, path)
            return with_copied_code(model)
        opened = open_training(path)
        if not opened.tensors:
            raise UnsupportedInput(
                f"`{path}` contains an adapter alone, not a model", hint="convert it with `llmconv to-hf --base` first"
            )
        return replace(with_cast(opened, "keep"), path=path)


def is_hugging_face(path: Path) -> bool:
    """Whether `path` is a folder with a config and safetensors weights that no training format claims."""
    return is_model_folder(path) and detect(path) is None
