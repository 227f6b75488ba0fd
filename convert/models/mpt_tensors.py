"""The tensors of LLM Foundry's MPT as transformers' class has them: renamed, fused, with all heads and the full MLP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmconv.convert.algebra.operations import concat, slice_rows
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor

OLD_NAMES = ((".ln_", ".norm_"), (".mlp_up.", ".up_proj."), (".mlp_down.", ".down_proj."), (".mlp.", ".ffn."))
"""Names from before LLM Foundry (its `scripts/misc/convert_examples_ckpt.py`)."""


def native_tensors(tensors: Mapping[str, LazyTensor], source: str) -> dict[str, LazyTensor]:
    """The tensors under transformers' names; separate query, key and value matrices become one (`fused_qkv` false).

    Raises:
        MalformedInput: two tensors with one name, or matrices that do not fit together.
    """
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        new = name.replace(".norm_attn_norm.", ".")
        for old, modern in OLD_NAMES:
            new = new.replace(old, modern)
        if (fused := re.sub(r"\.W[qkv]\.weight$", ".Wqkv.weight", new)) != new:
            parts = [tensors.get(re.sub(r"\.W[qkv]\.", f".W{part}.", name)) for part in "qkv"]
            new, tensor = fused, renamed.get(fused) or _fused(fused, parts, source)
        elif new in renamed:
            raise MalformedInput(f"`{source}` holds `{new}` twice, under different names", hint="save the model alone")
        renamed[new] = tensor
    return renamed


def _fused(name: str, parts: list[LazyTensor | None], source: str) -> LazyTensor:
    try:
        return concat([part for part in parts if part is not None], 0)
    except ValueError as error:
        raise MalformedInput(
            f"`{source}` holds parts of `{name}` that do not fit together", hint="the checkpoint is damaged"
        ) from error


def enlarged(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The tensors with a head of keys and values for each of queries, and an MLP four times as wide as the model.

    Foundry gives each head of keys to as many neighboring heads of queries (`repeat_kv_for_gqa`); hidden units without
    weights add nothing. Tensors of other shapes stay as they are.

    Args:
        tensors: by transformers' names.
        config: of transformers' MPT.
    """
    width, heads = int(config["d_model"]), int(config["n_heads"])
    return {name: _enlarged(name, tensor, width, heads) for name, tensor in tensors.items()}


def _enlarged(name: str, tensor: LazyTensor, width: int, heads: int) -> LazyTensor:
    size, full = width // heads, 4 * width
    if len(tensor.shape) != 2:
        return tensor
    rows, columns = tensor.shape
    if name.endswith(".attn.Wqkv.weight") and columns == width < rows < 3 * width and not (rows - width) % (2 * size):
        count = (rows - width) // (2 * size)
        if heads % count:
            return tensor
        parts = [slice_rows(tensor, start, start + size) for start in range(width, rows, size)]
        repeated = [part for part in parts for _ in range(heads // count)]
        return concat([slice_rows(tensor, 0, width), *repeated], 0)
    if name.endswith(".ffn.up_proj.weight") and columns == width and rows < full:
        return concat([tensor, _zeros(tensor, (full - rows, width))], 0)
    if name.endswith(".ffn.down_proj.weight") and rows == width and columns < full:
        return concat([tensor, _zeros(tensor, (width, full - columns))], 1)
    return tensor


def _zeros(like: LazyTensor, shape: tuple[int, int]) -> LazyTensor:
    return LazyTensor(like.dtype, shape, lambda start, stop: np.zeros((stop - start, shape[1]), like.dtype.numpy))
