"""The tensors of an MPT under transformers' names: renamed, fused, and compared with what its class holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmconv.convert.composer.mpt import HINT, read_sizes
from llmconv.convert.mapping import concat, listing
from llmconv.errors import MalformedInput, UnsupportedInput
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


def check_tensors(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> None:
    """Exactly the tensors of transformers' MPT are there, in its shapes.

    Raises:
        UnsupportedInput: tensors that it does not have, such as biases or learned positions.
        MalformedInput: missing tensors, or tensors of another shape.
    """
    expected = _shapes(read_sizes(config, source))
    head = {"lm_head.weight": expected["transformer.wte.weight"]} if "lm_head.weight" in tensors else {}
    if extra := [name for name in tensors if name not in expected and name not in head]:
        raise UnsupportedInput(
            f"`{source}` holds {len(extra)} tensors that transformers' MPT does not have: {listing(extra)}", hint=HINT
        )
    wrong = [name for name, shape in (expected | head).items() if name not in tensors or tensors[name].shape != shape]
    if wrong:
        raise MalformedInput(
            f"`{source}` lacks {len(wrong)} tensors of its configuration, or has other shapes: {listing(wrong)}",
            hint="the configuration is of another model, or the checkpoint is partial",
        )


def _shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Name to shape (transformers `MptForCausalLM`), without the head."""
    width = sizes["d_model"]
    block: dict[str, tuple[int, ...]] = {"norm_1": (width,), "norm_2": (width,), "attn.Wqkv": (3 * width, width)}
    block |= {"attn.out_proj": (width, width), "ffn.up_proj": (4 * width, width), "ffn.down_proj": (width, 4 * width)}
    ends = {"transformer.wte.weight": (sizes["vocab_size"], width), "transformer.norm_f.weight": (width,)}
    layers = range(min(sizes["n_layers"], 10_000))
    return ends | {f"transformer.blocks.{i}.{name}.weight": shape for i in layers for name, shape in block.items()}
