"""Stacks of matrices, as of experts, as one tensor per matrix, `X[0]`, `X[1]`, …: graphs have a product for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from llmconv.tensors import BY_NAME, Array, LazyTensor

STACK = 3
"""Dimensions of a stack of matrices."""


def unstacked(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors, each stack of matrices replaced by its matrices."""
    return {key: part for name, tensor in tensors.items() for key, part in _parts(name, tensor).items()}


def restacked(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The reverse of `unstacked`; the matrices may be other ones of the same shape and dtype."""
    stacks: dict[str, list[LazyTensor]] = {}
    for name, tensor in tensors.items():
        stacks.setdefault(stack_of(name), []).append(tensor)
    return {name: parts[0] if name in tensors else _stack(parts) for name, parts in stacks.items()}


def stack_of(name: str) -> str:
    """The name of the stack that a matrix is in; of any other tensor its own."""
    return re.sub(r"\[\d+\]$", "", name)


def _parts(name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
    if len(tensor.shape) != STACK or tensor.shape[1] == 1:  # kernels of convolutions are [channels, 1, width]
        return {name: tensor}
    shape = tensor.shape[1:]
    return {
        f"{name}[{index}]": LazyTensor(tensor.dtype, shape, partial(_rows, tensor, index))
        for index in range(tensor.shape[0])
    }


def _stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """The stack in float32 if only some of its matrices are."""
    dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else BY_NAME["float32"]

    def load(start: int, stop: int) -> Array:
        return np.stack([part.read().astype(dtype.numpy, copy=False) for part in parts[start:stop]])

    return LazyTensor(dtype, (len(parts), *parts[0].shape), load)


def _rows(tensor: LazyTensor, index: int, start: int, stop: int) -> Array:
    return np.ascontiguousarray(tensor.rows(index, index + 1)[0, start:stop])
