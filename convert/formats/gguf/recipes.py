"""Which type each matrix of a quantized GGUF file has, by the names that llama.cpp gives the mixtures.

Source: llama.cpp `src/llama-quant.cpp` (`llama_tensor_get_type_impl`, `tensor_type_fallback`). A matrix that costs
little for what it does, such as that of values, gets more bits in some layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmconv.files.gguf_file import BLOCKS

FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where rows do not divide into blocks of 256
ELEMENTS = {block.name: block.elements for block in BLOCKS.values()}
VALUES = re.compile(r"\.attn_(?:v|qkv|kv_b)\.weight$")
LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class _Model:
    recipe: str
    architecture: str
    layers: int
    experts: int
    values: int  # layers with a matrix of values
    weighted: bool  # with an importance matrix
    large: bool  # 80 layers whose heads share keys and values: llama.cpp's 70B


def types_of(
    columns: Mapping[str, int],
    recipe: str,
    architecture: str,
    keys: Mapping[str, Any],
    *,
    tied: bool,
    weighted: bool = False,
) -> dict[str, str]:
    """The type of each matrix, llama.cpp's name; `F16` where rows do not divide into any blocks.

    Args:
        columns: elements of a row by the name of the matrix, of those that are quantized.
        recipe: llama.cpp's name of a mixture, which begins with the type of most matrices: `Q4_K_M`, `Q5_0`.
        architecture: llama.cpp's name.
        keys: the metadata of the model, without the architecture.
        tied: whether the embedding is the head.
        weighted: whether there is an importance matrix.
    """
    layers = int(keys["block_count"])
    heads, groups = keys["attention.head_count"], keys.get("attention.head_count_kv")
    model = _Model(
        recipe,
        architecture,
        layers,
        int(keys.get("expert_count", 0)),
        sum(bool(VALUES.search(name)) for name in columns),
        weighted,
        layers == 80 and (architecture == "qwen2" or (architecture == "llama" and heads != groups)),
    )
    head = "token_embd.weight" if tied else "output.weight"
    found, seen = dict[str, str](), 0
    for name in sorted(columns, key=_layer):
        kind = _head(columns[name], model) if name == head else _kind(name, seen, model)
        seen += bool(VALUES.search(name))
        found[name] = _fitting(kind, columns[name])
    return {name: found[name] for name in columns}


def _layer(name: str) -> int:
    number = LAYER.match(name)
    return int(number[1]) if number else -1


def _head(columns: int, model: _Model) -> str:
    kind = model.recipe[:4]
    if kind == "Q8_0" or model.architecture == "falcon" or columns % ELEMENTS[kind]:
        return "Q8_0"
    return "Q6_K"


def _kind(name: str, seen: int, model: _Model) -> str:
    """The type by the name of a matrix, and the number of matrices of values before it."""
    kind = model.recipe[:4]
    if VALUES.search(name):
        if model.experts == 8:
            return "Q8_0"
        kind = _of_values(kind, seen, model)
        return "Q5_K" if model.large and kind == "Q4_K" else kind
    if name.endswith(".attn_k.weight") and model.experts == 8:
        return "Q8_0"
    if ".ffn_down" in name:
        return _of_down(kind, _layer(name), model)
    four = model.recipe in ("Q4_K_M", "Q4_K_S")
    if name.endswith(".attn_output.weight") and model.experts == 8 and four and model.architecture != "falcon":
        return "Q5_K"
    return kind


def _of_values(kind: str, seen: int, model: _Model) -> str:
    if model.recipe in ("Q4_K_M", "Q5_K_M") and _more_bits(seen, model.values):
        return "Q6_K"
    return "Q5_K" if model.recipe == "Q4_K_S" and seen < 4 else kind


def _of_down(kind: str, layer: int, model: _Model) -> str:
    more, falcon = _more_bits(layer, model.layers), model.architecture == "falcon"
    if model.recipe == "Q4_K_M" and falcon:
        return "Q6_K" if layer < model.layers // 16 else "Q5_K" if more else kind
    if model.recipe in ("Q4_K_M", "Q5_K_M") and more:
        return "Q6_K"
    if layer < model.layers // 8 and model.weighted and model.recipe in ("Q4_0", "Q5_0"):
        return kind[:3] + "1"
    return "Q5_K" if model.recipe == "Q4_K_S" and not falcon and layer < model.layers // 8 else kind


def _more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third between (`use_more_bits`)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fitting(kind: str, columns: int) -> str:
    """The type, or the one of smaller blocks that takes its place."""
    if columns % ELEMENTS[kind]:
        kind = FALLBACK.get(kind, kind)
    return "F16" if columns % ELEMENTS[kind] else kind
