"""Renaming the tensors of LLM Foundry's MPT to transformers' names, and fusing query, key and value."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmconv.convert.algebra.operations import concat
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
