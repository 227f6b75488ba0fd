"""Packing of the features of tiles: the rows are those of transformers for images of any size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.runtime.images.families import AnyresImages, OneVisionImages, best_resolution, resize_bilinear
from tests.builders.tiled import GRIDS

SIZES = [(1, 1), (5, 90), (90, 5), (12, 12), (13, 40), (31, 9), (40, 38), (64, 65), (97, 33), (480, 641)]
TILE, SIDE, HIDDEN = 12, 3, 5


def config_of(limit: str = "anyres_max_9") -> Any:
    vision = SimpleNamespace(image_size=TILE, patch_size=TILE // SIDE)
    return SimpleNamespace(vision_config=vision, image_grid_pinpoints=GRIDS, vision_aspect_ratio=limit)


def drawn(size: tuple[int, int]) -> tuple[Any, Any]:
    """Features of the tiles of an image, and what ends a row."""
    random, (height, width) = np.random.default_rng(size[0] * 1000 + size[1]), best_resolution(size, GRIDS)
    tiles = height // TILE * (width // TILE) + 1
    draw = random.standard_normal
    return draw((tiles, SIDE**2, HIDDEN)).astype(np.float32), draw(HIDDEN).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_llava_next_are_those_of_transformers(size: tuple[int, int]) -> None:
    import torch  # noqa: PLC0415
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel  # noqa: PLC0415

    tiles, newline = drawn(size)
    (expected,), _ = LlavaNextModel.pack_image_features(
        SimpleNamespace(config=config_of()), [torch.from_numpy(tiles)], [size], "default", torch.from_numpy(newline)
    )
    given = {"pixel_values": np.zeros((1, len(tiles), 3, TILE, TILE)), "image_sizes": np.array([size])}
    outputs = [{"image_features": tiles, "newline": newline[None]}]
    assert np.array_equal(AnyresImages(config_of()).rows(outputs, given), expected.numpy())


@pytest.mark.parametrize("limit", ["anyres_max_1", "anyres_max_4", "anyres_max_9"])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_llava_onevision_are_those_of_transformers(size: tuple[int, int], limit: str) -> None:
    import torch  # noqa: PLC0415
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel  # noqa: PLC0415

    tiles, newline = drawn(size)
    (expected,), _ = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config_of(limit)), [torch.from_numpy(tiles)], [size], torch.from_numpy(newline), limit
    )
    given = {"pixel_values": np.zeros((1, len(tiles), 3, TILE, TILE)), "image_sizes": np.array([size])}
    found = OneVisionImages(config_of(limit)).rows([{"image_features": tiles, "newline": newline[None]}], given)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


def test_of_several_images_each_is_one_tile() -> None:
    tiles, newline = drawn((12, 12))
    given = {
        "pixel_values": np.zeros((2, 1, 3, TILE, TILE)),
        "image_sizes": np.array([[40, 38], [9, 31]]),
        "batch_num_images": np.array([2]),
    }
    family = OneVisionImages(config_of())
    assert [len(run["pixel_values"]) for run in family.runs(given)] == [1, 1]
    rows = family.rows([{"image_features": tiles[:1], "newline": newline[None]}] * 2, given)
    assert np.array_equal(rows, np.concatenate([tiles[0], newline[None]] * 2))
    assert family.features_of(given, SIDE**2) == [SIDE**2 + 1] * 2


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (5, 4), (12, 9)])
def test_features_are_resized_as_torch_resizes(size: tuple[int, int]) -> None:
    import torch  # noqa: PLC0415

    features = np.random.default_rng(0).standard_normal((7, 9, HIDDEN))
    expected = torch.nn.functional.interpolate(torch.from_numpy(features).permute(2, 0, 1)[None], size, mode="bilinear")
    np.testing.assert_allclose(resize_bilinear(features, *size), expected[0].permute(1, 2, 0).numpy(), atol=1e-12)


def test_a_tower_with_another_number_of_features_is_refused() -> None:
    tiles, newline = drawn((12, 12))
    with pytest.raises(InputRefused, match="10 features, and not 3 rows of 3"):
        AnyresImages(config_of()).packed(np.zeros((2, 10, HIDDEN)), newline, (12, 12), (1, 1))


def test_another_aspect_ratio_is_refused() -> None:
    family = OneVisionImages(config_of("pad"))
    with pytest.raises(InputRefused, match="`vision_aspect_ratio` is `pad`"):
        family.features_of({"image_sizes": np.array([[40, 38]])}, SIDE**2)
