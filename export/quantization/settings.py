"""QuantizationSettings: which weights of a model become integer codes, and with how many bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.export.quantization.block_format import BITS, SIZES, BlockFormat
from llmconv.export.quantization.column_format import ColumnFormat, WeightFormat
from llmconv.export.quantization.name_patterns import matches, require_pattern
from llmconv.runtime.calibration_text import CalibrationText

INT8 = BlockFormat(bits=8, symmetric=True, search=False)
"""8 bits need no search: its gain is below the rounding of activations to int8."""

DOWN = re.compile(r"(?:^|\.)(?:down_proj|w2|dense_4h_to_h|fc2|fc_out|mlp\.c_proj|linear_2|output_linear)(?:\.|$)")
"""The last projection of an MLP, whose inputs have the largest outliers."""

SENSITIVE = re.compile(
    r"(?:^|\.)(?:v_proj|qkv_proj|qkv|query_key_value|Wqkv|c_attn|attn_qkv|in_proj_qkv|"
    r"down_proj|w2|dense_4h_to_h|fc2|fc_out|mlp\.c_proj|linear_2|output_linear)(?:\.|$)"
)
"""Projections whose rounding costs most: to values, and from the inner size of the MLP back."""

SMALL, SHARE = 1 << 16, 1e-4
"""A matrix stays as it is if it has fewer elements than both this number and this share of all weights."""

METHODS = ("rtn", "search", "gptq", "awq")

MEASURING = {"gptq": "a text of many pages", "awq": "a text on which activations are measured"}
"""What the methods for 4 bits need that measure activations."""

EXCLUDE, OTHER_BITS = "--quant-exclude", "--quant-bits"
"""Options with patterns for the names of weights."""

DEPENDENT = ("quant_block", "symmetric", "quant_exclude", "quant_bits", "method", "calibrate", "static_activations")
"""Options of `export` that need `quant`."""


@dataclass(frozen=True)
class Preset:
    """A choice of formats.

    Attributes:
        layers: of matrices in layers.
        head: of the output head, and of an embedding tied to it.
        down: of the last projections of MLPs; None for that of the other matrices in layers.
        mixed: sensitive projections have 8 bits in the first and last eighth of the layers and in every third between,
            as in llama.cpp's Q4_K_M and ONNX Runtime GenAI's k_quant_mixed.
    """

    layers: WeightFormat
    head: BlockFormat
    down: BlockFormat | None = None
    mixed: bool = False


PRESETS = {
    "int8": Preset(INT8, INT8),
    "int4": Preset(BlockFormat(), INT8),
    "int4-mixed": Preset(BlockFormat(), INT8, mixed=True),
    "int4-small": Preset(BlockFormat(size=128), BlockFormat(size=128)),
    "a8w8": Preset(ColumnFormat(), INT8, down=INT8),
}

ADD_TEXT = "add `--calibrate FILE`, or `--calibrate default` for the text that ships with llmconv"


@dataclass(frozen=True)
class QuantizationSettings:
    """Options of `llmconv export --quant`.

    Attributes:
        block: size of a block; None for that of the preset.
        exclude: regular expressions for the names of weights that stay as they are.
        bits: bits by regular expressions for names of weights; the last that matches counts.
        method: how codes are chosen, one of `METHODS`.
        text: sha256 of the text on which activations are measured; empty without one.
        static: activations are rounded in ranges that are measured on the text.

    Raises:
        UsageProblem: an unknown preset or block size, an invalid expression, or other bits than 4 or 8.
    """

    preset: str
    block: int | None = None
    symmetric: bool = False
    exclude: tuple[str, ...] = ()
    bits: tuple[tuple[str, int], ...] = ()
    method: str = "search"
    text: str = ""
    static: bool = False

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UsageProblem(f"`--quant` is {self.preset!r}", hint=f"give one of: {', '.join(PRESETS)}")
        if self.block not in (None, *SIZES):
            raise UsageProblem(
                f"`--quant-block {self.block}`: no operator has blocks of {self.block} weights",
                hint=f"give one of: {', '.join(map(str, SIZES))}",
            )
        for option, patterns in self.patterns.items():
            for pattern in patterns:
                require_pattern(option, pattern)

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The patterns for names, by option."""
        return {EXCLUDE: list(self.exclude), OTHER_BITS: [pattern for pattern, _ in self.bits]}

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> QuantizationSettings | None:
        """The settings of the options of `export`; None if nothing is quantized.

        It reads `quant`, those of `DEPENDENT`, and `kv_cache`, which also uses `calibrate`.

        Raises:
            UsageProblem: as the class; or options that need `quant` or `calibrate`.
        """
        _check_static(options)
        given = {name: options[name] for name in ("quant", *DEPENDENT)}
        if options["quant"] is None:
            cache = {"calibrate"} if options["kv_cache"] else set()
            if unused := next((name for name, value in given.items() if value and name not in cache), None):
                raise UsageProblem(
                    f"`--{unused.replace('_', '-')}` has no effect without `--quant`", hint="add `--quant int4`"
                )
            return None
        _check_method(given)
        rounds = options["kv_cache"] or options["quant"] == "a8w8"
        if given["calibrate"] is not None and given["method"] == "rtn" and not rounds:
            raise UsageProblem("`--calibrate` guides the search, which `--method rtn` leaves out", hint="leave out one")
        bits = tuple(map(_pattern_bits, _texts(given["quant_bits"])))
        text = CalibrationText.read(given["calibrate"]).sha256 if given["calibrate"] is not None else ""
        exclude = _texts(given["quant_exclude"])
        rest = exclude, bits, given["method"] or "search", text, given["static_activations"]
        return cls(options["quant"], given["quant_block"], given["symmetric"], *rest)

    def format_of(self, name: str, parameter: str, layer: int | None, layers: int) -> WeightFormat | None:
        """The format of a stored tensor that belongs to a parameter of the model; None to leave it as it is.

        `layer` is None outside of the layers, as for the head.
        """
        if any(matches(EXCLUDE, pattern, name) for pattern in self.exclude):
            return None
        preset = PRESETS[self.preset]
        form = preset.head if layer is None else preset.layers
        if preset.down and layer is not None and (DOWN.search(parameter) or DOWN.search(name)):
            form = preset.down
        if preset.mixed and layer is not None and _has_more_bits(layer, layers):
            form = INT8 if SENSITIVE.search(parameter) or SENSITIVE.search(name) else form
        for pattern, bits in self.bits:
            if matches(OTHER_BITS, pattern, name):
                form = _blocks(preset, bits, form)
        if isinstance(form, ColumnFormat):
            return form
        search = form.search and self.method != "rtn"
        return replace(form, size=self.block or form.size, symmetric=self.symmetric or form.symmetric, search=search)

    def stored(self, name: str) -> None:
        """The codes of a weight that are kept: none, all are made anew."""

    def least_elements(self, total: int) -> float:
        """The number of elements below which a matrix stays as it is; `total` counts those of all weights."""
        return min(SMALL, SHARE * total)

    def manifest_fields(self) -> dict[str, Any]:
        """Fields of the manifest."""
        fields = {
            "quant": self.preset,
            "quant_block": self.block,
            "symmetric": self.symmetric,
            "quant_exclude": list(self.exclude),
            "quant_bits": [f"{pattern}={bits}" for pattern, bits in self.bits],
            "method": "" if self.method == "search" else self.method,
            "calibrate": self.text,
            "static_activations": self.static,
        }
        return {name: value for name, value in fields.items() if value}


