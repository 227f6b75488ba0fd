"""Index files of sharded checkpoints: the shards that they list, with the tensors of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, listing


def indexed_shards(folder: Path, index: str, is_shard_name: Callable[[str], bool]) -> dict[str, set[str]]:
    """Shard file to the names of its tensors, from the `weight_map` of an index.

    Args:
        folder: contains the index and the shards.
        index: file name of the index.
        is_shard_name: whether a file name in the index is valid.

    Raises:
        MalformedInput: there is no `weight_map`, or a shard is missing or has an invalid name.
    """
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedInput(f"`{index}` has no `weight_map`", hint="copy the folder again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not is_shard_name(shard):
            raise MalformedInput(
                f"`{index}` has the invalid shard name {str(shard)[:80]!r}",
                hint="shards are plain file names next to the index",
            )
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not (folder / shard).is_file():
            raise MalformedInput(f"shard `{shard}` is missing from `{folder.name}`", hint="copy the folder again")
    return dict(sorted(shards.items()))


def require_listed(shard: str, found: Iterable[str], listed: set[str], index: str) -> None:
    """Compares the names in a shard with those that the index lists for it.

    Args:
        shard: file name of the shard.
        found: the names in it.
        listed: those in the index.
        index: file name of the index.

    Raises:
        MalformedInput: they differ.
    """
    if different := sorted(listed ^ set(found)):
        raise MalformedInput(
            f"`{index}` and `{shard}` differ in {len(different)} tensors: {listing(different)}",
            hint="shards of different models are mixed; copy the folder again",
        )
