"""Which tensors share a file: by size, or as they do in the folder that they come from."""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.tensors import LazyTensor

KEEP = "keep"
"""In place of a size: the files of the source."""

Group = dict[str, LazyTensor]


def by_size(tensors: Mapping[str, LazyTensor], limit: int) -> list[Group]:
    """The tensors in order, in files of at most `limit` bytes; a larger tensor gets its own."""
    groups: list[Group] = []
    size = 0
    for name, tensor in tensors.items():
        if not groups or size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def by_source(tensors: Mapping[str, LazyTensor], files: Mapping[str, str], limit: int) -> list[Group]:
    """The tensors in order, in the files that they come from; a new one joins the one before it where there is room.

    Args:
        tensors: what is to be written.
        files: name of a tensor to the name of its file in the source.
        limit: bytes up to which new tensors join a file, if no file is larger as it is.
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name in files:
            sizes[files[name]] = sizes.get(files[name], 0) + tensor.nbytes
    room = max([limit, *sizes.values()])
    groups: dict[str, Group] = {}
    home = next(iter(sizes), "")
    for name, tensor in tensors.items():
        home = files.get(name, home)
        if name not in files:
            while sizes.get(home) and sizes[home] + tensor.nbytes > room:
                home += "+"
            sizes[home] = sizes.get(home, 0) + tensor.nbytes
        groups.setdefault(home, {})[name] = tensor
    return list(groups.values())
