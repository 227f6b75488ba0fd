"""Experts of Megatron core's first grouped layers (`--moe-grouped-gemm` until 0.9), which keep them in two matrices.

Layout (Megatron core `transformer/moe/experts.py`, `GroupedMLP`): the memory of `weight1` is [experts, hidden, rows of
the first matrix], that of `weight2` [experts, columns of the second, hidden]: each expert's matrices are transposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmconv.convert.algebra.operations import slice_rows
from llmconv.convert.state_dicts.distributed.chunks import reshaped
from llmconv.tensors import LazyTensor
from llmconv.transpose import transposed

MATRICES = {".mlp.experts.weight1": "linear_fc1", ".mlp.experts.weight2": "linear_fc2"}


def grouped_matrix(name: str) -> str | None:
    """`linear_fc1` or `linear_fc2` if a tensor contains this matrix of all experts of a rank, else None."""
    return next((matrix for end, matrix in MATRICES.items() if name.endswith(end)), None)


def separate_experts(name: str, tensor: LazyTensor, experts: int, hidden: int) -> Iterator[tuple[str, LazyTensor]]:
    """The matrices of the experts of one rank, by their names with local numbers.

    Args:
        name: one of which `grouped_matrix` is not None.
        tensor: [hidden, experts · rows] or [experts · columns, hidden].
        experts: number of experts of the rank.
        hidden: size of the hidden state.

    Raises:
        ValueError: the tensor has another shape.
    """
    matrix = grouped_matrix(name)
    own = 0 if matrix == "linear_fc1" else 1
    if len(tensor.shape) != 2 or tensor.shape[own] != hidden or not experts or tensor.shape[1 - own] % experts:
        raise ValueError(f"{list(tensor.shape)} does not hold {experts} experts")
    size = tensor.shape[1 - own] // experts
    rows, columns = (hidden, size) if own == 0 else (size, hidden)
    stacked = reshaped(tensor, (experts * rows, columns))
    stem = name.rpartition(".")[0]
    for expert in range(experts):
        part = slice_rows(stacked, expert * rows, (expert + 1) * rows)
        yield f"{stem}.{expert}.{matrix}.weight", transposed(part)
