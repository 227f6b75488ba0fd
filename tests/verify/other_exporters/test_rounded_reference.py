"""The model with weights rounded as in a half-precision graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llmconv.checkpoint import open_weights
from llmconv.tensors import Array
from llmconv.verify.other_exporters.half_precision import rounded_weights
from llmconv.verify.other_exporters.quantized.tensor_matching import InitializerContent

SaveTensors = Callable[..., Path]


def held(folder: Path, *contents: InitializerContent) -> dict[str, Array]:
    """Every tensor of the rounded model, beside a float16 graph with these initializers."""
    graph: Any = SimpleNamespace(contents={str(at): content for at, content in enumerate(contents)})
    found = rounded_weights(open_weights(folder), [graph], "float16")
    return {name: tensor.read() for name, tensor in found.items()}


def test_weights_are_rounded_and_stored_as_float32(save_tensors: SaveTensors) -> None:
    values = torch.randn(8, 8)
    found = held(save_tensors("model", {"w": values}, {"config.json": {}}))["w"]
    assert found.dtype == np.float32
    assert np.array_equal(found, values.half().float().numpy())


def test_a_tensor_that_the_graph_stores_in_float32_is_not_rounded(save_tensors: SaveTensors) -> None:
    values = torch.randn(8)
    content = InitializerContent((8,), np.dtype(np.float32), lambda: values.numpy(), whole="w")
    found = held(save_tensors("model", {"w": values}, {"config.json": {}}), content)["w"]
    assert np.array_equal(found, values.numpy())


def test_a_norm_that_was_rounded_plus_one_has_the_graphs_values(save_tensors: SaveTensors) -> None:
    values = torch.randn(8) * 0.1
    sums = (values + 1).half().numpy()
    content = InitializerContent((8,), sums.dtype, lambda: sums, whole="w", form="plus one")
    found = held(save_tensors("model", {"w": values}, {"config.json": {}}), content)["w"]
    assert np.array_equal(found + np.float32(1), sums.astype(np.float32))


def test_integers_do_not_change(save_tensors: SaveTensors) -> None:
    folder = save_tensors("model", {"w": torch.randn(8), "n": torch.arange(3)}, {"config.json": {}})
    assert held(folder)["n"].dtype == np.int64


def test_weights_that_are_exact_are_used_themselves(save_tensors: SaveTensors) -> None:
    weights = open_weights(save_tensors("model", {"w": torch.randn(8).half().float()}, {"config.json": {}}))
    assert rounded_weights(weights, [], "float16") is weights
