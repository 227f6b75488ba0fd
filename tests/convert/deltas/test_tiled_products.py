"""Products in tiles are the products."""

from __future__ import annotations

import numpy as np
import pytest

from llmconv.convert.deltas.low_rank import product, transposed_product


@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (8, 64), (300, 1100), (129, 65)])
@pytest.mark.parametrize("width", [1, 24, 33])
def test_products_in_tiles_are_the_products(shape: tuple[int, int], width: int) -> None:
    generator = np.random.default_rng(0)
    left = generator.standard_normal(shape)
    right, turned = generator.standard_normal((shape[1], width)), generator.standard_normal((shape[0], width))
    np.testing.assert_allclose(product(left, right), left @ right, atol=1e-11)
    np.testing.assert_allclose(transposed_product(left, turned), left.T @ turned, atol=1e-11)


def test_a_product_has_the_wider_dtype() -> None:
    left, right = np.ones((3, 2), np.float32), np.ones((2, 1))
    assert product(left, right).dtype == transposed_product(right, right).dtype == np.float64
    assert product(left, right.astype(np.float32)).dtype == np.float32


def test_an_empty_side_gives_zeros_or_nothing() -> None:
    assert product(np.ones((3, 0)), np.ones((0, 2))).tolist() == [[0, 0]] * 3
    assert transposed_product(np.ones((3, 2)), np.ones((3, 0))).shape == (2, 0)
