"""Changes of single tensors in safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmconv.files.safetensors_file import read_header
from llmconv.tensors import Array


def change_tensor(path: Path, name: str, edit: Callable[[Array], Array]) -> None:
    """Replaces the values of a tensor in its place by `edit` of them."""
    tensor = read_header(path).tensors[name]
    values = np.ascontiguousarray(edit(tensor.read().copy()), dtype=tensor.dtype.numpy)
    assert values.shape == tensor.shape
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + tensor.nbytes] = values.tobytes()
    path.write_bytes(content)
