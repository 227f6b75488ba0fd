"""Factors: a model on scaled weights, without a scaled copy of its files.

A factor is a power of two, so a scaled weight is exact, and a product with it is the same product shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Factors = Callable[[str, Sequence[int]], float]
"""The factor of a tensor of a folder, by its name and shape; 1 where it stays what it is."""
