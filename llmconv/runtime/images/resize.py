"""Bilinear resizing of a grid of features, as torch's `interpolate` computes it."""

from __future__ import annotations

import numpy as np

from llmconv.tensors import Array


def resize_bilinear(features: Array, height: int, width: int) -> Array:
    """Features resized without aligned corners and without a filter, float [height, width, hidden].

    Args:
        features: float [rows, columns, hidden].
        height: of the result, 1 or more.
        width: of the result, 1 or more.
    """
    return _resized(_resized(features, 0, height), 1, width).astype(features.dtype)


def _resized(features: Array, axis: int, size: int) -> Array:
    """One axis resized: each point is between two, whose weights are the distances."""
    old = features.shape[axis]
    points = np.maximum((np.arange(size) + 0.5) * (old / size) - 0.5, 0)
    first = np.minimum(points.astype(int), old - 1)
    second = np.minimum(first + 1, old - 1)
    shape = [1] * features.ndim
    shape[axis] = size
    weight = (points - first).reshape(shape)
    found: Array = features.take(first, axis) * (1 - weight) + features.take(second, axis) * weight
    return found
