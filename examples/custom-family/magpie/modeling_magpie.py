"""Magpie: a decoder with ALiBi, one key/value head and a squared ReLU, in none of transformers' own spellings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_magpie import MagpieConfig  # noqa: TID252 - the modules of a checkpoint know no absolute name


def alibi(attention_mask: Tensor, length: int, n_heads: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: less the farther a key lies back, and the lowest number where none may be seen.

    Args:
        attention_mask: `[batch, total]`, 0 at padding.
        length: how many of the tokens are new.

    Returns:
        `[batch, n_heads, length, total]`. Source: Press, Smith and Lewis, arXiv 2108.12409.
    """
    total = attention_mask.shape[1]
    keys = torch.arange(total, device=attention_mask.device)
    distance = keys - (keys[:length] + total - length)[:, None]
    slopes = 2.0 ** (-8.0 / n_heads * torch.arange(1, n_heads + 1, device=keys.device))
    unseen = (distance > 0) | (attention_mask[:, None, None, :] == 0)
    bias = slopes.to(dtype)[:, None, None] * distance.to(dtype)
    return bias.masked_fill(unseen, torch.finfo(dtype).min)


class MagpieAttention(nn.Module):
    """Every head of the queries looks at the same keys and values."""

    def __init__(self, config: MagpieConfig, block: int) -> None:
        super().__init__()
        self.block, self.n_heads, self.size = block, config.n_heads, config.d_model // config.n_heads
        self.to_queries = nn.Linear(config.d_model, config.d_model, bias=False)
        self.to_keys_and_values = nn.Linear(config.d_model, 2 * self.size, bias=False)
        self.mix = nn.Linear(config.d_model, config.d_model)

    def forward(self, hidden: Tensor, bias: Tensor, cache: Any) -> Tensor:
        """`[batch, length, d_model]` in and out; the cache grows by `[batch, 1, length, size]`."""
        batch, length, width = hidden.shape
        queries = self.to_queries(hidden).view(batch, length, self.n_heads, self.size).transpose(1, 2)
        keys, values = self.to_keys_and_values(hidden)[:, None].chunk(2, dim=-1)
        if cache is not None:
            keys, values = cache.update(keys, values, self.block)
        scores = queries @ keys.transpose(-1, -2) * self.size**-0.5 + bias
        seen = scores.softmax(dim=-1) @ values
        return self.mix(seen.transpose(1, 2).reshape(batch, length, width))


class MagpieBlock(nn.Module):
    """Attention, then two linear layers with a squared ReLU between them."""

    def __init__(self, config: MagpieConfig, block: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attention = MagpieAttention(config, block)
        self.widen = nn.Linear(config.d_model, 4 * config.d_model)
        self.narrow = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, hidden: Tensor, bias: Tensor, cache: Any) -> Tensor:
        """`[batch, length, d_model]` in and out."""
        hidden = hidden + self.attention(self.norm_1(hidden), bias, cache)
        return hidden + self.narrow(torch.relu(self.widen(self.norm_2(hidden))) ** 2)


class MagpieForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model."""

    config_class = MagpieConfig

    def __init__(self, config: MagpieConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_version = nn.Embedding(config.n_versions, config.d_model)
        self.blocks = nn.ModuleList(MagpieBlock(config, block) for block in range(config.n_blocks))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        version: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[batch, length, vocab]`; `attention_mask` `[batch, total]` covers the past, too.

        `version` `[batch]` says which version of the rhyme each sequence is; without it, all are the first.
        """
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        version = torch.zeros_like(input_ids[:, 0]) if version is None else version
        hidden = self.embed(input_ids) + self.embed_version(version)[:, None]
        bias = alibi(attention_mask, input_ids.shape[1], self.config.n_heads, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, bias, cache)
        return CausalLMOutputWithPast(logits=self.head(self.norm(hidden)), past_key_values=cache)
