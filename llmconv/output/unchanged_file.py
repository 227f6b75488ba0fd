"""Files of a source that an output contains unchanged: copied or cloned, and checked afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.errors import MalformedInput
from llmconv.files.copying import copy_file
from llmconv.files.safe_folder import NewFile
from llmconv.files.safetensors_file import FileTensor, holds
from llmconv.output.plan import Shard


def check_copy(path: Path, shard: Shard) -> None:
    """Registers the checksums of a copied or cloned file's tensors for comparison with the copy at `path`."""
    for tensor in shard.tensors.values():
        if isinstance(tensor, FileTensor) and tensor.record:
            replace(tensor.record, path=path).was_touched()


def copy_unchanged(new: NewFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
    """Copies the source of a shard.

    Args:
        new: the file to write.
        shard: to copy.
        advance: called with the bytes of each block written.

    Returns:
        The manifest entry.

    Raises:
        MalformedInput: the source changed meanwhile.
    """
    assert shard.copy_of
    entry = copy_file(shard.copy_of, new.file, advance)
    require_unchanged(new.path, shard)
    return entry


def require_unchanged(path: Path, shard: Shard) -> None:
    """Raises MalformedInput if the copy, or the source, of an unchanged file no longer has the planned tensors."""
    assert shard.copy_of
    if not holds(path, shard.tensors):
        raise MalformedInput(
            f"`{shard.copy_of.name}` changed while it was copied",
            hint="make sure that nothing writes to it, and run again",
        )
