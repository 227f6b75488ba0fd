"""Distributed checkpoints made by torch's own writer in one process, and `.metadata` changed as an attacker may."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as layout
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state


def save(folder: Path, state: dict[str, Any], **writer: Any) -> Path:
    """Saves the nested dict `state` without a process group; `writer` are options of torch's FileSystemWriter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(state, storage_writer=FileSystemWriter(folder, sync_files=False, **writer), no_dist=True)
    return folder


def change(folder: Path, edit: Callable[[Any], Any]) -> Path:
    """Rewrites `.metadata` after `edit(metadata)` changed it, or with what it returns."""
    file = folder / ".metadata"
    content = pickle.loads(file.read_bytes())
    changed = edit(content)
    file.write_bytes(pickle.dumps(content if changed is None else changed))
    return folder


def split(metadata: Any, name: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Says that `name` lies in chunks (offsets, sizes), all of them where its first chunk is."""
    item = metadata.state_dict_metadata[name]
    first = metadata.storage_data[layout.MetadataIndex(name, item.chunks[0].offsets)]
    item.chunks = [layout.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    for number, (offsets, _) in enumerate(boxes):
        place = type(first)(f"{number}{first.relative_path}", first.offset, first.length)
        metadata.storage_data[layout.MetadataIndex(name, torch.Size(offsets))] = place
