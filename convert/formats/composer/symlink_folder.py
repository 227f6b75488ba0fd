"""Composer's newer folder layout `ep0-ba1/`, as the nested dict that one file would hold.

Layout (mosaicml/composer `checkpoint/save.py`): `composer_metadata.json` (versions, and under `huggingface` what one
file has in `state.integrations.huggingface`), `model/model.pt` (the bare state dict) or a distributed checkpoint in
`model/`, `optim/`, `resumption.pkl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput

METADATA = "composer_metadata.json"
MODEL = "model/model.pt"
BESIDE = {"optim": "the optimizer's state", "resumption.pkl": "what resuming the run needs"}


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder in this layout."""
    return (path / METADATA).is_file()


def model_file(folder: Path) -> Path:
    """The torch file with the weights.

    Raises:
        InputRefused: there is none.
    """
    if (folder / MODEL).is_file():
        return folder / MODEL
    raise InputRefused(
        f"`{folder.name}` has no `{MODEL}`, so there are no weights in it",
        hint="it was saved without the model, or the copy is not complete",
    )


def content(folder: Path, model: Any) -> dict[str, Any]:
    """The nested dict that one file would hold.

    Args:
        folder: one in this layout.
        model: the state dict.

    Raises:
        MalformedInput: the metadata is not JSON, or `model` is not a dict.
    """
    if not isinstance(model, dict):
        raise MalformedInput(f"`{folder.name}/{MODEL}` holds no state dict", hint="copy the folder again")
    told = read_json(folder / METADATA)
    metadata = {"composer_env_info": told, "torch_version": told.get("torch_version")}
    integrations = {"huggingface": told.get("huggingface")}
    return {"state": {"model": model, "integrations": integrations, "metadata": metadata}}


def beside(folder: Path) -> dict[str, int]:
    """What else lies in the folder, and how many bytes of it."""
    files = {what: [folder / name, *(folder / name).glob("*")] for name, what in BESIDE.items()}
    sizes = {what: sum(file.stat().st_size for file in group if file.is_file()) for what, group in files.items()}
    return {what: size for what, size in sizes.items() if size}
