"""A file of LoRA factors for graphs, as `llmconv onnx-adapter` writes it: its modules and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.files.source_file import open_source
from llmconv.not_a_model_folder import ONNX_ADAPTER
from llmconv.tensors import BY_NAME, LazyTensor, in_memory


def is_adapter_factors(path: Path) -> bool:
    """Whether the file is an adapter file of onnxruntime."""
    if not path.is_file():
        return False
    with open_source(path) as file:
        return file.read(8)[4:] == ONNX_ADAPTER


def factor_tensors(path: Path) -> dict[str, LazyTensor]:
    """The factors by the names of graph inputs, float32: A [rank, in] and B [out, rank].

    Raises:
        MalformedInput: the file is damaged.
    """
    from llmconv.runtime.onnxruntime.adapter_file import read_adapter  # noqa: PLC0415 - imports onnxruntime

    return {name: in_memory(array, BY_NAME["float32"]) for name, array in read_adapter(path).items()}


def factors_summary(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The fields of an adapter for `inspect`: kind, ranks, kinds of modules, and the number of modules.

    Args:
        tensors: from `factor_tensors`.
    """
    from llmconv.runtime.onnxruntime.lora_names import FACTOR_A, is_factor, module_of  # noqa: PLC0415 - imports onnx

    modules = {module_of(name) for name in tensors if is_factor(name)}
    shapes = [tensor.shape for name, tensor in tensors.items() if name.endswith(FACTOR_A) and tensor.shape]
    ranks = sorted({shape[0] for shape in shapes})
    return {
        "peft_type": "LORA",
        "r": ranks[0] if len(ranks) == 1 else ranks,
        "targets": sorted({module.rpartition(".")[2] for module in modules}),
        "modules": len(modules),
    }
