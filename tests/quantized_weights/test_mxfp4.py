"""MXFP4 experts against the values that transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import MalformedInput
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint, quantized_checkpoint
from llmconv.tensors import BY_NAME, in_memory

NAME = "model.layers.0.mlp.experts.down_proj"
CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}


def parts() -> dict[str, torch.Tensor]:
    """Random codes of three experts, 96 inputs, 40 outputs."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 3, 16), dtype=torch.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": torch.randint(110, 130, (3, 40, 3), dtype=torch.uint8)}


@pytest.fixture
def opened(save_tensors: Callable[..., Path]) -> Callable[..., QuantizedCheckpoint]:
    """`opened(parts)` is a base with them."""

    def make(tensors: dict[str, Any]) -> QuantizedCheckpoint:
        base = quantized_checkpoint(open_checkpoint(save_tensors("base", tensors, {"config.json": CONFIG})))
        assert base is not None
        return base

    return make


def test_experts_are_bit_for_bit_those_of_transformers(opened: Callable[..., QuantizedCheckpoint]) -> None:
    tensors = parts()
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32)
    assert torch.equal(torch.from_numpy(opened(tensors).plain[NAME].read()), expected)


def test_values_that_did_not_change_are_quantized_to_the_same_values(
    opened: Callable[..., QuantizedCheckpoint],
) -> None:
    weight = opened(parts()).weights[NAME]
    again = weight.requantized(weight.plain)
    assert np.array_equal(again.plain.read(), weight.plain.read())
    assert again.parts[f"{NAME}_blocks"].shape == (3, 40, 3, 16)


def test_new_values_are_within_half_a_step(opened: Callable[..., QuantizedCheckpoint]) -> None:
    weight = opened(parts()).weights[NAME]
    values = np.random.default_rng(1).normal(size=weight.shape).astype(np.float32)
    found = weight.requantized(in_memory(values, BY_NAME["float32"])).plain.read()
    peaks = np.abs(values.reshape(3, 3, 32, 40)).max(axis=2)
    assert (np.abs(found - values).reshape(3, 3, 32, 40).max(axis=2) <= peaks / 3).all()


@pytest.mark.parametrize("change", ["_blocks", "_scales"])
def test_parts_that_are_missing_or_of_another_shape_are_refused(
    change: str, opened: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    tensors = parts()
    with pytest.raises(MalformedInput, match="experts"):
        opened({name: tensor for name, tensor in tensors.items() if not name.endswith(change)})


@pytest.mark.parametrize("shape", [(3, 40, 3, 8), (3, 40, 48), (3, 0, 3, 16)])
def test_blocks_of_other_shapes_are_refused(shape: tuple[int, ...], opened: Callable[..., QuantizedCheckpoint]) -> None:
    with pytest.raises(MalformedInput, match="shape"):
        opened(parts() | {f"{NAME}_blocks": torch.zeros(shape, dtype=torch.uint8)})


@pytest.mark.parametrize("exponent", [253, 255])
def test_exponents_that_make_values_infinite_are_refused(
    exponent: int, opened: Callable[..., QuantizedCheckpoint]
) -> None:
    scales = torch.full((3, 40, 3), exponent, dtype=torch.uint8)
    with pytest.raises(MalformedInput, match="infinite"):
        opened(parts() | {f"{NAME}_scales": scales}).plain[NAME].read()
