"""Plain values of genuine quantized weights against those of the library that wrote them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llmconv.checkpoint import open_checkpoint
from llmconv.convert import apply_delta, extract_delta, merge_lora, to_hf
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.generation import generate
from llmconv.quantized_weights.methods.gptq import zero_points
from llmconv.quantized_weights.quantized_checkpoint import QuantizedCheckpoint, quantized_checkpoint
from tests.builders.quantized_models import BASES, FOLDER, reference, stored
from tests.builders.quantizers import save_tokenizer
from tests.conftest import save_tiny

Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"

F32 = torch.float32
OTHERS = {name: None for name in stored(FOLDER / "fp8_blocks") if "_proj" in name and "down_proj" not in name}
"""All quantized weights but one, to be left out."""


def opened(folder: Path) -> QuantizedCheckpoint:
    base = quantized_checkpoint(open_checkpoint(folder))
    assert base is not None
    return base


@pytest.mark.parametrize("name", BASES)
def test_values_are_bit_for_bit_those_of_the_library_that_wrote_them(name: str) -> None:
    base = opened(FOLDER / name)
    for weight, expected in reference(name).items():
        found = torch.from_numpy(base.plain[weight].read())
        assert torch.equal(found.to(expected.dtype), expected)  # GPTQ and AWQ multiply in float16


@pytest.mark.parametrize("name", BASES)
def test_to_hf_writes_the_values(name: str, tmp_path: Path) -> None:
    to_hf(FOLDER / name, tmp_path / "exact", quant="dequantize", dtype="float32")
    to_hf(FOLDER / name, tmp_path / "rounded", quant="dequantize")
    exact, rounded = load_file(tmp_path / "exact/model.safetensors"), load_file(tmp_path / "rounded/model.safetensors")
    config = json.loads((tmp_path / "rounded/config.json").read_text())
    assert "quantization_config" not in config
    assert quantized_checkpoint(open_checkpoint(tmp_path / "rounded")) is None
    for weight, expected in reference(name).items():
        assert torch.equal(exact[weight].to(expected.dtype), expected)
        assert torch.equal(rounded[weight], exact[weight].to(rounded[weight].dtype))
        assert str(rounded[weight].dtype) in {f"torch.{config.get('dtype')}", f"torch.{config.get('torch_dtype')}"}


@pytest.mark.parametrize("change", [{"group_size": 64}, {"sym": False}, {"bits": 8}, None], ids=str)
def test_a_configuration_with_other_settings_of_the_codes_is_refused(
    change: dict[str, Any] | None, tmp_path: Path
) -> None:
    config = json.loads((FOLDER / "gptq_4bit_sym/config.json").read_text())
    own = config["quantization_config"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**config, "quantization_config": change and own | change}))
    for quant in (None, "dequantize"):
        with pytest.raises(UsageProblem, match="another `quantization_config`"):
            to_hf(FOLDER / "gptq_4bit_sym", tmp_path / "out", config=[other], quant=quant)
    assert not (tmp_path / "out").exists()
    whole = FOLDER / "gptq_4bit_sym/config.json"
    to_hf(FOLDER / "gptq_4bit_sym", tmp_path / "kept", config=[whole])
    to_hf(FOLDER / "gptq_4bit_sym", tmp_path / "plain", config=[whole], quant="dequantize")
    kept, plain = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("kept", "plain"))
    assert kept["quantization_config"] == own and "quantization_config" not in plain


@pytest.mark.parametrize("name", BASES)
def test_to_hf_shards_codes_anew_without_a_change(name: str, tmp_path: Path) -> None:
    to_hf(FOLDER / name, tmp_path / "out", max_shard_size="15KB")
    before, after = stored(FOLDER / name), stored(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 and before.keys() == after.keys()
    for key, tensor in before.items():
        bits = [one.reshape(-1).view(torch.uint8) for one in (tensor, after[key])]
        assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape) and torch.equal(*bits)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (FOLDER / name, tmp_path / "out")]
    assert configs[1].get("quantization") == configs[0].get("quantization")  # where mlx-lm looks for them
    assert configs[1]["quantization_config"] == configs[0].get("quantization_config", configs[1]["quantization_config"])
    for file in ("hf_quant_config.json", "quantize_config.json"):
        assert (FOLDER / name / file).is_file() == (tmp_path / "out" / file).is_file()


def test_codes_stay_codes_unless_their_values_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="its codes have no other type") as error:
        to_hf(FOLDER / "fp8_blocks", tmp_path / "out", dtype="bfloat16")
    assert "--quant dequantize" in str(error.value.hint)
    other = save_tiny("llama", tmp_path / "other")
    extract_delta(other, FOLDER / "fp8_blocks", tmp_path / "delta")
    with pytest.raises(UnsupportedInput, match="its codes have no other type"):
        apply_delta(other, tmp_path / "delta", tmp_path / "out", dtype="float16")
    with pytest.raises(UnsupportedInput, match="its codes have no other type"):
        extract_delta(other, FOLDER / "fp8_blocks", tmp_path / "out", dtype="float16")
    with pytest.raises(UsageProblem, match="is not quantized"):
        to_hf(save_tiny("llama", tmp_path / "llama"), tmp_path / "out", quant="dequantize")


@pytest.mark.parametrize("name", BASES)
def test_values_do_not_depend_on_the_rows_that_are_asked_for(name: str) -> None:
    for tensor in (weight.plain for weight in opened(FOLDER / name).weights.values()):
        parts = [tensor.rows(start, min(start + 7, tensor.num_rows)) for start in range(0, tensor.num_rows, 7)]
        assert np.array_equal(np.concatenate(parts), tensor.read())


@pytest.mark.parametrize("name", [name for name in BASES if name not in ("fp4", "modelopt_nvfp4")])
def test_values_that_did_not_change_are_quantized_to_the_bytes_the_library_wrote(name: str) -> None:
    for weight in opened(FOLDER / name).weights.values():
        again = weight.requantized(weight.plain)
        for part, tensor in weight.parts.items():
            assert (again.parts[part].dtype, again.parts[part].shape) == (tensor.dtype, tensor.shape)
            assert again.parts[part].read().tobytes() == tensor.read().tobytes()


@pytest.mark.parametrize("name", ["fp4", "modelopt_nvfp4"])
def test_values_with_several_codes_stay_the_same(name: str) -> None:
    """fp4 has two zeros; a group of e2m1 that uses half of its range has its values with half the scale, too."""
    for weight in opened(FOLDER / name).weights.values():
        assert np.array_equal(weight.requantized(weight.plain).plain.read(), weight.plain.read())


@pytest.mark.slow_rows("nf4_nested")
@pytest.mark.parametrize("name", BASES)
def test_parts_that_are_quantized_again_do_not_depend_on_the_rows_that_are_asked_for(name: str) -> None:
    weight = opened(FOLDER / name).weights[DOWN]
    merged = weight.plain.read() + np.linspace(-0.02, 0.02, weight.shape[1], dtype=np.float32)
    from_rows = type(weight.plain)(weight.plain.dtype, weight.shape, lambda start, stop: merged[start:stop])
    for tensor in weight.requantized(from_rows).parts.values():
        parts = [tensor.rows(start, min(start + 5, tensor.num_rows)) for start in range(0, tensor.num_rows, 5)]
        assert np.concatenate(parts).tobytes() == tensor.read().tobytes()


@pytest.mark.parametrize("name", BASES)
def test_plain_checkpoints_have_the_tensors_of_the_model_and_no_others(name: str) -> None:
    base = opened(FOLDER / name)
    assert len(base.plain) == 12
    assert "quantization_config" not in base.plain.config
    assert base.plain[Q].shape == (64, 64)


@pytest.mark.parametrize("shape", [(40, 70), (32, 33), (1, 96)])
def test_blocks_of_fp8_at_the_edges_are_partial(shape: tuple[int, int], changed: Callable[..., Path]) -> None:
    torch.manual_seed(1)
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 32), -(-shape[1] // 32)) + 0.5
    folder = changed("fp8_blocks", {DOWN: codes, f"{DOWN}_scale_inv": scales})
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    assert torch.equal(torch.from_numpy(opened(folder).plain[DOWN].read()), codes.float() * spread)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (64, 1), (64,)])
def test_fp8_has_one_scale_or_one_per_row(shape: tuple[int, ...], changed: Callable[..., Path]) -> None:
    scales = torch.rand(shape) + 0.5
    folder = changed("fp8_blocks", {**OTHERS, f"{DOWN}_scale_inv": scales}, weight_block_size=None)
    expected = stored(folder)[DOWN].float() * (scales.reshape(-1, 1) if scales.numel() > 1 else scales.item())
    assert torch.equal(torch.from_numpy(opened(folder).plain[DOWN].read()), expected)


@pytest.mark.parametrize("end", [".weight_scale_inv", ".scale", ".qscale_weight"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_experts_of_fp4_and_exponents_as_scales_under_every_name(
    dtype: torch.dtype, end: str, changed: Callable[..., Path]
) -> None:
    stem = DOWN.removesuffix(".weight")
    pairs = torch.randint(-128, 128, (40, 48), dtype=torch.int8)
    scales = torch.randint(120, 134, (40, 3), dtype=torch.uint8).view(dtype)
    folder = changed("fp8_blocks", {DOWN: pairs, f"{DOWN}_scale_inv": None, f"{stem}{end}": scales})
    weight = opened(folder).weights[DOWN]
    assert torch.equal(torch.from_numpy(weight.plain.read()), Fp8Dequantize(None)._dequantize_one(pairs, scales, F32))
    again = weight.requantized(weight.plain)
    assert np.array_equal(again.plain.read(), weight.plain.read())
    assert {name: (one.dtype, one.shape) for name, one in again.parts.items()} == {
        name: (one.dtype, one.shape) for name, one in weight.parts.items()
    }


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, (1, 32)),
        ({"quant_method": "mxfp8"}, (1, 32)),
        ({"quant_method": "fp8"}, (128, 128)),
    ],
    ids=str,
)
def test_blocks_without_a_size_are_those_of_the_method(
    settings: dict[str, Any], block: tuple[int, int], scale: torch.dtype, changed: Callable[..., Path]
) -> None:
    codes = (torch.randn(256, 384) * 100).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 134, (256 // block[0], 384 // block[1]), dtype=torch.uint8).view(scale)
    folder = changed("fp8_blocks", {**OTHERS, DOWN: codes, f"{DOWN}_scale_inv": scales})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    weight = opened(folder).weights[DOWN]
    assert torch.equal(torch.from_numpy(weight.plain.read()), Fp8Dequantize(None)._dequantize_one(codes, scales, F32))
    assert np.array_equal(weight.requantized(weight.plain).plain.read(), weight.plain.read())


def test_pairs_of_fp4_without_a_scale_per_32_columns_are_refused(changed: Callable[..., Path]) -> None:
    pairs, scales = torch.zeros(40, 48, dtype=torch.int8), torch.full((40, 6), 127, dtype=torch.uint8)
    folder = changed("fp8_blocks", {DOWN: pairs, f"{DOWN}_scale_inv": scales})
    with pytest.raises(MalformedInput, match="shape mismatch"):
        opened(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_experts_of_fp8_are_a_pile_of_matrices(dtype: torch.dtype, changed: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    codes = (torch.randn(3, 64, 96) * 120).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 134, (3, 2, 3)).to(dtype) if dtype == torch.uint8 else torch.rand(3, 2, 3).to(dtype)
    folder = changed("fp8_blocks", {name: codes, f"{name}_scale_inv": scales})
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    weight = opened(folder).weights[name]
    assert torch.equal(torch.from_numpy(weight.plain.read()), expected)
    assert np.array_equal(weight.requantized(weight.plain).plain.read(), weight.plain.read())


def test_scales_of_activations_are_dropped() -> None:
    assert any(name.endswith("input_scale") for name in stored(FOLDER / "ct_float_channel"))
    assert not any("scale" in name for name in opened(FOLDER / "ct_float_channel").plain)


def test_zero_points_of_gptq_are_stored_less_one_with_carries() -> None:
    true = np.array([[0, 3, 0, 15, 8, 0, 1, 7]], dtype=np.uint32)
    word = (true << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=1, keepdims=True).astype(np.uint32)
    less = (word - np.uint32(0x11111111)).view(np.int32)
    assert zero_points(less, 4, less_one=True).tolist() == true.tolist()
    assert zero_points(word.view(np.int32), 4, less_one=False).tolist() == true.tolist()


@pytest.mark.parametrize("meta", [None, {"quantizer": ["auto_gptq:0.7.1"]}, {"quantizer": ["gptqmodel:7.7.0"]}])
def test_zero_points_of_0_are_read_only_where_gptqmodel_wrote_them(meta: Any, changed: Callable[..., Path]) -> None:
    base = "gptq_4bit_act_order"
    name = DOWN.replace(".weight", ".qzeros")
    zeros = stored(FOLDER / base)[name].clone()
    zeros[0, 0] = -1  # eight zero points of 0, each stored as 15
    weight = opened(changed(base, {name: zeros}, meta=meta)).plain[DOWN]
    if meta and "gptqmodel" in meta["quantizer"][0]:
        assert np.isfinite(weight.read()).all()
        return
    with pytest.raises(UnsupportedInput, match=f"`{name}` has zero points of 0, which AutoGPTQ"):
        weight.read()


@pytest.mark.parametrize("dynamic", [{}, {"-:.*gate": {}}, {"+:.*down": {"group_size": 32}}])
def test_symmetric_zero_points_that_are_stored_as_they_are(dynamic: Any, changed: Callable[..., Path]) -> None:
    base = "gptq_4bit_sym"
    eights = {
        name: torch.full_like(one, -0x77777778)
        for name, one in stored(FOLDER / base).items()
        if name.endswith("qzeros")
    }
    expected = opened(FOLDER / base).plain[DOWN].read()
    assert np.array_equal(opened(changed(base, eights, dynamic=dynamic)).plain[DOWN].read(), expected)
    nines = {name: one + 0x11111111 for name, one in eights.items()}
    with pytest.raises(MalformedInput, match="zero points other than 8"):
        opened(changed(base, nines, dynamic=dynamic)).plain[DOWN].read()


def test_gptq_without_group_indices_has_equal_groups_in_order(changed: Callable[..., Path]) -> None:
    without = {name: None for name in stored(FOLDER / "gptq_4bit_sym") if name.endswith(".g_idx")}
    plain = opened(changed("gptq_4bit_sym", without)).plain
    assert np.array_equal(plain[DOWN].read(), opened(FOLDER / "gptq_4bit_sym").plain[DOWN].read())


def test_blocks_need_not_be_square(changed: Callable[..., Path]) -> None:
    grid = torch.rand(4, 3) + 0.5
    folder = changed("fp8_blocks", {**OTHERS, f"{DOWN}_scale_inv": grid}, weight_block_size=[16, 32])
    spread = grid.repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(torch.from_numpy(opened(folder).plain[DOWN].read()), stored(folder)[DOWN].float() * spread)


def test_weights_of_conv1d_are_turned_back_square_ones_too() -> None:
    base = opened(FOLDER / "conv1d/int8")
    assert {weight.shape for weight in base.weights.values()} == {(32, 96), (32, 32), (32, 128), (128, 32)}
    for name, expected in reference("conv1d/int8").items():
        assert torch.equal(torch.from_numpy(base.plain[name].read()), expected)
        again = base.weights[name].requantized(base.plain[name])
        assert all(again.parts[part].read().tobytes() == base.stored[part].read().tobytes() for part in again.parts)


def test_a_weight_that_is_stored_twice_is_refused(changed: Callable[..., Path]) -> None:
    folder = changed("gptq_4bit_sym", {Q: torch.zeros(64, 64, dtype=torch.float16)})
    with pytest.raises(MalformedInput, match="is stored twice"):
        opened(folder)


@pytest.mark.parametrize(
    ("end", "library"), [(".weight._data", "quanto"), ("._weight_qdata", "torchao"), (".W_q", "HQQ")]
)
def test_codes_that_only_their_library_reads_are_named(tmp_path: Path, end: str, library: str) -> None:
    """Such folders have no `quantization_config`: each command said that keys are missing, or nothing is quantized."""
    save_tiny("llama", tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    kept = {name: one for name, one in load_file(file).items() if "q_proj" not in name}
    codes = {f"model.layers.{at}.self_attn.q_proj{end}": torch.ones(4, 4, dtype=torch.int8) for at in range(2)}
    save_file(kept | codes, file, {"format": "pt"})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    factors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(1, 1) for one in "AB"}
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    out = tmp_path / "out"
    commands: list[Callable[[], Any]] = [
        lambda: to_hf(tmp_path / "model", out, quant="dequantize"),
        lambda: to_hf(tmp_path / "model", out, dtype="bfloat16"),
        lambda: merge_lora(tmp_path / "model", [tmp_path / "adapter"], out),
        lambda: export(tmp_path / "model", out),
        lambda: generate(tmp_path / "model", ["a"], backend="torch"),
    ]
    for command in commands:
        with pytest.raises(UnsupportedInput, match=f"the weights are codes of {library} "):
            command()
    assert not out.exists()


@pytest.mark.parametrize(
    ("base", "library"),
    [
        *[("gptq_4bit_sym", " of GPTQ or AWQ"), ("nf4_nested", " of bitsandbytes"), ("fp8_blocks", "")],
        *[("ct_pack_4bit", " of compressed-tensors"), ("ct_int8_channel", "")],
    ],
)
def test_codes_without_their_configuration_are_named(base: str, library: str, tmp_path: Path) -> None:
    """Tools that write a `config.json` anew lose the field; commands said that keys are missing, or nothing."""
    model = shutil.copytree(FOLDER / base, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    field = config.pop("quantization_config")
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    factors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(1, 1) for one in "AB"}
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    commands: list[Callable[[], Any]] = [
        lambda: to_hf(model, tmp_path / "out", quant="dequantize"),
        lambda: merge_lora(model, [tmp_path / "adapter"], tmp_path / "out"),
        lambda: export(model, tmp_path / "out"),
    ]
    for command in commands:
        with pytest.raises(
            MalformedInput, match=f"the weights are codes{library} .*no `quantization_config`"
        ) as refused:
            command()
    assert "copy the field" in refused.value.hint
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": field}))
    to_hf(model, tmp_path / "out", quant="dequantize")
