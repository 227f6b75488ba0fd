"""The tensors of every scheme against the package compressed-tensors: its scales and its compressors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from llmconv.compressed import rounding
from llmconv.compressed.rounding import SharedPeak
from llmconv.compressed.schemes import IntegerOptions, Weight, scheme_of
from llmconv.tensors import BY_NAME, LazyTensor, in_memory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pydantic's, when the package is imported
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

PRESETS = {
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "w8a8": "W8A8",
    "w4a16": "W4A16",
    "w4a16-asym": "W4A16_ASYM",
    "nvfp4a16": "NVFP4A16",
    "mxfp4": "MXFP4",
    "mxfp4a16": "MXFP4A16",
}
EXACT = ("fp8-dynamic", "fp8-block", "w8a8", "nvfp4a16", "mxfp4")
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def odd_weight(dtype: str, rows: int = 128, columns: int = 256) -> torch.Tensor:
    """Normal rows; rows and groups of zeros, of -0.0, of tiny, subnormal and huge values, and of one outlier."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.02
    half = dtype == "float16"
    weight[1], weight[2] = 0, -0.0
    weight[3] *= 1e-3 if half else 1e-30
    weight[4] = torch.linspace(-1, 1, columns) * (1e-3 if half else 1e-37)
    weight[5] *= 1e5 if half else 1e33
    weight[6, 32:64], weight[6, 70] = 0, 50.0
    weight[7] = torch.arange(columns) % 33 / 16 - 1  # ties
    weight[8, :128] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16) * 0.5
    weight[9] = -weight[8]
    return weight.to(TYPES[dtype])


