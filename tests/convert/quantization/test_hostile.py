"""Quantized bases that do not add up: one clear line each, and nothing is written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.convert import merge_lora
from llmconv.errors import InputRefused, LlmconvError
from tests.builders.quantized_models import BASES, FOLDER, stored

P = "model.layers.0.self_attn.q_proj"
STATE = f"{P}.weight.quant_state.bitsandbytes__nf4"
NF4 = "nf4_nested"


@pytest.fixture
def attempt(changed: Callable[..., Path], adapter: Callable[..., Path], tmp_path: Path) -> Callable[..., InputRefused]:
    """`attempt(base, changes, config…)` merges into a changed copy and returns the error; nothing may be left."""

    def run(base: str, tensors: dict[str, Any] | None = None, way: str = "dequantize", **fields: Any) -> InputRefused:
        folder, lora = changed(base, tensors, **fields), adapter(0.02, 320 if base == NF4 else 96)
        with pytest.raises(InputRefused) as caught:
            merge_lora(folder, [lora], tmp_path / "out", base_quant=way)
        assert sorted(os.listdir(tmp_path)) == ["adapter", "base"]
        assert "\n" not in caught.value.message and caught.value.hint
        return caught.value

    return run


def state(**fields: Any) -> torch.Tensor:
    """The genuine state of one nf4 weight with some fields changed or, where None, missing."""
    genuine = json.loads(bytes(stored(FOLDER / NF4)[STATE].tolist()))
    kept = {name: value for name, value in (genuine | fields).items() if value is not None}
    return torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("base", "part"),
    [
        (NF4, f"{P}.weight.absmax"),
        (NF4, f"{P}.weight.quant_map"),
        (NF4, f"{P}.weight.nested_absmax"),
        (NF4, f"{P}.weight.nested_quant_map"),
        (NF4, f"{P}.weight"),
        ("int8", f"{P}.SCB"),
        ("gptq_4bit_sym", f"{P}.scales"),
        ("gptq_4bit_sym", f"{P}.qzeros"),
        ("gptq_4bit_sym", f"{P}.qweight"),
        ("awq_gemm", f"{P}.qzeros"),
        ("fp8_blocks", f"{P}.weight_scale_inv"),
        ("fp8_blocks", f"{P}.weight"),
        ("ct_pack_4bit", f"{P}.weight_scale"),
        ("ct_pack_4bit", f"{P}.weight_shape"),
        ("ct_float_block", f"{P}.weight_scale"),
        (NF4, STATE),
        ("int8", f"{P}.weight"),
    ],
)
def test_a_missing_part_is_named(base: str, part: str, attempt: Callable[..., InputRefused]) -> None:
    assert P in attempt(base, {part: None}).message


@pytest.mark.slow_rows("gptq_4bit_sym", "nf4_nested")
@pytest.mark.parametrize("base", BASES)
def test_parts_of_other_shapes_or_types_are_refused(base: str, attempt: Callable[..., InputRefused]) -> None:
    for name, tensor in stored(FOLDER / base).items():
        if name.startswith(P) and not name.endswith((".weight", "weight_format", "weight_shape", "input_scale")):
            longer = tensor.repeat_interleave(2, dim=0) if tensor.dim() else tensor.repeat(2)
            assert P in attempt(base, {name: longer}).message, name
            assert P in attempt(base, {name: tensor.to(torch.float64)}).message, name


@pytest.mark.parametrize(
    "fields",
    [
        {"blocksize": 0},
        {"blocksize": -64},
        {"blocksize": 1 << 60},
        {"blocksize": 63},
        {"blocksize": "64"},
        {"blocksize": True},
        {"blocksize": None},
        {"shape": [64]},
        {"shape": [64, 65]},
        {"shape": [1 << 40, 64]},
        {"shape": [0, 64]},
        {"shape": [-64, -64]},
        {"shape": "64"},
        {"shape": None},
        {"shape": [8.0, 8.0]},
        {"quant_type": "af4"},
        {"quant_type": None},
        {"quant_type": ["nf4"]},
        {"nested_blocksize": 0},
        {"nested_blocksize": 1e308},
        {"nested_offset": None},
        {"nested_offset": "0"},
        {"nested_offset": float("nan")},
        {"nested_offset": 1e300},
        {"nested_offset": 10**400},
        {"nested_blocksize": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused(fields: dict[str, Any], attempt: Callable[..., InputRefused]) -> None:
    assert P in attempt(NF4, {STATE: state(**fields)}).message


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b"1", b'{"shape": ' + b"9" * 5000 + b"}"])
def test_a_state_that_is_no_json_object_is_refused(text: bytes, attempt: Callable[..., InputRefused]) -> None:
    assert STATE in attempt(NF4, {STATE: torch.tensor(list(text), dtype=torch.uint8)}).message


def test_a_state_of_many_bytes_is_not_read(attempt: Callable[..., InputRefused]) -> None:
    assert "not a small JSON text" in attempt(NF4, {STATE: torch.zeros(1 << 20, dtype=torch.uint8)}).message


@pytest.mark.parametrize(
    ("base", "part"),
    [
        ("int8", f"{P}.SCB"),
        ("gptq_4bit_sym", f"{P}.scales"),
        ("awq_gemm", f"{P}.scales"),
        ("fp8_blocks", f"{P}.weight_scale_inv"),
        ("ct_pack_4bit", f"{P}.weight_scale"),
        ("fp4", f"{P}.weight.absmax"),
        ("fp4", f"{P}.weight.quant_map"),
        (NF4, f"{P}.weight.nested_absmax"),
    ],
)
@pytest.mark.parametrize("way", ["dequantize", "requantize"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(
    base: str, part: str, way: str, value: float, attempt: Callable[..., InputRefused]
) -> None:
    scales = stored(FOLDER / base)[part].clone()
    scales.view(-1)[-1] = value
    assert part in attempt(base, {part: scales}, way).message


@pytest.mark.parametrize(
    ("base", "part", "huge"),
    [
        ("int8", f"{P}.SCB", torch.full((64,), 3e38)),
        ("fp8_blocks", f"{P}.weight_scale_inv", torch.full((2, 2), 3e38)),
        ("fp8_blocks", f"{P}.weight_scale_inv", torch.full((2, 2), 255, dtype=torch.uint8)),
    ],
)
def test_scales_that_make_values_infinite_are_refused(
    base: str, part: str, huge: torch.Tensor, attempt: Callable[..., InputRefused]
) -> None:
    assert P in attempt(base, {part: huge}).message


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ("gptq_4bit_sym", {"bits": 5}),
        ("gptq_4bit_sym", {"bits": 0}),
        ("gptq_4bit_sym", {"bits": "4"}),
        ("gptq_4bit_sym", {"bits": 8}),
        ("gptq_4bit_sym", {"checkpoint_format": "marlin"}),
        ("gptq_4bit_sym", {"is_marlin_format": True}),
        ("awq_gemm", {"version": "gemv"}),
        ("awq_gemm", {"bits": 8}),
        ("fp8_blocks", {"weight_block_size": [0, 32]}),
        ("fp8_blocks", {"weight_block_size": [32]}),
        ("fp8_blocks", {"weight_block_size": "32"}),
        ("fp8_blocks", {"weight_block_size": [64, 64]}),
        ("ct_pack_4bit", {"format": "marlin-24"}),
        ("ct_float_block", {"config_groups": {"group_0": {"format": "mxfp8-quantized"}}}),
        ("ct_float_block", {"config_groups": {"group_0": {"weights": {"block_structure": [-1, 2]}}}}),
    ],
)
def test_settings_that_do_not_fit_or_are_not_known_are_refused(
    base: str, fields: dict[str, Any], attempt: Callable[..., InputRefused]
) -> None:
    attempt(base, **fields)


@pytest.mark.parametrize("group", [2, -3, 1 << 30])
def test_groups_that_do_not_exist_are_refused(group: int, attempt: Callable[..., InputRefused]) -> None:
    groups = torch.full((64,), group, dtype=torch.int32)
    assert "group" in attempt("gptq_4bit_sym", {f"{P}.g_idx": groups}).message


def test_int8_in_the_order_of_a_kernel_is_refused(attempt: Callable[..., InputRefused]) -> None:
    order = torch.tensor(2, dtype=torch.uint8)
    assert "one kind of GPU" in attempt("int8", {f"{P}.weight_format": order}).message


def test_a_config_that_says_more_than_the_files_is_refused(
    tiny: Callable[[str], Path], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    config = json.loads((tiny("llama") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"load_in_4bit": True}}))
    os.symlink(tiny("llama") / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(InputRefused, match="no weight in its files is quantized"):
        merge_lora(folder, [adapter(0.02)], tmp_path / "out", base_quant="dequantize")


@pytest.mark.parametrize(("base", "codes"), [("gptq_4bit_sym", ".qweight"), ("ct_pack_4bit", ".weight_packed")])
def test_codes_under_an_unknown_name_are_not_called_plain(
    attempt: Callable[..., InputRefused], base: str, codes: str
) -> None:
    """As llm-compressor 0.12 wrote those of stacked experts: no program finds them, and the config is not the fault."""
    tensors = stored(FOLDER / base)
    changes: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        if name.endswith(codes):
            stem = name.removesuffix(codes)
            changes |= {each: None for each in tensors if each.startswith(f"{stem}.")}
            changes[f"{stem}_packed"] = tensor
    refused = attempt(base, changes)
    assert "_packed` has codes under a name that is not known" in refused.message
    assert "config.json" not in refused.hint


@pytest.mark.parametrize("settings", [[], "gptq", 4, {"quant_method": ["gptq"]}, {"quant_method": {}}])
def test_settings_of_other_kinds_are_no_traceback(
    settings: object, changed: Callable[..., Path], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder = changed("gptq_4bit_sym")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(LlmconvError):
        merge_lora(folder, [adapter(0.02)], tmp_path / "out", base_quant="dequantize")


@pytest.mark.quick_rows("ct_float_channel", "int8")
@pytest.mark.parametrize("base", BASES)
def test_damaged_headers_and_settings_give_an_error_or_a_result_and_no_traceback(
    base: str, changed: Callable[..., Path], adapter: Callable[..., Path], tmp_path: Path
) -> None:
    folder, lora = changed(base), adapter(0.02, 320 if base == NF4 else 96)
    weights, config = folder / "model.safetensors", folder / "config.json"
    genuine, settings = weights.read_bytes(), config.read_text()
    (length,) = struct.unpack("<Q", genuine[:8])
    random = np.random.default_rng(len(base))
    for turn in range(30):
        mutant = bytearray(genuine)
        mutant[8 + random.integers(length)] = random.choice(list(b'0123456789F8I3264U_."[]'))
        text = settings.replace(
            str(random.choice(["4", "8", "32", "true", "2"])),
            str(random.choice(["0", "-1", "3", '"x"', "[]", "null"])),
            1,
        )
        weights.write_bytes(mutant if turn % 2 else genuine)
        config.write_text(settings if turn % 2 else text)
        try:
            merge_lora(folder, [lora], tmp_path / "out", base_quant="dequantize", overwrite=True)
        except LlmconvError as error:
            assert error.hint
