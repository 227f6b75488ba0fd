"""The audit of weights: an initializer is the tensor of its place, in its shape and element type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from llmconv.files.safetensors_file import read_header
from llmconv.tensors import Array
from llmconv.verify.audit.weights import WeightSource, _largest, audit_weights, tensors_of

KINDS = onnx.TensorProto


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with these weights."""
    save_file(tensors, folder / "model.safetensors")
    return folder


def mapped(folder: Path, name: str, tensor: str, dims: list[int], kind: int = KINDS.FLOAT) -> onnx.ModelProto:
    """A graph with one initializer that maps a tensor."""
    place = read_header(folder / "model.safetensors").tensors[tensor]
    weight = onnx.TensorProto(name=name, data_type=kind, dims=dims, data_location=KINDS.EXTERNAL)
    for key, value in (("location", "model.safetensors"), ("offset", place.offset), ("length", place.nbytes)):
        weight.external_data.add(key=key, value=str(value))
    return onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight]))


NAMES = ("model.layers.1.norm.weight", "model.layers.2.norm.weight", "model.layers.1.other.weight")


@pytest.fixture
def ones(tmp_path: Path) -> Path:
    """Three tensors of equal values."""
    return folder_of(tmp_path, {name: torch.ones(2, 6) for name in NAMES})


def detail(folder: Path, model: onnx.ModelProto) -> tuple[str, str]:
    """Verdict and detail of the audit."""
    check, _ = audit_weights("model.onnx", model, WeightSource.of(folder, folder))
    return check.verdict, check.detail


def test_equal_values_of_another_layer_are_another_tensor(ones: Path) -> None:
    model = mapped(ones, NAMES[0], NAMES[1], [2, 6])
    assert detail(ones, model) == ("fail", f"`{NAMES[0]}` maps the bytes of `{NAMES[1]}`")


def test_equal_values_of_the_same_layer_may_stand_for_a_tensor(ones: Path) -> None:
    assert detail(ones, mapped(ones, NAMES[0], NAMES[2], [2, 6]))[0] == "pass"


def test_the_tensor_in_its_place_passes(ones: Path) -> None:
    assert detail(ones, mapped(ones, NAMES[0], NAMES[0], [2, 6]))[0] == "pass"


@pytest.mark.parametrize(("dims", "kind"), [([6, 2], KINDS.FLOAT), ([2, 6], KINDS.INT32)])
def test_another_shape_or_element_type_fails(dims: list[int], kind: int, ones: Path) -> None:
    verdict, text = detail(ones, mapped(ones, NAMES[0], NAMES[0], dims, kind))
    assert verdict == "fail" and f"`{NAMES[0]}` maps `{NAMES[0]}` float32 [2, 6] as " in text


def test_initializers_are_known_by_their_bytes_before_their_names(ones: Path) -> None:
    source = WeightSource.of(ones, ones)
    assert tensors_of(mapped(ones, NAMES[0], NAMES[1], [2, 6]), source) == {NAMES[0]: NAMES[1]}
    assert tensors_of(mapped(ones, "own", NAMES[1], [2, 6]), source) == {"own": NAMES[1]}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("odd", "is_finite"), [(np.nan, False), (-np.inf, False), (-6e4, True), (0.0, True)])
def test_finite_numbers_are_below_infinity(dtype: type, odd: float, is_finite: bool) -> None:
    block: Array = np.zeros((3, 2), dtype)
    block[1, 1] = odd
    largest, infinity = _largest(block)
    assert (largest < infinity, largest == 0) == (is_finite, odd == 0)
