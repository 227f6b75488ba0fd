"""The schemes of `llmconv quantize`: how each stores weights, and what compressed-tensors, vLLM and SGLang call that.

Fields and values are those of the presets in `compressed_tensors/quantization/quant_scheme.py`; which `format` goes
with which weights is what `can_compress` of its compressors says. A new scheme is a row of `SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmconv.compressed.rounding import (
    FLOAT8,
    MxFloat4,
    NvFloat4,
    Parts,
    PerBlock,
    SharedPeak,
    packed_integers,
)
from llmconv.errors import UsageProblem
from llmconv.export.quantization.block_rounding import NONE, SIZES, BlockFormat
from llmconv.tensors import BY_NAME, LazyTensor


@dataclass(frozen=True)
class Weight:
    """A weight that is quantized."""

    name: str  # of its tensor, such as `model.layers.0.mlp.up_proj.weight`
    tensor: LazyTensor  # [N, K]
    peak: SharedPeak  # the largest magnitude of all weights that vLLM joins with it


@dataclass(frozen=True)
class Scheme:
    """How weights are stored, and activations rounded at run time."""

    name: str
    format: str  # of the container, as compressed-tensors names it
    weights: Mapping[str, Any]  # fields of `QuantizationArgs`
    activations: Mapping[str, Any] | None
    unit: tuple[int, int]  # rows and columns of a matrix are multiples of these
    made: Callable[[Scheme, Weight], Parts]  # the tensors of a weight
    # the only scheme with options: how its codes of 4 bits are chosen; None for the others
    integers: BlockFormat | None = None

    def parts(self, weight: Weight) -> dict[str, LazyTensor]:
        """The tensors that replace a weight, by name."""
        stem = weight.name.removesuffix(".weight")
        return {stem + end: tensor for end, tensor in self.made(self, weight).items()}

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a matrix is divided by the blocks or groups of the scheme without a rest."""
        return all(size > 0 and size % unit == 0 for size, unit in zip(shape, self.unit, strict=True))

    def settings(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config`; `ignore` names the modules that a scheme for `Linear` would mean, too."""
        group = {
            "targets": ["Linear"],
            "weights": dict(self.weights),
            "input_activations": dict(self.activations) if self.activations else None,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "version": VERSION,
        }


VERSION = "0.20.1"
"""The release of compressed-tensors that the layouts were compared with."""


def _numbers(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    fields = {"num_bits": bits, "type": kind, "symmetric": True, "group_size": group, "strategy": strategy}
    return {**fields, "dynamic": False, **more}


def _dynamic(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "dynamic": True}


def _by_channel(scheme: Scheme, weight: Weight) -> Parts:
    codes = BY_NAME["int8"] if scheme.weights["type"] == "int" else FLOAT8
    return PerBlock(weight.name, weight.tensor, codes, None).parts()


def _integers(scheme: Scheme, weight: Weight) -> Parts:
    assert scheme.integers
    return packed_integers(weight.name, weight.tensor, scheme.integers, NONE)


BLOCK, GROUP = 128, 128  # rows and columns of a block of FP8; columns of a group of integers
NV = _numbers(4, "float", "tensor_group", 16, scale_dtype="torch.float8_e4m3fn")
MX = _numbers(4, "float", "group", 32, scale_dtype="torch.uint8")
INTEGERS = _numbers(4, "int", "group", GROUP)
PACKED = "pack-quantized"

ROWS = (
    Scheme(
        "fp8-dynamic",
        "float-quantized",
        _numbers(8, "float", "channel"),
        _dynamic(_numbers(8, "float", "token")),
        (1, 1),
        _by_channel,
    ),
    Scheme(
        "fp8-block",
        "float-quantized",
        _numbers(8, "float", "block", block_structure=[BLOCK, BLOCK]),
        _dynamic(_numbers(8, "float", "group", 128)),
        (BLOCK, BLOCK),
        lambda scheme, weight: PerBlock(weight.name, weight.tensor, FLOAT8, (BLOCK, BLOCK)).parts(),
    ),
    Scheme(
        "w8a8",
        "int-quantized",
        _numbers(8, "int", "channel"),
        _dynamic(_numbers(8, "int", "token")),
        (1, 1),
        _by_channel,
    ),
    Scheme("w4a16", PACKED, INTEGERS, None, (1, GROUP), _integers, BlockFormat(size=GROUP, symmetric=True)),
    Scheme(
        "w4a16-asym",
        PACKED,
        {**INTEGERS, "symmetric": False},
        None,
        (8, GROUP),  # zero points of eight rows share a word
        _integers,
        BlockFormat(size=GROUP),
    ),
    Scheme(
        "nvfp4a16",
        "nvfp4-pack-quantized",
        NV,
        None,
        (1, 16),
        lambda scheme, weight: NvFloat4(weight.name, weight.tensor, weight.peak).parts(),
    ),
    Scheme(
        "mxfp4",
        "mxfp4-pack-quantized",
        MX,
        _dynamic(MX),
        (1, 32),
        lambda scheme, weight: MxFloat4(weight.name, weight.tensor).parts(),
    ),
    Scheme(
        "mxfp4a16",
        "mxfp4-pack-quantized",
        MX,
        None,
        (1, 32),
        lambda scheme, weight: MxFloat4(weight.name, weight.tensor).parts(),
    ),
)
SCHEMES = {scheme.name: scheme for scheme in ROWS}
METHODS = ("search", "rtn")


def scheme_of(name: str, block: int | None = None, method: str | None = None) -> Scheme:
    """The scheme of a name, with integers in groups of `block` columns, chosen by `method`.

    Raises UsageProblem: no such scheme or value, or an option of another scheme.
    """
    if name not in SCHEMES:
        raise UsageProblem(f"unknown scheme `{name}`", hint=f"`--scheme` is one of: {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    having = ", ".join(one.name for one in ROWS if one.integers)
    given = {"--quant-block": block is not None, "--method": method is not None}
    if scheme.integers is None:
        if option := next((option for option, is_given in given.items() if is_given), ""):
            raise UsageProblem(f"`{option}` does not apply to `--scheme {name}`", hint=f"only to: {having}")
        return scheme
    if method not in (None, *METHODS):
        raise UsageProblem(f"`--method` is {method!r}", hint=f"give one of: {', '.join(METHODS)}")
    if block not in (None, *SIZES):
        raise UsageProblem(
            f"no kernel has groups of {block} weights", hint=f"`--quant-block` is one of: {', '.join(map(str, SIZES))}"
        )
    size = block or scheme.integers.size
    return replace(
        scheme,
        weights={**scheme.weights, "group_size": size},
        unit=(scheme.unit[0], size),
        integers=replace(scheme.integers, size=size, search=method != "rtn"),
    )
