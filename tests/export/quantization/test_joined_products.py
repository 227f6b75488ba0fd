"""Products of one activation: one `MatMulNBits` over codes that lie side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file

from llmconv.export import export
from llmconv.export.quantization.products import side_by_side
from llmconv.verify import verify
from tools.tiny_models import depth, save_tiny

Exported = Callable[..., Path]
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """`exported(model_type, **options)` is a folder of quantized graphs; the model is `model` next to it."""

    def folder(model_type: str, **options: Any) -> Path:
        home = tmp_path_factory.mktemp(model_type)
        save_tiny(model_type, home / "model", depth(model_type))
        export(home / "model", home / "out", **{"quant": "int4", **options})
        return home / "out"

    return folder


def graph_of(folder: Path) -> onnx.GraphProto:
    return onnx.load(folder / "prefill.onnx", load_external_data=False).graph


def products(folder: Path) -> list[str]:
    """The initializers with codes, of every product."""
    return [node.input[1] for node in graph_of(folder).node if node.op_type == "MatMulNBits"]


def test_codes_of_a_group_come_first_then_zeros_then_scales() -> None:
    names = [f"{name}{suffix}" for name in "qk" for suffix in (".codes", ".zeros", ".scales")]
    tensors = {name: 0 for name in ("a", *names, "b")}
    ordered = ["a", "q.codes", "k.codes", "q.zeros", "k.zeros", "q.scales", "k.scales", "b"]
    assert list(side_by_side(tensors, [("q", "k")])) == ordered


@pytest.mark.slow
def test_queries_keys_and_values_are_one_product_in_every_layer(exported: Exported) -> None:
    found = products(exported("llama"))
    assert sum(name.count("_proj.weight.codes+") == 2 for name in found) == depth("llama")
    assert sum("gate_proj" in name and "up_proj" in name for name in found) == depth("llama")


@pytest.mark.slow
def test_a_joined_product_maps_the_codes_of_its_parts(exported: Exported) -> None:
    folder = exported("llama")
    stored = load_file(folder / "quantized.safetensors")
    tensors = {tensor.name: tensor for tensor in graph_of(folder).initializer}
    joined = next(tensor for name, tensor in tensors.items() if name.startswith(ATTENTION) and "codes+" in name)
    parts = np.concatenate([stored[name] for name in joined.name.split("+")])
    onnx.external_data_helper.load_external_data_for_tensor(joined, str(folder))
    assert np.array_equal(onnx.numpy_helper.to_array(joined), parts)


@pytest.mark.slow
def test_biases_are_joined_with_their_products(exported: Exported) -> None:
    folder = exported("qwen2")
    node = next(node for node in graph_of(folder).node if node.op_type == "MatMulNBits" and len(node.input) == 6)
    assert node.input[1].count("+") == 2
    onnxruntime.InferenceSession(folder / "prefill.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_a_matrix_of_other_bits_is_not_joined(exported: Exported) -> None:
    found = products(exported("llama", quant_bits=["v_proj=8"]))
    assert any("q_proj" in name and "k_proj" in name for name in found)
    assert all("+" not in name for name in found if "v_proj" in name)


@pytest.mark.slow
def test_parts_in_several_files_are_not_joined(exported: Exported) -> None:
    folder = exported("llama", max_shard_size="1KB")
    assert not any("+" in name for name in products(folder))
    assert verify(folder, reference=folder.parent / "model", scenario=["prefill, 7 tokens"]).verdict == "pass"
