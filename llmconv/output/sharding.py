"""Distributes tensors over files: by size, or as in the source folder."""

from __future__ import annotations

from collections.abc import Mapping

from llmconv.tensors import LazyTensor

KEEP = "keep"
"""Instead of a size: keep the files of the source."""

Group = dict[str, LazyTensor]


def by_size(tensors: Mapping[str, LazyTensor], limit: int) -> list[Group]:
    """Groups tensors in order into files of at most `limit` bytes; a larger tensor gets its own."""
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
    """Groups tensors in order by their source files; a new tensor joins the previous one's file if it fits.

    Args:
        tensors: to write.
        files: name of a tensor to the name of its file in the source.
        limit: bytes up to which new tensors join a file; at least the size of the largest source file.
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
