"""The schemes of `llmconv quantize`: how each stores weights, and what compressed-tensors, vLLM and SGLang call that.

Fields and values are those of the presets in `compressed_tensors/quantization/quant_scheme.py`; which `format` goes
with which weights is what `can_compress` of its compressors says. A new scheme is a row of `SCHEMES`.

Integers of 4 bits may have the form of AutoAWQ or GPTQ instead (`BASE_FORMATS`). Fields that vLLM reads of these:
`AWQMarlinConfig` and `GPTQMarlinConfig` in `vllm/model_executor/layers/quantization/`. Of gpt-oss readers know the form
that it is released in alone (`Mxfp4Config` there and in transformers), which says nothing of activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmconv.compressed.rounding import (
    FLOAT8,
    Measured,
    MxFloat4,
    NvFloat4,
    Parts,
    PerBlock,
    SharedPeak,
    awq_integers,
    gptq_integers,
    packed_integers,
    stacked_floats,
)
from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.export.quantization.block_rounding import SIZES, BlockFormat
from llmconv.tensors import BY_NAME, LazyTensor


@dataclass(frozen=True)
class Weight:
    """A weight that is quantized."""

    name: str  # of its tensor, such as `model.layers.0.mlp.up_proj.weight`
    tensor: LazyTensor  # [N, K]
    peak: SharedPeak  # the largest magnitude of all weights that vLLM joins with it
    measured: Measured = Measured()  # on a text


@dataclass(frozen=True)
class Scheme:
    """How weights are stored, and activations rounded at run time."""

    name: str
    format: str  # of the container, as compressed-tensors names it, or one of `BASE_FORMATS`
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
        if self.format in BASE_FORMATS:
            return BASE_FORMATS[self.format][1](self, ignore)
        if self.format == RELEASED:
            return {"modules_to_not_convert": [*KEPT_OF_RELEASED], "quant_method": RELEASED}
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


RELEASED = "mxfp4"
"""The `quant_method` of gpt-oss as it is released: experts as MXFP4 in stacks, everything else as it is."""

KEPT_OF_RELEASED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")

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
    made = BASE_FORMATS[scheme.format][0] if scheme.format in BASE_FORMATS else packed_integers
    return made(weight.name, weight.tensor, scheme.integers, weight.measured)


def _awq_settings(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """Zero points are always there: without them vLLM takes a slow kernel, which reads them all the same."""
    sizes = {"bits": 4, "group_size": scheme.weights["group_size"], "zero_point": True, "version": "gemm"}
    return {"quant_method": "awq", **sizes, "modules_to_not_convert": list(ignore)}


def _gptq_settings(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    sizes = {"bits": 4, "group_size": scheme.weights["group_size"], "sym": True, "desc_act": False, "lm_head": False}
    kept: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignore if name != HEAD}  # which are not quantized
    more = {"dynamic": kept} if kept else {}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", **sizes, **more}


def kept_modules(settings: Mapping[str, Any]) -> list[Any] | None:
    """The modules that a `quantization_config` of any form leaves as they are, the reverse of `Scheme.settings`."""
    form, rules = settings.get("quant_method"), settings.get("dynamic") or {}
    if form == "gptq":
        found = [re.sub(r"\\(.)", r"\1", rule[3:-1]) for rule in rules] if isinstance(rules, Mapping) else None
        return None if found is None else [*found, *([] if any(name.endswith(HEAD) for name in found) else [HEAD])]
    found = settings.get("modules_to_not_convert" if form == "awq" else "ignore")
    return found if isinstance(found, list) else None


HEAD = "lm_head"
BASE_FORMATS = {"awq": (awq_integers, _awq_settings), "gptq": (gptq_integers, _gptq_settings)}
"""Forms of older tools for integers of 4 bits: the tensors of a weight, and the `quantization_config`."""


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


def fitted(scheme: Scheme, config: Mapping[str, Any]) -> Scheme:
    """The scheme, of a gpt-oss in the form that it is released in; UnsupportedInput: it has another one."""
    if config.get("model_type") != "gpt_oss":
        return scheme
    if not scheme.format.startswith("mxfp4"):
        raise UnsupportedInput(
            f"gpt-oss is written as it is released, with its experts as MXFP4, and not as {scheme.name}",
            hint="give `--scheme mxfp4`; `llmconv export --quant int4` makes graphs of codes of it",
        )
    return released(scheme)


def released(scheme: Scheme) -> Scheme:
    """A scheme of MXFP4 in the form of gpt-oss, of which engines decide how activations are rounded."""

    def made(_: Scheme, weight: Weight) -> Parts:
        return stacked_floats(weight.name, weight.tensor)

    return replace(scheme, format=RELEASED, activations=None, made=made)


METHODS = ("search", "rtn", "gptq", "awq")
MEASURING = ("gptq", "awq")  # those that need a text


@dataclass(frozen=True)
class IntegerOptions:
    """The options of integers of 4 bits, by the names of the command's options; None where they are not given."""

    quant_block: int | None = None  # columns that share a scale
    method: str | None = None  # one of `METHODS`
    calibrate: object = None  # a text, or the name of one
    base_format: str | None = None  # one of `BASE_FORMATS`

    @property
    def rounding(self) -> str:
        """The method, by default `search` with a text.

        Without one, plain rounding: scales with the least squared error shrink the largest weights, which cost
        SmolLM2-135M more (divergence 0.394 nats instead of 0.371 in blocks of 64, 0.165 instead of 0.150 in 128).
        """
        return self.method or ("rtn" if self.calibrate is None else "search")

    def require_possible(self) -> None:
        """Raises UsageProblem: an unknown value, or options that exclude or need each other."""
        if self.method not in (None, *METHODS):
            raise UsageProblem(f"`--method` is {self.method!r}", hint=f"give one of: {', '.join(METHODS)}")
        if self.base_format not in (None, *BASE_FORMATS):
            known = ", ".join(BASE_FORMATS)
            raise UsageProblem(f"`--base-format` is {self.base_format!r}", hint=f"give one of: {known}")
        if self.quant_block not in (None, *SIZES):
            raise UsageProblem(
                f"no kernel has groups of {self.quant_block} weights",
                hint=f"`--quant-block` is one of: {', '.join(map(str, SIZES))}",
            )
        if self.method in MEASURING and self.calibrate is None:
            raise UsageProblem(
                f"`--method {self.method}` needs a text on which activations are measured",
                hint="add `--calibrate FILE`, or `--calibrate default` for the text that ships with llmconv",
            )
        if self.method == "rtn" and self.calibrate is not None:
            raise UsageProblem("`--calibrate` guides the search, which `--method rtn` leaves out", hint="leave out one")