def _check_method(given: Mapping[str, Any]) -> None:
    """Refuses an unknown method, and one that has nothing to work on."""
    if given["method"] not in (None, *METHODS):
        raise UsageProblem(f"`--method` is {given['method']!r}", hint=f"give one of: {', '.join(METHODS)}")
    if (method := given["method"]) not in MEASURING:
        return
    if given["calibrate"] is None:
        raise UsageProblem(
            f"`--method {method}` needs {MEASURING[method]}",
            hint=ADD_TEXT,
        )
    layers = PRESETS[given["quant"]].layers if given["quant"] in PRESETS else None
    if layers and not (isinstance(layers, BlockFormat) and layers.bits == BITS[0]):
        raise UsageProblem(
            f"`--method {method}` is for weights of 4 bits, which `--quant {given['quant']}` does not have",
            hint="leave out `--method`: weights of 8 bits gain nothing from it",
        )


def _check_static(options: Mapping[str, Any]) -> None:
    """Refuses `static_activations` without the preset and the text that it needs."""
    if not options["static_activations"]:
        return
    if options["quant"] != "a8w8":
        raise UsageProblem(
            "`--static-activations` applies to `--quant a8w8` only, which rounds activations with one scale",
            hint="add `--quant a8w8`, or leave it out",
        )
    if options["calibrate"] is None:
        raise UsageProblem(
            "`--static-activations` needs a text on which ranges are measured",
            hint=ADD_TEXT,
        )


def _blocks(preset: Preset, bits: int, form: WeightFormat) -> BlockFormat:
    """The blocks of a weight for which other bits were asked."""
    layers = preset.layers if isinstance(preset.layers, BlockFormat) else BlockFormat()
    size = form.size if isinstance(form, BlockFormat) else INT8.size
    return replace(layers, bits=4, search=True) if bits == BITS[0] else replace(INT8, size=size)


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or one of every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _pattern_bits(text: str) -> tuple[str, int]:
    pattern, _, bits = text.rpartition("=")
    if not pattern or bits not in map(str, BITS):
        raise UsageProblem(f"`--quant-bits` is {text!r}", hint="write it as `PATTERN=8` or `PATTERN=4`")
    return pattern, int(bits)
