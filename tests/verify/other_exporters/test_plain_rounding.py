"""The copy with plainly rounded codes has those of onnxruntime's quantizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import load_file

from llmconv.checkpoint import open_weights
from llmconv.export import export
from llmconv.verify.other_exporters.quantized.dequantized_reference import StoredSmoothing
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants
from llmconv.verify.other_exporters.quantized.rounding_error import plainly_rounded
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices
from llmconv.verify.other_exporters.quantized.tensor_matching import match_matrices
from tests.conftest import save_tiny

STORED = "quantized.safetensors"


def rounded(model: Path, folder: Path, target: Path) -> bool:
    """Stores the weights of the copy as `target`; False if there is none."""
    path = folder / "decode.onnx"
    graph, tensors = onnx.load(path, load_external_data=False), open_weights(model)
    found = match_matrices(quantized_matrices(graph, Constants(graph, folder)), tensors)
    with plainly_rounded(path, graph, found, tensors, StoredSmoothing()) as copy:
        if copy:
            target.write_bytes((copy.parent / STORED).read_bytes())
        return copy is not None


def test_it_has_the_bits_of_a_symmetric_export_without_search(tmp_path: Path) -> None:
    for model_type in ("llama", "gpt2"):  # gpt2 stores its matrices as [K, N]
        model, out = save_tiny(model_type, tmp_path / model_type), tmp_path / f"{model_type}-out"
        export(model, out / "plain", incremental=True, quant="int4", symmetric=True, method="rtn")
        export(model, out / "searched", incremental=True, quant="int4", symmetric=True)
        assert rounded(model, out / "searched", out / STORED)
        plain, searched, copy = (
            load_file(path) for path in (out / "plain" / STORED, out / "searched" / STORED, out / STORED)
        )
        codes = [name for name in plain if name.endswith(".codes")]
        assert any(not np.array_equal(searched[name], copy[name]) for name in codes)
        assert all(np.mean(plain[name] != copy[name]) < 0.001 for name in codes)  # ties
        assert all(np.array_equal(plain[name], copy[name]) for name in plain.keys() - set(codes))


def test_zero_points_are_the_middle(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "llama")
    export(model, tmp_path / "out", incremental=True, quant="int4", quant_block=16)
    assert rounded(model, tmp_path / "out", tmp_path / STORED)
    zeros = {name: values for name, values in load_file(tmp_path / STORED).items() if name.endswith(".zeros")}
    assert zeros and all((values == 0x88).all() for values in zeros.values())


def test_8_bits_are_plainly_rounded_already(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "llama")
    export(model, tmp_path / "out", incremental=True, quant="int8")
    assert not rounded(model, tmp_path / "out", tmp_path / STORED)
