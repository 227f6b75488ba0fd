"""The audit of quantized weights: the tensor that a matrix matches, and whether it equals it up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from llmconv.checkpoint import open_weights
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.tensors import BY_NAME, Array, in_memory
from llmconv.verify.other_exporters.quantized.audit import audit_quantized
from llmconv.verify.other_exporters.quantized.quantized_matrix import Constants, QuantizedMatrix
from llmconv.verify.other_exporters.quantized.rounding_error import rounding_errors
from llmconv.verify.other_exporters.quantized.schemes import quantized_matrices
from llmconv.verify.other_exporters.quantized.tensor_matching import MatchedMatrix, match_matrices
from llmconv.verify.results import Check
from tests.builders.mutants.quantized import QUANTIZED_MUTANTS, QuantizedMutant
from tests.builders.quantizers import QUANTIZERS

Quantized = Callable[[str, str], Path]
FLOAT32 = BY_NAME["float32"]


def audit(path: Path, folder: Path) -> Check:
    """The check of one graph."""
    model = load_guarded(path)
    tensors = open_weights(folder)
    found = match_matrices(quantized_matrices(model, Constants(model, path.parent)), tensors)
    return audit_quantized(path.name, found, tensors)[0]


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2"])
def test_matrices_quantized_by_onnxruntime_match_the_model(
    model_type: str, quantizer: str, quantized: Quantized, small: Callable[[str], Path]
) -> None:
    check = audit(quantized(model_type, quantizer), small(model_type))
    assert check.verdict == "pass", check.detail


@pytest.mark.slow_rows("two layers exchanged")
@pytest.mark.parametrize("mutant", QUANTIZED_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_and_named(
    mutant: QuantizedMutant, quantized: Quantized, small: Callable[[str], Path], tmp_path: Path
) -> None:
    model = onnx.load(quantized("llama", mutant.of))
    mutant.edit(model)
    onnx.save(model, tmp_path / "mutant.onnx")
    check = audit(tmp_path / "mutant.onnx", small("llama"))
    assert check.verdict == ("fail" if mutant.tensor else "pass")
    assert mutant.tensor in check.detail


def rounded(values: Array, block: int = 32) -> tuple[Array, Array]:
    """Symmetric codes of four bits, and the scales of blocks."""
    blocks = values.reshape(len(values), -1, block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 7
    return np.clip(np.round(blocks / scale), -8, 7).reshape(values.shape).astype(np.int8), scale[..., 0]


def stored(codes: Array, scale: Array, block: int = 32) -> QuantizedMatrix:
    """A matrix in blocks along its rows."""
    zero, shape = np.zeros_like(scale), (codes.shape[0], codes.shape[1])
    rows, grids = (lambda start, stop: codes[start:stop]), (lambda: (scale, zero))
    return QuantizedMatrix("q", "by hand", shape, rows, grids, (1, block), "s")


def gptq(values: Array, inputs: Array, block: int = 32) -> tuple[Array, Array]:
    """Codes of four bits whose errors later columns make up for (Frantar et al. 2022, arXiv 2210.17323)."""
    left = values.astype(np.float64).copy()
    inverse = np.linalg.inv(inputs.T @ inputs + 0.01 * len(inputs) * np.eye(values.shape[1]))
    factor = np.linalg.cholesky(inverse).T
    codes, scales = np.zeros_like(values, dtype=np.int8), np.zeros((len(values), values.shape[1] // block))
    for column in range(values.shape[1]):
        if column % block == 0:
            scales[:, column // block] = np.abs(left[:, column : column + block]).max(axis=1) / 7
        scale = scales[:, column // block]
        codes[:, column] = np.clip(np.round(left[:, column] / scale), -8, 7)
        error = (left[:, column] - codes[:, column] * scale) / factor[column, column]
        left[:, column:] -= error[:, None] * factor[column, column:]
    return codes, scales.astype(np.float32)


def test_weights_quantized_by_gptq_match_the_model() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((96, 128)).astype(np.float32)
    inputs = rng.standard_normal((512, 24)) @ rng.standard_normal((24, 128)) + 0.3 * rng.standard_normal((512, 128))
    tensors = {"w": in_memory(values, FLOAT32)}
    (found,) = match_matrices([stored(*gptq(values, inputs))], tensors)
    (fidelity,) = rounding_errors(found, tensors)
    assert fidelity.problem == ""
    assert fidelity.relative_error > 0.12, "it is no rounding to the nearest"


def test_concatenated_tensors_are_distinguished() -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((rows, 64)).astype(np.float32) for name, rows in (("q", 48), ("k", 16))}
    packed = np.concatenate([tensors["q"], tensors["k"]])
    lazy = {name: in_memory(values, FLOAT32) for name, values in tensors.items()}
    (found,) = match_matrices([stored(*rounded(packed))], lazy)
    assert {(one.name, one.rows) for one in found.matches} == {("q", range(48)), ("k", range(48, 64))}
    assert found.whole and not any(one.problem for one in rounding_errors(found, lazy))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_part_of_a_tensor_is_found(transposed: bool) -> None:
    values = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    lazy = {"w": in_memory(np.ascontiguousarray(values.T) if transposed else values, FLOAT32)}
    (found,) = match_matrices([stored(*rounded(values[32:64]))], lazy)
    (match,) = found.matches
    assert (match.first_row, match.transposed) == (32, transposed)
    assert rounding_errors(found, lazy)[0].problem == ""


def test_a_matrix_without_a_match_is_named_with_the_missing_tensor() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((32, 64)).astype(np.float32)
    lazy = {"w": in_memory(rng.standard_normal((32, 64)).astype(np.float32), FLOAT32)}
    check, _ = audit_quantized("g", [MatchedMatrix(stored(*rounded(values)))], lazy)
    assert check.verdict == "fail"
    assert "`q` matches no tensor of the model; `w` of that shape are in no graph" in check.detail
