"""Composer's newer folder layout `ep0-ba1/`, read as the nested dict of the one-file layout.

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
OTHER_PARTS = {"optim": "the optimizer's state", "resumption.pkl": "the state for resuming the run"}


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
        hint="it was saved without the model, or the copy is incomplete",
    )


def content(folder: Path, model: Any) -> dict[str, Any]:
    """The nested dict of the one-file layout.

    Args:
        folder: a folder in this layout.
        model: the state dict.

    Raises:
        MalformedInput: the metadata is not JSON, or `model` is not a dict.
    """
    if not isinstance(model, dict):
        raise MalformedInput(f"`{folder.name}/{MODEL}` contains no state dict", hint="copy the folder again")
    stored = read_json(folder / METADATA)
    metadata = {"composer_env_info": stored, "torch_version": stored.get("torch_version")}
    integrations = {"huggingface": stored.get("huggingface")}
    return {"state": {"model": model, "integrations": integrations, "metadata": metadata}}


def other_parts(folder: Path) -> dict[str, int]:
    """Description to bytes of the other parts in the folder."""
    files = {part: [folder / name, *(folder / name).glob("*")] for name, part in OTHER_PARTS.items()}
    sizes = {part: sum(file.stat().st_size for file in group if file.is_file()) for part, group in files.items()}
    return {part: size for part, size in sizes.items() if size}
