"""PyTorch Lightning `.ckpt`: the state dict of a LightningModule, with a Hugging Face model as one of its attributes.

Layout (lightning `pytorch/trainer/connectors/checkpoint_connector.py`, `dump_checkpoint`): `state_dict`,
`pytorch-lightning_version`, `hyper_parameters`, `optimizer_states`, `lr_schedulers`, `loops`, `callbacks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.assembly import OPTIONS, assembled_run
from llmconv.convert.formats import Format, has_sign_of
from llmconv.convert.models.config_file import OPTION
from llmconv.convert.state_dicts.files import Sign, StateFile, open_state
from llmconv.errors import InputRefused

VERSION = "pytorch-lightning_version"


def _read(path: Path) -> StateFile:
    found = open_state(path)
    if found is None or not found.around:
        raise InputRefused(
            f"`{path.name}` contains no `state_dict`", hint="it was saved without the model; give another checkpoint"
        )
    return found


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    version = str((found := _read(path)).around.get(VERSION))[:20]
    return replace(assembled_run(found, FORMAT.name, config, tokenizer), version=f"lightning {version}")


FORMAT = Format(
    name="lightning",
    title="PyTorch Lightning: a `.ckpt` of a module that holds a Hugging Face model",
    detect=lambda path: has_sign_of("lightning", path),
    sign=Sign(keys=(VERSION,)),
    open=_open,
    covers="any causal language model of transformers, also with images, or classifier, under any one attribute of "
    "the module; give its `config.json` "
    "with `--config`; `--drop` leaves out what is not part of the model; LoRA runs, merged or kept apart",
    options=("drop", *OPTIONS, OPTION),
    peek=lambda path: _read(path).tensors(),
)
