"""QuantizationSettings: which weights of a model become integer codes, and with how many bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from llmconv.errors import UnsupportedInput, UsageProblem, listing
from llmconv.export.export_options import ExportOptions
from llmconv.export.graph_spec import FLOAT32
from llmconv.export.quantization.block_rounding import BITS, SIZES, BlockFormat, ColumnFormat, WeightFormat
from llmconv.tensors import LazyTensor
from llmconv.timed_patterns import MatchTime, PatternProblem, compiled, finds

INT8 = BlockFormat(bits=8, symmetric=True, search=False)
"""8 bits need no search: its gain is below the rounding of activations to int8."""

VALUES = r"v_proj|qkv_proj|qkv|query_key_value|Wqkv|c_attn|attn_qkv|in_proj_qkv"
LAST = r"down_proj|w2|dense_4h_to_h|fc2|fc_out|mlp\.c_proj|linear_2|output_linear"
DOWN = re.compile(rf"(?:^|\.)(?:{LAST})(?:\.|$)")
"""The last projection of an MLP, whose inputs have the largest outliers."""

# Projections whose rounding costs most: to values, and from the inner size of the MLP back
SENSITIVE = re.compile(rf"(?:^|\.)(?:{VALUES}|{LAST})(?:\.|$)")

ATTENTION = re.compile(r"(?:^|[._])(?:attn|attention|self_attention)\.")
"""A projection of attention: a small share of a layer's weights, and a large one of what its rounding costs."""

SMALL, SHARE = 1 << 16, 1e-4
"""A matrix stays as it is if it has fewer elements than both this number and this share of all weights."""

COLUMNS = "awq-columns"
METHODS = (COLUMNS, "search", "rtn", "gptq", "awq")

MEASURING = {"gptq": "a text of many pages", "awq": "a text on which activations are measured"}
"""What the methods for 4 bits need that measure activations, and for which a few hundred tokens are not enough."""

EXCLUDE, OTHER_BITS = "--quant-exclude", "--quant-bits"  # options with patterns for the names of weights
DEPENDENT = ("quant_block", "symmetric", "quant_exclude", "quant_bits", "method", "calibrate", "static_activations")
"""Options of `export` that need `quant`."""


@dataclass(frozen=True)
class Preset:
    """A choice of formats."""

    layers: WeightFormat  # of matrices in layers
    head: BlockFormat  # of the output head
    tied: BlockFormat | None = None  # of a head that is the embedding, too; None for that of other heads
    down: BlockFormat | None = None  # of the last projections of MLPs; None for that of the other matrices in layers
    # projections of attention have 8 bits, and other sensitive ones in the first and last eighth of the layers and in
    # every third between, as in llama.cpp's Q4_K_M and ONNX Runtime GenAI's k_quant_mixed
    mixed: bool = False


PRESETS = {
    "int8": Preset(INT8, INT8),
    "int4": Preset(BlockFormat(size=64), BlockFormat(size=64), tied=INT8),
    "int4-mixed": Preset(BlockFormat(), INT8, mixed=True),
    "int4-small": Preset(BlockFormat(size=128), BlockFormat(size=128)),
    "a8w8": Preset(ColumnFormat(), INT8, down=INT8),
}
WITHOUT_TEXT = {**PRESETS, "int4": Preset(BlockFormat(), INT8)}
"""Those of codes that are chosen by the weights alone, which lose too much in larger blocks."""

BRIEF = 256  # tokens that are enough for `COLUMNS` (docs/quantization.md)
ADD_TEXT = "add `--calibrate FILE`, or `--calibrate default` for the text that ships with llmconv"