def scheme_of(name: str, options: IntegerOptions = IntegerOptions()) -> Scheme:
    """The scheme of a name, with the options of its integers.

    Raises UsageProblem: no such scheme or value, or an option of another scheme.
    """
    if name not in SCHEMES:
        raise UsageProblem(f"unknown scheme `{name}`", hint=f"`--scheme` is one of: {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    if scheme.integers is None:
        given = [f"--{option.replace('_', '-')}" for option, value in vars(options).items() if value is not None]
        if given:
            having = ", ".join(one.name for one in ROWS if one.integers)
            raise UsageProblem(f"`{given[0]}` does not apply to `--scheme {name}`", hint=f"only to: {having}")
        return scheme
    options.require_possible()
    size, form = options.quant_block or scheme.integers.size, options.base_format
    if form == "gptq" and not scheme.integers.symmetric:
        raise UsageProblem(
            f"`--base-format gptq` has no zero points that all engines read alike, and `--scheme {name}` has some",
            hint="give `--scheme w4a16`, or `--base-format awq`",
        )
    return replace(
        scheme,
        format=form or scheme.format,
        weights={**scheme.weights, "group_size": size},
        unit=(8 if form else scheme.unit[0], size),  # the older forms have eight rows in a word
        integers=replace(scheme.integers, size=size, search=options.rounding != "rtn"),
    )
