"""The towers of Qwen2-VL and later: patches of one image of any size to its features.

Values that depend on the numbers of rows and columns of patches are inputs of the graph, which the runtime computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from llmconv.errors import UnsupportedInput
from llmconv.export.input_map import Port
from llmconv.export.vision.tower import TowerInput, VisionTower
from llmconv.runtime.images.family import DEEPSTACK_FEATURES, IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.images.qwen_vl import CELL_WEIGHTS, CELLS, PATCH_POSITIONS, WINDOW_IDS
from llmconv.runtime.rotary_axes import DEEPSTACK_LAYERS

PATCHES, TOKENS = "num_patches", "num_tokens"
"""Symbolic axes: patches of the image, and features, of which each is made of several patches."""


class PatchFeatures(nn.Module):
    """The features of one image, whose patches all attend to each other."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, patch_positions: Tensor) -> Tensor:
        """Features `[tokens, hidden]` of `pixel_values` `[patches, values of a patch]`, patches of a feature adjacent.

        `patch_positions` are row and column of each patch, int64 `[patches, 2]`.
        """
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values)
        positions = tower.rotary_pos_emb(hidden, patch_positions)
        with attending(tower.blocks):
            for block in tower.blocks:
                hidden = block(hidden, cu_seqlens=None, position_embeddings=positions)
        features: Tensor = tower.merger(hidden)
        return features


class WindowedFeatures(nn.Module):
    """The features of one image, whose patches attend to those of their window in most layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, patch_positions: Tensor, window_ids: Tensor) -> Tensor:
        """Features `[tokens, hidden]`, with inputs as for `PatchFeatures` and `window_ids` int64 `[patches]`."""
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values)
        positions = tower.rotary_pos_emb(hidden, patch_positions)
        other = window_ids[:, None] != window_ids[None]
        windows = other.to(hidden.dtype) * torch.finfo(hidden.dtype).min
        with attending(tower.blocks):
            for number, block in enumerate(tower.blocks):
                mask = None if number in tower.fullatt_block_indexes else windows[None, None]
                hidden = block(hidden, cu_seqlens=mask, position_embeddings=positions)
        features: Tensor = tower.merger(hidden)
        return features


class DeepstackedFeatures(nn.Module):
    """The features of one image, and those after some of the layers, for the first layers of the decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, pixel_values: Tensor, patch_positions: Tensor, cells: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features `[tokens, hidden]`, and further ones `[tokens, layers * hidden]`; inputs as `PatchFeatures`.

        `cells` are places in the table of position embeddings, int64 `[patches, 4]`, `weights` theirs `[patches, 4]`.
        """
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values) + (tower.pos_embed(cells) * weights[:, :, None]).sum(1)
        positions = tower.rotary_pos_emb(hidden, patch_positions)
        deep, chosen = [], list(tower.deepstack_visual_indexes)
        with attending(tower.blocks):
            for number, block in enumerate(tower.blocks):
                hidden = block(hidden, cu_seqlens=None, position_embeddings=positions)
                if number in chosen:
                    deep.append(tower.deepstack_merger_list[chosen.index(number)](hidden))
        return tower.merger(hidden), torch.cat(deep, dim=-1)


def embedded(tower: Any, pixel_values: Tensor) -> Tensor:
    """Embeddings `[patches, hidden]` of pixel values `[patches, values of a patch]`.

    The convolution's kernel is as large as a patch, so it is a product.
    """
    convolution = tower.patch_embed.proj
    return linear(pixel_values, convolution.weight.flatten(1), convolution.bias)


@contextmanager
def attending(blocks: Sequence[Any]) -> Iterator[None]:
    """Context in which attention takes a mask as `cu_seqlens`, instead of lengths that it would loop over."""
    for block in blocks:
        block.attn.forward = partial(_attention, block.attn)
    try:
        yield
    finally:
        for block in blocks:
            del block.attn.forward


def _attention(
    module: Any, hidden_states: Tensor, cu_seqlens: Tensor | None, position_embeddings: Any, **_: Any
) -> Tensor:
    """Attention of one image; `cu_seqlens` is added to the scores."""
    code, count = sys.modules[type(module).__module__], hidden_states.shape[0]
    query, key, value = module.qkv(hidden_states).reshape(count, 3, module.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    query, key = code.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    heads = [one.transpose(0, 1).unsqueeze(0) for one in (query, key, value)]
    found, _weights = code.eager_attention_forward(module, *heads, attention_mask=cu_seqlens, scaling=module.scaling)
    projected: Tensor = module.proj(found.reshape(count, -1))
    return projected


def patches(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches and their positions; `precision` is the dtype of the pixels."""
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros((_example(config), size), dtype=getattr(torch, precision))
    positions = torch.zeros((_example(config), 2), dtype=torch.int64)
    return (
        TowerInput(Port(PIXEL_VALUES, precision, (PATCHES, size)), pixels),
        TowerInput(Port(PATCH_POSITIONS, "int64", (PATCHES, 2)), positions),
    )


def patches_in_windows(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches, their positions and windows; arguments as for `patches`."""
    ids = torch.zeros(_example(config), dtype=torch.int64)
    return (*patches(config, precision), TowerInput(Port(WINDOW_IDS, "int64", (PATCHES,)), ids))


def patches_with_cells(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches, their positions and their places in the table; arguments as for `patches`.

    Raises:
        UnsupportedInput: another number of layers of the decoder gets features than in any released model.
    """
    if len(config.vision_config.deepstack_visual_indexes) != DEEPSTACK_LAYERS:
        raise UnsupportedInput(
            f"`deepstack_visual_indexes` does not have {DEEPSTACK_LAYERS} layers", hint="correct `config.json`"
        )
    cells, weights = (torch.zeros((_example(config), 4), dtype=getattr(torch, one)) for one in ("int64", precision))
    return (
        *patches(config, precision),
        TowerInput(Port(CELLS, "int64", (PATCHES, 4)), cells),
        TowerInput(Port(CELL_WEIGHTS, precision, (PATCHES, 4)), weights),
    )


def _example(config: Any) -> int:
    """Number of patches in the trace, which is that of three features."""
    return 3 * int(config.vision_config.spatial_merge_size) ** 2


OF_PATCHES = ((IMAGE_FEATURES, TOKENS),)
QWEN2_VL = VisionTower(module=PatchFeatures, inputs=patches, outputs=OF_PATCHES)
QWEN2_5_VL = VisionTower(alike=False, module=WindowedFeatures, inputs=patches_in_windows, outputs=OF_PATCHES)
QWEN3_VL = VisionTower(
    alike=False,
    module=DeepstackedFeatures,
    inputs=patches_with_cells,
    outputs=(*OF_PATCHES, (DEEPSTACK_FEATURES, TOKENS)),
)