@dataclass(frozen=True)
class QuantizationSettings:
    """Options of `llmconv export --quant`.

    Raises UsageProblem: an unknown preset or block size, an invalid expression, or other bits than 4 or 8.
    """

    preset: str
    block: int | None = None  # size of a block; None for that of the preset
    symmetric: bool = False
    exclude: tuple[str, ...] = ()  # regular expressions for the names of weights that stay as they are
    # bits by regular expressions for names of weights; the last that matches counts
    bits: tuple[tuple[str, int], ...] = ()
    method: str = "search"  # how codes are chosen, one of `METHODS`
    text: str = ""  # sha256 of the text on which activations are measured; empty without one
    brief: bool = False  # the text is llmconv's own, of which the first tokens are enough
    static: bool = False  # activations are rounded in ranges that are measured on the text

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
        return {EXCLUDE: list(self.exclude), OTHER_BITS: [pattern for pattern, _ in self.bits]}

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> QuantizationSettings | None:
        """The settings of the options of `export`; None if nothing is quantized.

        It reads `quant`, those of `DEPENDENT`, and `kv_cache`, which also uses `calibrate`. Raises UsageProblem: as the
        class; or options that need `quant` or `calibrate`.
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
        method = given["method"] or (COLUMNS if _has_small_layers(given["quant"]) else "search")
        exclude, patterns = (
            (found,) if isinstance(found := given[name], str) else tuple(found or ())
            for name in ("quant_exclude", "quant_bits")
        )
        bits = tuple(map(_pattern_bits, patterns))
        text, own = "", method == COLUMNS and given["calibrate"] is None
        if given["calibrate"] is not None or own:
            from llmconv.runtime.tokenizer import CalibrationText  # noqa: PLC0415 - most exports run no text

            text = (CalibrationText.shipped() if own else CalibrationText.read(given["calibrate"])).sha256
        brief = own and not options["kv_cache"]  # whose scales need more tokens
        rest = exclude, bits, method, text, brief, given["static_activations"]
        return cls(options["quant"], given["quant_block"], given["symmetric"], *rest)

    def by_weights_alone(self) -> QuantizationSettings:
        """The same without a text, for a model that cannot run one."""
        return replace(self, method="search", text="", brief=False)

    def format_of(
        self, name: str, parameter: str, layer: int | None, layers: int, *, tied: bool = False
    ) -> WeightFormat | None:
        """The format of a stored tensor that belongs to a parameter of the model; None to leave it as it is.

        `layer` is None outside of the layers, as for the head; `tied`: rows of it are looked up, too.
        """
        if any(matches(EXCLUDE, pattern, name) for pattern in self.exclude):
            return None
        preset = (PRESETS if self.text else WITHOUT_TEXT)[self.preset]
        form = preset.layers if layer is not None else (tied and preset.tied) or preset.head
        if preset.down and layer is not None and (DOWN.search(parameter) or DOWN.search(name)):
            form = preset.down
        eighth = layers // 8
        more = layer is not None and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
        if preset.mixed and layer is not None:
            sensitive = [ATTENTION, SENSITIVE] if more else [ATTENTION]
            form = INT8 if any(one.search(parameter) or one.search(name) for one in sensitive) else form
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
        fields = {
            "quant": self.preset,
            "quant_block": self.block,
            "symmetric": self.symmetric,
            "quant_exclude": list(self.exclude),
            "quant_bits": [f"{pattern}={bits}" for pattern, bits in self.bits],
            "method": "" if self.method == "search" else self.method,
            "calibrate": self.text,
            "calibrate_tokens": BRIEF if self.brief else 0,
            "static_activations": self.static,
        }
        return {name: value for name, value in fields.items() if value}


def _check_method(given: Mapping[str, Any]) -> None:
    if given["method"] not in (None, *METHODS):
        raise UsageProblem(f"`--method` is {given['method']!r}", hint=f"give one of: {', '.join(METHODS)}")
    if (method := given["method"]) not in (COLUMNS, *MEASURING):
        return
    if given["calibrate"] is None and method in MEASURING:
        raise UsageProblem(f"`--method {method}` needs {MEASURING[method]}", hint=ADD_TEXT)
    if given["quant"] in PRESETS and not _has_small_layers(given["quant"]):
        raise UsageProblem(
            f"`--method {method}` is for weights of 4 bits, which `--quant {given['quant']}` does not have",
            hint="leave out `--method`: weights of 8 bits gain nothing from it",
        )


def _has_small_layers(preset: str) -> bool:
    """Whether the layers of a preset have codes of 4 bits."""
    layers = PRESETS[preset].layers if preset in PRESETS else None
    return isinstance(layers, BlockFormat) and layers.bits == BITS[0]


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
        raise UsageProblem("`--static-activations` needs a text on which ranges are measured", hint=ADD_TEXT)


def _blocks(preset: Preset, bits: int, form: WeightFormat) -> BlockFormat:
    layers = preset.layers if isinstance(preset.layers, BlockFormat) else BlockFormat()
    size = form.size if isinstance(form, BlockFormat) else INT8.size
    return replace(layers, bits=4, search=True) if bits == BITS[0] else replace(INT8, size=size)


def _pattern_bits(text: str) -> tuple[str, int]:
    pattern, _, bits = text.rpartition("=")
    if not pattern or bits not in map(str, BITS):
        raise UsageProblem(f"`--quant-bits` is {text!r}", hint="write it as `PATTERN=8` or `PATTERN=4`")
    return pattern, int(bits)


SHARED, CPU_TARGET = "shared-buffer", "ort-cpu"


def with_kv_cache(given: ExportOptions) -> ExportOptions:
    """The options, with a shared buffer for a cache of codes; UsageProblem for options that contradict `kv_cache`."""
    kind = given["kv_cache"]
    if kind is None:
        return given
    contradictions = {
        f"--cache {given['cache']}": given["cache"] not in (None, SHARED),
        f"--shapes {given['shapes']}": given["shapes"] != "dynamic",
        f"--target {given['target']}": given["target"] not in (None, CPU_TARGET),
        f"--precision {given['precision']}": given["precision"] not in (None, FLOAT32),
        "--stages": given["stages"] > 1,
        "--prefix": given["prefix"] is not None,
    }
    if found := next((option for option, wrong in contradictions.items() if wrong), ""):
        raise UsageProblem(
            f"`--kv-cache {kind}` needs float32 graphs with a shared buffer for onnxruntime's CPU, not `{found}`",
            hint=f"leave out `{found}`, or `--kv-cache`",
        )
    return {**given, "cache": SHARED}


def require_kv_cache(given: ExportOptions, family: object, *, fits: bool) -> None:
    """Refuses a model whose attention cannot read codes, and a precision that the target chose.

    `given` are the options after the target's; `fits` is whether `GroupQueryAttention` can keep the model's cache.
    Raises UnsupportedInput: the model does not fit; UsageProblem: the graphs compute in another dtype than float32.
    """
    if not fits:
        raise UnsupportedInput(
            f"`{family}` has a cache that GroupQueryAttention cannot keep, the only operator for `--kv-cache int8`",
            hint="leave out `--kv-cache`",
        )
    if given["precision"] not in (None, FLOAT32):
        raise UsageProblem(
            f"`--kv-cache {given['kv_cache']}` needs float32 graphs, and the target computes in {given['precision']}",
            hint="add `--precision float32`",
        )


INDEX = re.compile(r"\.\d+\.")  # in the name of a tensor of a layer


def require_pattern(option: str, pattern: str) -> None:
    """Raises UsageProblem if the regular expression of an option is invalid, or nested too deeply."""
    try:
        compiled(pattern)
    except PatternProblem as problem:
        raise _refused(option, pattern, problem) from problem


def matches(option: str, pattern: str, name: str, time: MatchTime | None = None) -> bool:
    """Whether an option's regular expression is found anywhere in the name of a stored tensor.

    Raises UsageProblem if that takes too long; several matches may share a `time` limit.
    """
    try:
        return finds(compiled(pattern), name, time, anywhere=True)
    except PatternProblem as problem:
        raise _refused(option, pattern, problem) from problem


def require_used(patterns: Mapping[str, Sequence[str]], tensors: Mapping[str, LazyTensor]) -> None:
    """Raises UsageProblem for a pattern of an option that matches no stored tensor, or takes too long."""
    time = MatchTime()
    for option, given in patterns.items():
        for pattern in given:
            if not any([matches(option, pattern, name, time) for name in tensors]):
                raise UsageProblem(f"`{option} {pattern}` matches no weight", hint=_near(pattern, tensors))


def _near(pattern: str, tensors: Mapping[str, LazyTensor]) -> str:
    """Names that were possibly meant; without such, those of an embedding, a head and a matrix of a layer."""
    matrices = [name.removesuffix(".weight") for name, tensor in tensors.items() if len(tensor.shape) > 1]
    parts = dict.fromkeys(part for name in matrices for part in name.split(".") if not part.isdecimal())
    if found := get_close_matches(pattern, dict.fromkeys([*parts, *matrices]), n=3):
        return f"close names: {listing(found)}"
    outside = [name for name in matrices if not INDEX.search(name)]
    return f"names are such as {listing([*outside[:2], *(name for name in matrices if INDEX.search(name))][:3])}"


def _refused(option: str, pattern: str, problem: PatternProblem) -> UsageProblem:
    return UsageProblem(
        f"`{option}` has the regular expression {pattern[:80]!r}, {problem}",
        hint="`lm_head` matches every name with it",
    )
