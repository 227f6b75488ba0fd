"""The model with plainly rounded codes has the values of onnxruntime's quantizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.checkpoint import open_weights
from llmconv.export import export
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.other_exporters.quantized.dequantized_reference import (
    QuantizedWeights,
    StoredSmoothing,
)
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices
from llmconv.verify.other_exporters.quantized.tensor_matching import match_matrices
from tests.conftest import save_tiny


def values(weights: Mapping[str, LazyTensor] | None) -> dict[str, Array]:
    return {name: tensor.read() for name, tensor in (weights or {}).items()}


def of_folder(model: Path, folder: Path, stack: ExitStack) -> QuantizedWeights:
    graph, tensors = onnx.load(folder / "decode.onnx", load_external_data=False), open_weights(model)
    found = match_matrices(quantized_matrices(graph, Constants(graph, folder)), tensors)
    return QuantizedWeights(model, tensors, found, None, StoredSmoothing(), stack)


def both(model: Path, folder: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """The values of the folder's codes, and of plainly rounded ones; the latter are empty if there are none."""
    with ExitStack() as stack:
        weights = of_folder(model, folder, stack)
        rounded = weights.plainly_rounded()
        return values(weights.dequantized().weights), values(rounded.weights if rounded else None)


def test_it_has_the_values_of_an_export_without_search(tmp_path: Path) -> None:
    for model_type in ("llama", "gpt2"):  # gpt2 stores its matrices as [K, N]
        model, out = save_tiny(model_type, tmp_path / model_type), tmp_path / f"{model_type}-out"
        export(model, out / "plain", incremental=True, quant="int4", symmetric=True, method="rtn")
        export(model, out / "searched", incremental=True, quant="int4")
        plain, searched = both(model, out / "plain")[0], both(model, out / "searched")
        assert any(not np.array_equal(searched[0][name], searched[1][name]) for name in plain)
        assert all(np.mean(plain[name] != searched[1][name]) < 0.001 for name in plain)  # ties


def test_8_bits_are_plainly_rounded_already(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "llama")
    export(model, tmp_path / "out", incremental=True, quant="int8")
    assert not both(model, tmp_path / "out")[1]


def test_dequantized_matrices_are_held_for_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a8w8 stores all matrices as [K, N], so each is dequantized whole: kept, they are the model in float32."""
    model, made, read = save_tiny("llama", tmp_path / "llama"), [], QuantizedMatrix.read

    def watched(stored: QuantizedMatrix) -> Array:
        made.append(weakref.ref(values := read(stored)))
        return values

    monkeypatch.setattr(QuantizedMatrix, "read", watched)
    export(model, tmp_path / "out", incremental=True, quant="a8w8")
    with ExitStack() as stack:
        tensors = of_folder(model, tmp_path / "out", stack).dequantized().weights
        assert values(tensors)
        gc.collect()
        assert len(made) > 10 and sum(one() is not None for one in made) == 1
