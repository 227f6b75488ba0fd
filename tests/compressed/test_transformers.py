"""transformers opens every folder, with compressed-tensors, and computes what the values that llmconv reads give."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.compressed import quantize
from llmconv.compressed.schemes import SCHEMES
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint

IDS = torch.arange(1, 25)[None]
LARGEST = {"float": 448.0, "int": 127.5}


def opened(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's and torch's
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def with_read_values(model: Path, folder: Path) -> Any:
    """The unquantized model, with the values that llmconv reads from a folder of codes."""
    found = quantized_checkpoint(open_checkpoint(folder))
    assert found
    plain = opened(model)
    values = {name: torch.from_numpy(tensor.read().astype(np.float32)) for name, tensor in found.plain.items()}
    state = plain.state_dict()
    for name in found.weights:
        if name in state:
            state[name] = values[name]
    plain.load_state_dict(state)
    return plain


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.float()
    return found


def round_inputs(model: Any, folder: Path) -> None:
    """Rounds what the quantized modules multiply as the scheme says, token by token or in groups of columns."""
    fields = open_checkpoint(folder).config["quantization_config"]
    args = fields["config_groups"]["group_0"]["input_activations"]
    reach = LARGEST[args["type"]]

    def rounded(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        x = inputs[0]
        wide = x.reshape(*x.shape[:-1], -1, args["group_size"] or x.shape[-1])
        scale = wide.abs().amax(-1, keepdim=True) / reach
        steps = wide / scale
        codes = steps.to(torch.float8_e4m3fn).to(x.dtype) if args["type"] == "float" else steps.round().clamp(-128, 127)
        return (codes * scale).reshape(x.shape)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in fields["ignore"]:
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.quick_rows("nvfp4a16")
def test_weights_and_logits_are_those_of_the_codes(scheme: str, llama: Path, tmp_path: Path) -> None:
    made = quantize(llama, tmp_path / "out", scheme=scheme)
    assert len(made.weights) == 14
    plain = with_read_values(llama, tmp_path / "out")
    dense = opened(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in dense.state_dict().items())
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], opened(llama).model.layers[0].mlp.up_proj.weight)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "w4a16-asym"])  # transformers cannot hold it
def test_codes_that_stay_codes_give_the_same_logits(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme)
    plain, whole = with_read_values(llama, tmp_path / "out"), logits(opened(llama))
    if scheme in ("fp8-dynamic", "fp8-block", "w8a8"):
        round_inputs(plain, tmp_path / "out")
    wanted, found = logits(plain), logits(opened(tmp_path / "out"))
    if scheme == "mxfp4":  # inputs of 4 bits, too
        assert float((found - whole).norm() / whole.norm()) < 0.5
    else:
        assert float((found - wanted).norm() / wanted.norm()) < 0.01
    assert float((found - whole).norm() / whole.norm()) > 0.01


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w4a16"])
@pytest.mark.quick_rows("fp8-dynamic")
def test_experts_are_opened_one_by_one(scheme: str, experts: Path, tmp_path: Path) -> None:
    made = quantize(experts, tmp_path / "out", scheme=scheme)
    assert len(made.weights) == 2 * (4 + 3 * 4)
    assert made.ignore == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head")
    dense = opened(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    found = quantized_checkpoint(open_checkpoint(tmp_path / "out"))
    assert found
    parts = [found.plain[f"model.layers.0.mlp.experts.{at}.down_proj.weight"].read() for at in range(4)]
    wanted = torch.from_numpy(np.stack(parts)).to(torch.bfloat16)
    assert torch.equal(dense.model.layers[0].mlp.experts.down_proj, wanted)
