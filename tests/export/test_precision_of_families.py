"""Half-precision graphs of twenty families: types, weights and logits, judged without `verify`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from llmconv.export import export
from llmconv.runtime import OrtRunner, default_positions
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.guard import external_tensors
from tests.export.test_precision import KINDS, inferred
from tools.tiny_models import cast_weights, save_tiny

FAMILIES = (
    *("llama", "gpt2", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3", "mistral", "phi", "phi3", "bloom", "falcon"),
    *("opt", "gptj", "gpt_neox", "stablelm", "cohere2", "olmo2", "granite", "mamba2", "glm4", "starcoder2"),
)
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if name == "qwen3" else pytest.mark.slow)
    for name in FAMILIES
    for dtype in KINDS
]
SAME = {"Gemm", "MatMul", "Add", "Mul", "Sub", "Div", "Concat", "Where", "Min", "Max"}
"""Operators whose float inputs must have one type."""

IDS = np.random.default_rng(0).integers(3, 90, (2, 12))
MASK = np.ones_like(IDS)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "dtype"), CASES)
def test_types_are_strict_weights_are_mapped_and_logits_are_the_models(
    tmp_path: Path, model_type: str, dtype: str
) -> None:
    save_tiny(model_type, tmp_path, 2)
    cast_weights(tmp_path, dtype)
    before = _identity(tmp_path / "model.safetensors")
    export(tmp_path, incremental=True, prefill=True, precision=dtype)
    assert _identity(tmp_path / "model.safetensors") == before
    _require_types(tmp_path / "decode.onnx", dtype)
    _require_logits(tmp_path, dtype)


def _identity(path: Path) -> tuple[int, int, int]:
    """What changes if a file is written: its inode, size and time."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _require_types(path: Path, dtype: str) -> None:
    model = inferred(path)
    mapped = [tensor for tensor in external_tensors(model) if tensor.data_type == KINDS[dtype]]
    casts = {node.input[0] for node in model.graph.node if node.op_type == "Cast" and _to(node) == KINDS[dtype]}
    assert mapped
    assert not casts & {tensor.name for tensor in mapped}
    types = {port.name: port.type.tensor_type.elem_type for port in (*model.graph.value_info, *model.graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        kinds = {types.get(name) for name in node.input} & {TensorProto.FLOAT, *KINDS.values()}
        assert node.op_type not in SAME or len(kinds) < 2, node.name


def _to(node: onnx.NodeProto) -> int:
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _require_logits(folder: Path, dtype: str) -> None:
    """The error of the graph is that of the eager model in the same dtype, both against float64."""
    runners = OrtRunner.from_folder(folder), EagerRunner(folder, dtype), EagerRunner(folder, "float64")
    positions = default_positions(MASK, IDS.shape[1])
    graph, rounded, exact = (runner.prefill(IDS, MASK, positions).logits.astype(np.float64) for runner in runners)
    error, noise = (np.sqrt(np.mean((logits - exact) ** 2)) for logits in (graph, rounded))
    assert noise / 4 < error < 2 * noise if dtype == "float16" else error < 2 * noise