def lazy(weight: torch.Tensor) -> LazyTensor:
    dtype = BY_NAME[str(weight.dtype).removeprefix("torch.")]
    raw = weight.view(torch.uint8).numpy().view(dtype.numpy)
    return in_memory(raw.reshape(weight.shape), dtype)


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def preset(name: str) -> Any:
    return preset_name_to_scheme(PRESETS[name], ["Linear"])


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value of everything that shares a scale."""
    rows, columns = weight.shape
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        blocks = weight.reshape(rows // 128, 128, columns // 128, 128)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(rows, -1, args.group_size)
    return groups.amin(-1), groups.amax(-1)


def expected(name: str, weight: torch.Tensor, joined: torch.Tensor) -> dict[str, bytes]:
    """What the package makes of a weight; its quotients are those of float32, as its GPU kernels compute them."""
    scheme = preset(name)
    args = scheme.weights
    if name == "mxfp4":  # in float16 the package loses exponents below 2^-24, and takes 1 for them
        weight = weight.float()
    whole = generate_gparam(joined.amin(), joined.amax()) if args.strategy == "tensor_group" else None
    scale, _ = calculate_qparams(*extremes(weight, args), args, global_scale=whole)
    state = {"weight": weight.float(), "weight_scale": scale.float()}
    state |= {"weight_global_scale": whole} if whole is not None else {}
    kind = scheme_of(name).format
    found = BaseCompressor.get_value_from_registry(kind).compress(state, scheme)
    if kind in ("float-quantized", "int-quantized"):
        found["weight_scale"] = found["weight_scale"].to(weight.dtype)
    return {end: bits(tensor) for end, tensor in found.items()}


def made(name: str, weight: torch.Tensor, joined: torch.Tensor | None = None, **options: Any) -> dict[str, LazyTensor]:
    tensor = lazy(weight)
    peak = SharedPeak([("x.weight", tensor)] + ([("y.weight", lazy(joined))] if joined is not None else []))
    return scheme_of(name, IntegerOptions(**options)).parts(Weight("x.weight", tensor, peak))


def in_blocks(tensor: LazyTensor, size: int) -> bytes:
    """The bytes of a tensor that is read `size` rows at a time."""
    rows = range(0, tensor.num_rows, size)
    return b"".join(tensor.rows(start, min(start + size, tensor.num_rows)).tobytes() for start in rows)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", EXACT)
def test_bytes_are_those_of_the_package(name: str, dtype: str) -> None:
    weight = odd_weight(dtype)
    joined = weight[:64] * 2 if dtype != "bfloat16" else weight[:64]
    wanted = expected(name, weight, torch.cat([weight, joined]))
    found = made(name, weight, joined)
    for step in (128, 37):
        assert {key.removeprefix("x."): in_blocks(tensor, step) for key, tensor in found.items()} == wanted


def test_scales_read_before_codes_are_the_same() -> None:
    weight = odd_weight("bfloat16")
    first, other = made("fp8-block", weight), made("fp8-block", weight)
    scales = first["x.weight_scale"].read()
    assert scales.tobytes() == (in_blocks(other["x.weight"], 50), other["x.weight_scale"].read())[1].tobytes()
    assert first["x.weight"].read().tobytes() == other["x.weight"].read().tobytes()


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym"])
def test_integers_are_packed_as_the_package_packs_them(name: str) -> None:
    weight = odd_weight("bfloat16")
    weight[3:6] = weight[0]  # a range below 1e-30 counts as zero
    found = {key: torch.from_numpy(_plain(tensor)) for key, tensor in made(name, weight, method="rtn").items()}
    state = {key.removeprefix("x."): tensor for key, tensor in found.items()}
    state["weight_scale"] = state["weight_scale"].to(torch.float32)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    opened = compressor.decompress(dict(state), preset(name))
    again = compressor.compress({**opened, "weight": opened["weight"]}, preset(name))
    assert {key: bits(again[key]) for key in state} == {key: bits(tensor) for key, tensor in state.items()}
    error = (opened["weight"] - weight.float()).abs().reshape(128, 2, 128)
    step = state["weight_scale"].abs()[..., None]
    assert bool((error <= step * 1.01).all())


def _plain(tensor: LazyTensor) -> Any:
    array = tensor.read()
    return array.astype(np.float32) if tensor.dtype.name == "bfloat16" else array


@pytest.mark.parametrize("name", PRESETS)
def test_fields_are_those_of_the_preset(name: str) -> None:
    scheme = scheme_of(name)
    content = scheme.settings(["lm_head"])["config_groups"]["group_0"]
    assert QuantizationScheme(**{**content, "format": None}).model_dump() == preset(name).model_dump()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", EXACT)
def test_numpy_makes_the_same_bytes(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = odd_weight(dtype, columns=640)
    found = {key: tensor.read().tobytes() for key, tensor in made(name, weight).items()}
    assert rounding.compiled, "the C module is not built: `make setup`"
    monkeypatch.setattr(rounding, "compiled", None)
    assert {key: tensor.read().tobytes() for key, tensor in made(name, weight).items()} == found


def test_every_quotient_is_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bfloat16 numbers up to twice the range, under scales that shift them between their neighbors."""
    words = np.arange(1 << 16, dtype=np.uint16).view(BY_NAME["bfloat16"].numpy)
    rows = np.tile(words[np.abs(words.astype(np.float32)) < 1000], (3, 1))
    scales = np.array([[1.0], [1.0009765], [0.3]], np.float32)
    for kind in ("float8_e4m3fn", "int8", "uint8"):
        with monkeypatch.context() as patch:
            found = rounding.encode(rows, scales, rows.shape[1], BY_NAME[kind])
            patch.setattr(rounding, "compiled", None)
            assert rounding.encode(rows, scales, rows.shape[1], BY_NAME[kind]).tobytes() == found.tobytes()


def test_buffers_that_do_not_fit_are_refused() -> None:
    module: Any = rounding.compiled
    words, grid = bytes(64), bytearray(16)
    for options in ((3, 4, 4), (2, 0, 4), (2, 4, 0), (2, 7, 4), (2, 8, 4)):
        with pytest.raises(ValueError, match="do not fit"):
            module.peaks(words, grid, *options)
    for given in ((2, 8, 8, 3), (2, 8, 8, -1), (2, 8, 3, 2), (4, 8, 8, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            module.codes(words, grid, bytearray(31), *given)
