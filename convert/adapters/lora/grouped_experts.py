"""Factors of all experts in one tensor, as NeMo AutoModel keeps them in its models, taken apart by experts.

Layout (NVIDIA-NeMo/Automodel `components/_peft/lora_experts.py`, `components/moe/state_dict_mixin.py`; vLLM has the
same): `experts.lora_gate_and_up_A` E×in×r, `experts.lora_gate_and_up_B` E×r×2·out, gate before up, and
`experts.lora_down_A`, `experts.lora_down_B`. A is shared by gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from llmconv.errors import MalformedInput
from llmconv.tensors import Array, LazyTensor

GROUPED = re.compile(r"(?P<experts>.+\.experts)\.lora_(?P<of>gate_and_up|down)_(?P<part>[AB])(?:\.weight)?")
MODULES = {"gate_and_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def ungrouped(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of an adapter, with those of grouped experts as factors of each expert's layers.

    Args:
        tensors: by name in the adapter's file.

    Raises:
        MalformedInput: a grouped tensor that does not have three dimensions, or no two equal halves.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if match := GROUPED.fullmatch(name):
            result |= _of_experts(name, tensor, match)
        else:
            result[name] = tensor
    return result


def _of_experts(name: str, tensor: LazyTensor, match: re.Match[str]) -> dict[str, LazyTensor]:
    modules = MODULES[match["of"]]
    parts = len(modules) if match["part"] == "B" else 1
    if len(tensor.shape) != 3 or tensor.shape[2] % parts:
        raise MalformedInput(
            f"`{name}` has shape {list(tensor.shape)}; grouped experts have three dimensions, gate as many rows as up",
            hint="gather the parameters before saving the adapter",
        )
    size = tensor.shape[2] // parts
    return {
        f"{match['experts']}.{expert}.{module}.lora_{match['part']}.weight": _matrix(tensor, expert, at % parts, size)
        for expert in range(tensor.shape[0])
        for at, module in enumerate(modules)
    }


def _matrix(tensor: LazyTensor, expert: int, part: int, size: int) -> LazyTensor:
    """Columns `part·size` to `(part + 1)·size` of one expert's matrix, transposed."""

    def load(start: int, stop: int) -> Array:
        columns = slice(part * size + start, part * size + stop)
        return np.ascontiguousarray(tensor.rows(expert, expert + 1)[0][:, columns].T)

    return LazyTensor(tensor.dtype, (size, tensor.shape[1]), load)
