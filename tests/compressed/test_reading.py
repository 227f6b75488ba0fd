"""Folders of e2m1 codes as llmconv reads them: against the package, and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.compressed import quantize
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.quantized_weights.float4 import exponent_bias
from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint
from llmconv.runtime.eager.torch_runner import TorchRunner
from tests.compressed.test_reference import preset

UP = "model.layers.1.mlp.up_proj"
State = dict[str, torch.Tensor]


@pytest.mark.parametrize("scheme", ["nvfp4a16", "mxfp4"])
def test_values_are_those_of_the_package(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", scheme=scheme)
    stored = load_file(tmp_path / "out/model.safetensors")
    state = {name.removeprefix(f"{UP}."): one for name, one in stored.items() if name.startswith(f"{UP}.weight")}
    kind = BaseCompressor.get_value_from_registry(f"{scheme[:5]}-pack-quantized")
    wanted = kind.decompress(state, preset(scheme))["weight"]
    found = quantized_checkpoint(open_checkpoint(tmp_path / "out"))
    assert found
    values = torch.from_numpy(found.plain[f"{UP}.weight"].read().astype(np.float32))
    assert torch.equal(values.to(torch.bfloat16), wanted.to(torch.bfloat16))


SCHEMES = sorted(name for name in PRESET_SCHEMES if name != "UNQUANTIZED")
REFUSED = {  # what the refusal names
    **dict.fromkeys(("MXFP6A16", "MXFP6A8"), "`mxfp6-pack-quantized`"),
    **{f"W{bits}A16": f"packed int of {bits} bits" for bits in (5, 6, 7)},
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "its own") for name in SCHEMES]
    + [(name, one) for name in ("FP8", "W8A8", "W4A16", "W4A16_ASYM") for one in ("channel", "tensor", "block")],
)
def test_every_preset_of_the_package_is_read_or_refused_by_name(name: str, strategy: str, tmp_path: Path) -> None:
    scheme = preset_name_to_scheme(name, ["Linear"])
    if strategy != "its own":
        block = {"block_structure": [32, 64]} if strategy == "block" else {}
        fields = scheme.weights.model_dump() | {"strategy": strategy, "group_size": None, "block_structure": None}
        scheme.weights = QuantizationArgs(**fields | block)
    args, weight = scheme.weights, torch.randn(128, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    of_strategy = {"tensor": (128, 256), "channel": (1, 256), "block": args.block_structure}
    rows, columns = of_strategy.get(getattr(args.strategy, "value", args.strategy)) or (1, args.group_size)
    blocks = weight.reshape(128 // rows, rows, -1, columns)
    shared = generate_gparam(weight.min(), weight.max()) if args.num_bits == 4 and args.group_size == 16 else None
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, global_scale=shared)
    given = {"weight": weight, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
    given |= {} if shared is None else {"weight_global_scale": shared.reshape(1)}
    given |= {} if args.symmetric else {"weight_zero_point": zeros.reshape(given["weight_scale"].shape)}
    kind = str(getattr(form := infer_module_format(torch.nn.Linear, scheme), "value", form))
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(given, scheme)
    save_file({f"up.{key}": one.contiguous() for key, one in stored.items()}, tmp_path / "model.safetensors")
    groups = {"group_0": {**json.loads(scheme.model_dump_json()), "format": kind}}
    settings = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "version": "0.20.1"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    try:
        found = quantized_checkpoint(open_checkpoint(tmp_path))
    except UnsupportedInput as error:
        packed = kind == "pack-quantized" and strategy in ("tensor", "block")
        odd = f"packed int of {args.num_bits} bits {'in blocks' if strategy == 'block' else 'with one scale'}"
        assert (odd if packed and name not in REFUSED else REFUSED[name]) in error.message
        return
    assert found
    wanted = compressor.decompress(stored, scheme)["weight"]
    assert torch.equal(torch.from_numpy(found.plain["up.weight"].read()).to(wanted.dtype), wanted)


@pytest.fixture(scope="module")
def mxfp4(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    quantize(llama, folder, scheme="mxfp4")
    return folder


def written_by(version: str, folder: Path, target: Path, **more: Any) -> Path:
    """MXFP4 as compressed-tensors up to 0.13.0 stored it: with exponents that are 2 too small."""
    tensors = load_file(Path(shutil.copytree(folder, target)) / "model.safetensors")
    older = {name: one - 2 if name.endswith("weight_scale") else one for name, one in tensors.items()}
    save_file(older, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= {"version": version, **more}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_exponents_that_compressed_tensors_stored_2_too_small_are_read_as_meant(mxfp4: Path, tmp_path: Path) -> None:
    old = written_by("0.13.0", mxfp4, tmp_path / "old")
    assert np.array_equal(read(old), read(mxfp4))
    with pytest.raises(UnsupportedInput, match="whose exponents are 2 too small") as caught:
        TorchRunner(old)
    assert "--quant dequantize" in caught.value.hint


@pytest.mark.parametrize(
    ("version", "bias"),
    [("0.13.0", 125), ("0.12.2", 125), ("0.12.3.a20251114", 125), ("0.13", 125), ("0.14.0", 127), ("0.13.1.a1", 127)]
    + [("0.20.1", 127), ("1.0", 127), ("", 127), ("x", 127), (None, 127), (13, 127), ([0, 13], 127)],
)
def test_the_bias_of_exponents_is_that_of_the_release(version: Any, bias: int) -> None:
    assert exponent_bias({"version": version}) == bias
    assert exponent_bias({"version": version, "provider": "other"}) == 127


def test_transformers_runs_these_codes_in_bfloat16_alone(mxfp4: Path) -> None:
    with pytest.raises(UsageProblem, match="in bfloat16, not in float32"):
        TorchRunner(mxfp4, "float32")


def without(name: str) -> Callable[[State], None]:
    return lambda tensors: tensors.__delitem__(f"{UP}.{name}")


def replaced(name: str, value: torch.Tensor) -> Callable[[State], None]:
    return lambda tensors: tensors.update({f"{UP}.{name}": value})


DAMAGES: list[tuple[str, Callable[[State], None], str]] = [
    ("no scale", without("weight_scale"), "missing key"),
    ("no global scale", without("weight_global_scale"), "missing key"),
    ("stray", without("weight_packed"), "does not belong"),
    ("zero", replaced("weight_global_scale", torch.zeros(1)), "scales are divided by it"),
    ("infinite", replaced("weight_global_scale", torch.full((1,), torch.inf)), "not finite"),
    ("two", replaced("weight_global_scale", torch.ones(2)), "shape mismatch"),
    ("short", replaced("weight_scale", torch.ones(384, 8).to(torch.float8_e4m3fn)), "shape mismatch"),
    ("type", replaced("weight_scale", torch.ones(384, 16)), "is stored as float32"),
    ("NaN", replaced("weight_scale", torch.full((384, 16), torch.nan).to(torch.float8_e4m3fn)), "not finite"),
    ("empty", replaced("weight_packed", torch.zeros(0, 128, dtype=torch.uint8)), "not a matrix"),
    ("flat", replaced("weight_packed", torch.zeros(384 * 128, dtype=torch.uint8)), "not a matrix"),
]


@pytest.mark.parametrize(("damage", "words"), [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES])
def test_damaged_parts_are_refused(damage: Callable[[State], None], words: str, coded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(coded, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputRefused, match=words):
        read(folder)


def read(folder: Path) -> Any:
    found = quantized_checkpoint(open_checkpoint(folder))
    assert found
    return found.plain[f"{UP}.weight"].read()


@pytest.fixture(scope="module")
def coded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "model"
    quantize(llama, folder, scheme="nvfp4a16")
    return folder


def test_groups_of_another_size_are_refused(coded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(coded, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputRefused, match="groups of 32"):
        read(folder)


ONE = {"words": torch.ones(8, 4, dtype=torch.uint32), "scales": torch.ones(8, 1), "biases": torch.ones(8, 1)}
SPOILED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mode": "mxfp4"}, {}, "mode 'mxfp4'"),
    ({"lm_head": {"bits": 4, "group_size": 32, "mode": "nvfp4"}}, {}, "mode 'nvfp4'"),
    ({"bits": 7}, {}, "of 7 bits"),
    ({"bits": 10**400}, {}, "bits"),
    ({"group_size": 0}, {}, "groups of 0"),
    ({"bits": 3, "group_size": 43}, {}, "no whole words"),
    ({"group_size": 64}, {}, "expected [8, 8], got [8, 4]"),
    ({"lm_head": {"bits": 8, "group_size": 32}}, {}, "expected [8, 8], got [8, 4]"),
    ({}, {"biases": None}, "missing key `lm_head.biases`"),
    ({}, {"scales": None}, "`lm_head.biases` does not belong"),
    ({}, {"words": torch.ones(8, 4, dtype=torch.int32)}, "stored as int32"),
    ({}, {"words": torch.ones(8, dtype=torch.uint32)}, "not matrices"),
    ({}, {"scales": torch.ones(8, 1, dtype=torch.float64)}, "stored as float64"),
    ({}, {"biases": torch.ones(8, 1).half()}, "stored as float16"),
    ({"model_type": "qwen3_next"}, {}, "in a form of its own"),
]


@pytest.mark.parametrize(("fields", "tensors", "named"), SPOILED, ids=str)
def test_what_mlx_does_not_write_is_named(
    fields: dict[str, Any], tensors: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """mlx-lm writes no `quant_method`, and at first wrote `quantization` alone."""
    kind, names = fields.get("model_type", "llama"), {"words": "weight"}
    found = {f"lm_head.{names.get(name, name)}": one for name, one in {**ONE, **tensors}.items() if one is not None}
    save_file(found, tmp_path / "model.safetensors", {"format": "mlx"})
    config = {"model_type": kind, "quantization": {"group_size": 32, "bits": 4, **fields, "model_type": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputRefused) as refused:
        quantized_checkpoint(open_checkpoint(tmp_path))
    assert named in refused.value.message and refused.value.hint
