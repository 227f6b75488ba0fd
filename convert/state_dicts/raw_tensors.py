"""The tensors of a path in their own names, for `inspect` of a checkpoint that cannot be converted yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmconv.errors import InputRefused
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.safetensors_file import read_header
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor

DEPTH = 4
"""Maximum nesting of dicts; deeper ones belong to optimizers."""


def raw_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a torch or safetensors file, or of a folder of them; reads only headers. InputRefused if none."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    files = {entry.name: _read(entry) for entry in entries if entry.suffix == ".safetensors" or is_torch_file(entry)}
    if not files:
        raise InputRefused(f"`{path}` contains no torch or safetensors file", hint="is the copy complete?")
    return joined(files)


def joined(files: Mapping[str, Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """The tensors of several files by unique names; with several files, a name contains that of the file."""
    if len(files) == 1:
        return dict(next(iter(files.values())))
    return {f"{file}: {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def _read(path: Path) -> Mapping[str, LazyTensor]:
    return read_header(path).tensors if path.suffix == ".safetensors" else torch_tensors(path)


def torch_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a plain torch file (else InputRefused): the state dict, or nested dicts in dotted names."""
    file = open_torch_file(path)
    return {name: file.tensor(name, ref) for name, ref in _leaves(file.content, "", 0)}


def _leaves(value: object, name: str, depth: int) -> list[tuple[str, TensorRef]]:
    if isinstance(value, TensorRef):
        return [(name, value)]
    if not isinstance(value, dict) or depth > DEPTH:
        return []
    return [leaf for key, item in value.items() for leaf in _leaves(item, f"{name}.{key}".lstrip("."), depth + 1)]
