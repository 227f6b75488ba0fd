"""Groups of columns by the config, where a checkpoint has no index of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.checkpoint import open_checkpoint
from llmconv.errors import InputRefused, MalformedInput
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint, quantized_checkpoint
from tests.builders.quantized_models import FOLDER, stored, without_indices

DOWN = "model.layers.0.mlp.down_proj"


def opened(folder: Path) -> QuantizedCheckpoint:
    base = quantized_checkpoint(open_checkpoint(folder))
    assert base is not None
    return base


def indices(base: str) -> dict[str, None]:
    return {name: None for name in stored(FOLDER / base) if name.endswith(".g_idx")}


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """4-bit codes of int32 words [rows, columns] as [rows, 8, columns]."""
    return words[:, None] >> torch.arange(0, 32, 4)[None, :, None] & 15


@pytest.mark.parametrize("size", [64, 40, 96, -1])
def test_the_last_group_of_gptq_without_indices_is_partial(size: int, changed: Callable[..., Path]) -> None:
    folder = changed("gptq_4bit_sym", without_indices(96 if size == -1 else size), group_size=size)
    state = stored(folder)
    scales = state[f"{DOWN}.scales"].float()[torch.arange(96) // (96 if size == -1 else size)]
    expected = (nibbles(state[f"{DOWN}.qweight"]).reshape(96, -1) - 8) * scales
    assert torch.equal(torch.from_numpy(opened(folder).plain[f"{DOWN}.weight"].read()), expected.T)


def test_the_last_group_of_awq_is_partial(changed: Callable[..., Path]) -> None:
    names = [name.removesuffix(".scales") for name in stored(FOLDER / "awq_gemm") if name.endswith(".scales")]
    state = stored(FOLDER / "awq_gemm")
    fewer = {
        f"{stem}.{part}": state[f"{stem}.{part}"][::2].contiguous() for stem in names for part in ("scales", "qzeros")
    }
    plain = opened(changed("awq_gemm", fewer, group_size=64)).plain[f"{DOWN}.weight"].read()
    before = opened(FOLDER / "awq_gemm").plain[f"{DOWN}.weight"].read()
    assert np.array_equal(plain[:, :32], before[:, :32]) and np.array_equal(plain[:, 64:], before[:, 64:])


@pytest.mark.parametrize("one", [False, True])
def test_act_order_without_indices_is_refused_by_name(one: bool, changed: Callable[..., Path]) -> None:
    lost = {f"{DOWN}.g_idx": None} if one else indices("gptq_4bit_act_order")
    with pytest.raises(MalformedInput, match=r"missing key `model\.layers\.0\.mlp\.down_proj\.g_idx`"):
        opened(changed("gptq_4bit_act_order", lost))


def test_act_order_of_one_group_needs_no_indices(changed: Callable[..., Path]) -> None:
    folder = changed("gptq_4bit_sym", without_indices(96), group_size=-1, desc_act=True)
    assert opened(folder).plain[f"{DOWN}.weight"].shape == (64, 96)


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ("gptq_4bit_sym", {"group_size": 64}),
        ("gptq_4bit_sym", {"group_size": -1}),
        ("gptq_4bit_sym", {"group_size": 48}),
        ("gptq_4bit_sym", {"group_size": 1 << 70}),
        ("gptq_4bit_sym", {"group_size": 0}),
        ("gptq_4bit_sym", {"group_size": "32"}),
        ("gptq_4bit_sym", {"pack_dtype": "int16"}),
        ("gptq_4bit_sym", {"adapter": {"name": "lora"}}),
        ("gptq_4bit_sym", {"checkpoint_format": "gptq_v2"}),
        ("gptq_3bit", {"sym": True}),
        ("awq_gemm", {"group_size": 64}),
        ("awq_gemm", {"group_size": -1}),
        ("awq_gemm", {"group_size": None}),
        ("awq_gemm", {"zero_point": False}),
        ("awq_gemm", {"backend": "llm-awq"}),
    ],
)
def test_fields_that_contradict_the_files_are_refused(
    base: str, fields: dict[str, Any], changed: Callable[..., Path]
) -> None:
    with pytest.raises(InputRefused):
        opened(changed(base, **fields)).plain[f"{DOWN}.weight"].read()


@pytest.mark.parametrize("fields", [{"group_size": None}, {"group_size": 64}, {"dynamic": {"+:.*down": {"bits": 8}}}])
def test_groups_that_are_unknown_are_refused(fields: dict[str, Any], changed: Callable[..., Path]) -> None:
    with pytest.raises(MalformedInput, match="down_proj"):
        opened(changed("gptq_4bit_sym", indices("gptq_4bit_sym"), **fields))


def test_modules_with_other_bits_and_groups_are_read_by_their_indices(changed: Callable[..., Path]) -> None:
    folder = changed("gptq_4bit_sym", bits=8, group_size=128, dynamic={"+:.*": {"bits": 4, "group_size": 32}})
    expected = opened(FOLDER / "gptq_4bit_sym").plain[f"{DOWN}.weight"].read()
    assert np.array_equal(opened(folder).plain[f"{DOWN}.weight"].read(), expected)
