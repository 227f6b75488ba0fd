"""KeyRotation: which channels of keys a rotary embedding mixes, and the range that they share.

An embedding rotates pairs of channels by angles that grow with the position. On a long context each channel of a pair
reaches the larger maximum of both.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from llmconv.tensors import Array


class KeyRotation(Enum):
    """Which channels of a head are mixed: none, i with i + half of the head, 2i with 2i + 1, or possibly any."""

    NONE = "none"
    HALVES = "halves"
    NEIGHBORS = "neighbors"
    UNKNOWN = "unknown"

    def shared(self, maxima: Array) -> Array:
        """Maxima [..., head_dim] of channels as the maxima of all channels that each is mixed with; the same shape."""
        if self is KeyRotation.NONE:
            return maxima
        size = maxima.shape[-1]
        groups = {KeyRotation.HALVES: (2, size // 2), KeyRotation.NEIGHBORS: (size // 2, 2)}.get(self, (1, size))
        axis = -2 if self is KeyRotation.HALVES else -1
        grouped = maxima.reshape(*maxima.shape[:-1], *groups)
        return np.broadcast_to(grouped.max(axis=axis, keepdims=True), grouped.shape).reshape(maxima.shape)
