"""Stand for processors of transformers whose modules need torchvision: they write the same text about images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.builders.seeing import IMAGE_TOKEN


@dataclass(frozen=True)
class PixtralText:
    """The text and images of transformers' `PixtralProcessor`, whose module needs torchvision.

    Attributes:
        images: processor of images.
        tokenizer: of characters.
    """

    images: Any
    tokenizer: Any

    def __call__(self, text: Sequence[str], images: Any, return_tensors: str, **options: Any) -> dict[str, Any]:
        """Tokens and images of one prompt, tensors or arrays.

        Args:
            text: one prompt.
            images: of Pillow, of one prompt.
            return_tensors: `pt` or `np`.
            options: of the tokenizer.
        """
        import torch  # noqa: PLC0415

        found = self.images(images[0], return_tensors=return_tensors)
        first, *others = text[0].split(IMAGE_TOKEN)
        sizes = np.asarray(found["image_sizes"]).tolist()
        parts = [_pixtral_rows(*size) + other for size, other in zip(sizes, others, strict=True)]
        ids = self.tokenizer(first + "".join(parts), **options)["input_ids"]
        tokens = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        made = tokens if return_tensors == "np" else {name: torch.from_numpy(one) for name, one in tokens.items()}
        return {**made, **found}


def _pixtral_rows(height: int, width: int) -> str:
    """Rows of placeholders, with a token after each."""
    return "|".join([IMAGE_TOKEN * (width // 8)] * (height // 8)) + "}"


LLAMA4_TOKENS = (
    "<|image|>",
    "<|patch|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)

TILE, PATCHES = 24, 9
"""Pixels of a side of a tile, and its number of features."""


@dataclass(frozen=True)
class Llama4Tiles:
    """The text of transformers' `Llama4Processor`, and tiles in bfloat16 as it makes them, resized by Pillow.

    Attributes:
        tokenizer: of characters and `LLAMA4_TOKENS`.
    """

    tokenizer: Any
    image_token = LLAMA4_TOKENS[0]

    def __call__(self, text: Sequence[str], images: Any, return_tensors: str, **options: Any) -> dict[str, Any]:
        """Tokens and tiles of one prompt, tensors.

        Args:
            text: one prompt.
            images: of Pillow, of one prompt.
            return_tensors: `pt`.
            options: of the tokenizer.
        """
        import torch  # noqa: PLC0415

        first, *others = text[0].split(self.image_token)
        grids = [(-(-one.height // TILE), -(-one.width // TILE)) for one in images[0]]
        parts = [_llama4_text(*grid) + other for grid, other in zip(grids, others, strict=True)]
        ids = torch.tensor([self.tokenizer(first + "".join(parts), **options)["input_ids"]])
        tiles = np.concatenate([_tiles(one, *grid) for one, grid in zip(images[0], grids, strict=True)])
        pixels = torch.from_numpy(tiles).to(torch.bfloat16)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _llama4_text(rows: int, columns: int) -> str:
    """The text of an image of these tiles, and of its small copy."""
    patches = LLAMA4_TOKENS[1] * PATCHES
    tiles = ("<|tile_x_separator|>".join([patches] * columns) + "<|tile_y_separator|>") * rows
    return f"<|image_start|>{tiles if rows * columns > 1 else ''}<|image|>{patches}<|image_end|>"


def _tiles(image: Any, rows: int, columns: int) -> Any:
    """Tiles of an image and its small copy, float32 [tiles, 3, TILE, TILE]."""
    whole = np.asarray(image.convert("RGB").resize((columns * TILE, rows * TILE)), np.float32)
    small = np.asarray(image.convert("RGB").resize((TILE, TILE)), np.float32)[None]
    cut = whole.reshape(rows, TILE, columns, TILE, 3).swapaxes(1, 2).reshape(-1, TILE, TILE, 3)
    kept = np.concatenate([cut, small]) if rows * columns > 1 else small
    return (kept.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32)
