"""Opens a sharded Composer run, a distributed checkpoint: the model lazily, and its settings.

Layout (mosaicml/composer `utils/checkpoint.py`, `checkpoint/save.py`): `epE-baB/` holds the nested dict of a run; in
the newer layout `epE-baB/model/` holds the bare state dict, `epE-baB/composer_metadata.json` the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.convert.formats.composer import run_folder
from llmconv.convert.state_dicts.distributed.folder import DistributedFolder, is_folder, open_folder, sizes_of
from llmconv.convert.state_dicts.distributed.metadata import FILE, TensorItem
from llmconv.errors import UnsupportedInput
from llmconv.files.pickles.machine import Stub
from llmconv.files.pickles.reader import Global
from llmconv.tensors import LazyTensor

MODEL = "model"
TRACES = {"integrations", "metadata", "timestamp", "run_name", "rank_zero_seed"}
"""Keys of a Composer state next to the model; at least one of them is always there."""

WAY_OUT = (
    "load all ranks' files with the Composer that wrote them, in as many processes, and save once with "
    "`state_dict_type: full`"
)


def is_sharded(path: Path) -> bool:
    """Whether `path` is a folder with a sharded run, by its content."""
    if run_folder.is_folder(path) and is_folder(path / MODEL):
        return True
    if not is_folder(path) or not (path / FILE).is_file():
        return False
    tree = open_folder(path).tree
    state = tree.get("state")
    return isinstance(state, dict) and MODEL in state and ("rng" in tree or bool(TRACES & set(state)))


def open_sharded(path: Path) -> tuple[dict[str, Any], Callable[[str, Any], LazyTensor], int, dict[str, int]]:
    """The fields of a ComposerRun: content, tensor, shards, other_parts.

    Raises:
        MalformedInput, UnsupportedInput: see `open_folder`; or a part of the model cannot be read.
    """
    if run_folder.is_folder(path):
        folder = open_folder(path / MODEL)
        state, left = run_folder.content(path, folder.tree)["state"], run_folder.other_parts(path)
        model = state.pop(MODEL)
        known = state
    else:
        folder = open_folder(path)
        state = folder.tree["state"]
        model = state[MODEL]
        known = {name: folder.values(state.get(name, {})) for name in ("integrations", "metadata")}
        rest = {**folder.tree, **state}
        left = sizes_of({name: tree for name, tree in rest.items() if name not in ("state", MODEL, *known)})
    content = {"state": {MODEL: _lazy(folder, model), **_with_empty_files(known)}}
    return content, lambda _, tensor: tensor, folder.shards, left


def _lazy(folder: DistributedFolder, model: Any) -> dict[str, Any]:
    """The state dict with a LazyTensor for each tensor, and bytes items unchanged."""
    entries = model.items() if isinstance(model, Mapping) else ()
    return {str(key): folder.tensor(str(key), item) if isinstance(item, TensorItem) else item for key, item in entries}


def _with_empty_files(known: dict[str, Any]) -> dict[str, Any]:
    """Restores the content of JSON files that are an empty dict, which torch does not store."""
    huggingface = known["integrations"].get("huggingface") if isinstance(known["integrations"], dict) else None
    files = huggingface.get("tokenizer") if isinstance(huggingface, dict) else None
    for entry in files.values() if isinstance(files, dict) else ():
        if isinstance(entry, dict) and entry.get("file_extension") == ".json":
            entry.setdefault("content", {})
    return known


def refuse_rank_file(path: Path, model: Any) -> None:
    """Refuses the file of one rank, which holds only a part of every tensor.

    Raises:
        UnsupportedInput: there are pickled `ShardedTensor`, or flat parameters of FSDP (`local`).
    """
    entries = model.items() if isinstance(model, Mapping) else ()
    if any(_is_sharded_tensor(value) for _, value in entries):
        raise UnsupportedInput(
            f"`{path.name}` is one rank's part of a sharded run from before August 2023 (`ShardedTensor`)", hint=WAY_OUT
        )
    if any(str(key).rpartition(".")[2] in ("flat_param", "_flat_param") for key, _ in entries):
        raise UnsupportedInput(
            f"`{path.name}` is one rank's part of a run saved with `state_dict_type: local` (flat parameters)",
            hint=WAY_OUT,
        )


def _is_sharded_tensor(value: Any) -> bool:
    """Whether it is pickled as today (a call with the class as argument) or as in 2023 (the object itself)."""
    names = (value.function, *value.args) if isinstance(value, Stub) else ()
    return any(isinstance(name, Global) and name.name == "ShardedTensor" for name in names)
