"""Masks of tokens that attend to each other in both directions, as those of an image do.

transformers' whole model makes them from the kind of each token; its text model alone takes them ready, by layer type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, sliding_window_overlay

FULL, SLIDING = "full_attention", "sliding_attention"

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, of row, head, query index and key index."""


def masks_of(config: Any, kinds: Tensor, given: Mapping[str, Any]) -> Tensor | dict[str, Tensor]:
    """The mask, or that of each type of layers: causal or in the same block, and in the window for those that slide.

    Args:
        config: of the text model.
        kinds: which new tokens belong to a block, 1 or 0, int64 `[batch, sequence]`; neighbors form one block.
        given: arguments of `create_causal_mask`: embeddings, mask, cache and positions.
    """
    visible = same_block(kinds)
    mask: Tensor = create_causal_mask(config, or_mask_function=visible, **given)
    types = getattr(config, "layer_types", None)
    if not types:
        return mask
    masks = {FULL: mask}
    if SLIDING in types:
        window = sliding_window_overlay(config.sliding_window)
        masks[SLIDING] = create_causal_mask(config, or_mask_function=visible, and_mask_function=window, **given)
    return masks


def same_block(kinds: Tensor) -> Visible:
    """Whether two new tokens belong to the same block; no token of the past does.

    Args:
        kinds: see `masks_of`.
    """
    inside = kinds == 1
    starts = inside & ~torch.nn.functional.pad(inside, (1, -1))
    blocks = torch.where(inside, starts.to(torch.int64).cumsum(dim=1), 0)
    last = kinds.shape[1] - 1

    def visible(rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        first = queries[:, :, :1]
        new = keys - first
        of_keys = torch.where((new >= 0) & (new <= last), blocks[rows, new.clamp(0, last)], 0)
        of_queries = blocks[rows, queries - first]
        return (of_queries == of_keys) & (of_queries > 0)

    return visible
