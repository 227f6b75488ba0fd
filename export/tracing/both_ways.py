"""Masks of tokens that attend to each other in both directions, as those of an image do.

transformers' whole model makes them from the kind of each token; its text model alone takes them ready, by layer type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, sliding_window_overlay

from llmconv.runtime.extra_inputs import FULL, SLIDING

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, of row, head, query index and key index."""


def masks_of(
    config: Any, kinds: Tensor, types: Collection[str], given: Mapping[str, Any]
) -> Tensor | dict[str, Tensor]:
    """The mask, or that of each type of layers: causal or in the same block, and in the window for those that slide.

    Args:
        config: of the text model.
        kinds: which new tokens belong to a block, 1 or 0, int64 `[batch, sequence]`; neighbors form one block.
        types: of layers in which tokens see their block, see `ExtraInput.both_ways`; the others are causal.
        given: arguments of `create_causal_mask`: embeddings, mask, cache and positions.
    """
    block = same_block(kinds)

    def mask(kind: str) -> Tensor:
        window = sliding_window_overlay(config.sliding_window) if kind == SLIDING else None
        visible = block if kind in types else None
        made: Tensor = create_causal_mask(config, or_mask_function=visible, and_mask_function=window, **given)
        return made

    kinds_of_layers = dict.fromkeys(getattr(config, "layer_types", None) or ())
    return {kind: mask(kind) for kind in kinds_of_layers} or mask(FULL)


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
