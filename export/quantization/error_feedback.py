"""Rounds a matrix column by column; the columns that follow make up for the error of each (GPTQ).

With H = X^T X of the inputs X, rounding a column changes the output the least if the columns after it move by its error
times a row of the Cholesky factor of the inverse of H (Frantar et al., arXiv:2210.17323, algorithm 1). Scale and zero
point of a block are chosen from the weights as they are when its first column is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from llmconv.export.quantization.block_format import BlockFormat
from llmconv.export.quantization.block_rounding import HALF, block_scales
from llmconv.tensors import Array

DAMPING = 0.1
"""Share of the mean of the diagonal of H that is added to it; less overfits texts below 100 tokens per column."""


def inverse_factor(hessian: Array, damping: float = DAMPING) -> Array:
    """The upper Cholesky factor of the inverse of H + damping * mean(diagonal), float32 [K, K].

    Computed in float64 by one thread, so that the bits do not depend on the number of threads.

    Args:
        hessian: X^T X [K, K], finite; a column that is always zero gets the damping alone.
        damping: share of the mean of the diagonal; above 0.
    """
    wide = torch.from_numpy(hessian.astype(np.float64))
    mean = float(wide.diagonal().mean())
    wide.diagonal().add_(damping * mean if mean > 0 else 1.0)
    with _one_thread():
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
        factor: Array = torch.linalg.cholesky(inverse, upper=True).float().numpy()
    return factor


def rounded_with_feedback(
    weights: Array, factor: Array, importance: Array, form: BlockFormat, stored: Callable[[Array], Array] = np.asarray
) -> tuple[Array, Array, Array]:
    """Codes uint8 [N, K], scales float32 [N, blocks] and zero points uint8 [N, blocks].

    Args:
        weights: float32 [N, K], K a multiple of the block size.
        factor: [K, K], see `inverse_factor`.
        importance: float32 [K] for the choice of scales, see `block_scales`.
        form: bits, block size, symmetry, search.
        stored: rounds scales float32 [N] to the values that a file can hold.
    """
    rows, columns = weights.shape
    blocks = form.blocks(columns)
    left = np.ascontiguousarray(weights.T)  # [K, N], changed in place
    codes = np.empty((columns, rows), np.uint8)
    scales, zeros = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.uint8)
    for at in range(blocks):
        block = slice(at * form.size, (at + 1) * form.size)
        values = np.ascontiguousarray(left[block].T)
        chosen, zeros[:, at] = block_scales(values, form, importance[block])
        scales[:, at] = stored(chosen)
        codes[block], errors = _round_block(left[block], factor[block, block], scales[:, at], zeros[:, at], form)
        left[block.stop :] -= _product(factor[block, block.stop :], errors)
    return np.ascontiguousarray(codes.T), scales, zeros


def _round_block(left: Array, factor: Array, scales: Array, zeros: Array, form: BlockFormat) -> tuple[Array, Array]:
    """Codes of a block [size, N], and the errors [size, N] in units of the factor's diagonal."""
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    points, codes, errors = zeros.astype(np.float32), np.empty(left.shape, np.uint8), np.empty_like(left)
    for column, values in enumerate(left):
        inside = np.clip(values * inverse + points, np.float32(0), np.float32(form.largest))
        code = np.trunc(inside + HALF)
        codes[column] = code
        errors[column] = (values - (code - points) * scales) / factor[column, column]
        left[column + 1 :] -= factor[column, column + 1 :, None] * errors[column]
    return codes, errors


def _product(factor: Array, errors: Array) -> Array:
    """factor^T [columns, size] times errors [size, N], by one thread."""
    with _one_thread():
        product: Array = (torch.from_numpy(factor).T @ torch.from_numpy(errors)).numpy()
    return product


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
