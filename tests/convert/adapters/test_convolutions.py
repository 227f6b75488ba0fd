"""Adapted convolutions of one, two and three dimensions against PEFT's merge in float64; every element equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmconv.convert import merge_lora
from llmconv.errors import MalformedInput, UnsupportedInput
from tests.builders.lora_models import assert_equal, train


def whisper() -> Any:
    """Convolutions of one dimension, with a kernel of three."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "vocab_size": 24}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **layers, **tokens, max_source_positions=8, max_target_positions=8)
    return transformers.WhisperForConditionalGeneration(config)


def resnet() -> Any:
    """Convolutions of two dimensions, with kernels of seven, three and one."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_channels=3, layer_type="bottleneck"
    )
    return transformers.ResNetModel(config)


def video() -> Any:
    """A convolution of three dimensions: patches of a video."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "num_frames": 4, "tubelet_size": [2, 4, 4]}
    return transformers.VivitModel(transformers.VivitConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "one dimension": (whisper, ["conv1", "conv2"]),
    "two dimensions": (resnet, ["convolution"]),
    "three dimensions": (video, ["projection"]),
}


def built(kind: str) -> tuple[Any, Any]:
    """A seeded model, and its target modules."""
    torch.manual_seed(0)
    make, targets = MODELS[kind]
    return make(), targets


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", [False, True], ids=["plain", "DoRA"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_equals_peft(kind: str, use_dora: bool, tmp_path: Path) -> None:
    model, targets = built(kind)
    case = train(model, tmp_path, target_modules=targets, use_dora=use_dora, lora_alpha=3)
    merge = merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert merge.merged
    assert_equal(tmp_path / "out", case.exact)


def test_the_bias_of_b_is_added(tmp_path: Path) -> None:
    model, targets = built("one dimension")
    case = train(model, tmp_path, target_modules=targets, lora_bias=True)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.slow
def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    model, targets = built("one dimension")
    case = train(model.bfloat16(), tmp_path, target_modules=targets)
    merge_lora(case.base, [case.adapter], tmp_path / "out")
    assert_equal(tmp_path / "out", case.exact)


@pytest.mark.quick_rows("A-shape0-MalformedInput")
@pytest.mark.parametrize(
    ("part", "shape", "error"), [("A", (4, 8, 5), MalformedInput), ("B", (16, 4, 3), UnsupportedInput)]
)
def test_another_kernel_is_refused(part: str, shape: tuple[int, ...], error: type, tmp_path: Path) -> None:
    model, targets = built("one dimension")
    case = train(model, tmp_path, target_modules=targets)
    file = case.adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.model.encoder.conv1.lora_{part}.weight": torch.ones(shape)}, file)
    with pytest.raises(error, match="conv1"):
        merge_lora(case.base, [case.adapter], tmp_path / "out")


@pytest.mark.parametrize("rank", [1, 2], ids=["B in groups", "B whole, as before PEFT 0.18"])
def test_a_grouped_convolution_is_refused(rank: int, save_tensors: Callable[..., Path], tmp_path: Path) -> None:
    base = save_tensors("base", {"conv.weight": torch.ones(8, 2, 3)}, {"config.json": {"model_type": "grouped"}})
    factors = {"conv.lora_A.weight": torch.ones(2, 4, 3), "conv.lora_B.weight": torch.ones(8, rank, 1)}
    config = {"adapter_config.json": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}}
    adapter = save_tensors("adapter", factors, config, weights="adapter_model.safetensors")
    with pytest.raises(UnsupportedInput, match="is a convolution with groups"):
        merge_lora(base, [adapter], tmp_path / "out")
