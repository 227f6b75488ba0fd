"""compressed-tensors, as llm-compressor writes it for vLLM: float8 or int8 with scales, packed integers, or e2m1.

Layout (`compressed_tensors/compressors/naive_quantized`, `pack_quantized`): `X.weight` with `X.weight_scale` of one, of
out×1, of out×groups or of blocks; or `X.weight_packed` int32 out×(in·bits/32) with `X.weight_scale` out×groups,
`X.weight_shape`, and, where the codes are not symmetric, `X.weight_zero_point` int32 (out·bits/32)×groups. Packed codes
and zero points are stored plus half their range. Zero points of int8 have the shape of the scales.

The config has groups of modules whose weights are stored alike. Fields and defaults:
`compressed_tensors/quantization/quant_args.py`. Which group a module belongs to: `match_targets`,
`_scheme_from_targets`: names come before patterns, those before classes, and in each the first in alphabetical order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import MalformedInput, UnsupportedInput, short
from llmconv.quantized_weights.float4 import MX, NV, exponent_bias, open_float4
from llmconv.quantized_weights.methods.fp8 import ACTIVATIONS
from llmconv.quantized_weights.packed_weight import (
    LARGEST,
    WHOLE_ROW,
    WIDTHS,
    GroupedWeight,
    PackedWeight,
    Packing,
    ScaledWeight,
    block_size,
    group_size,
    groups_in_order,
    open_scaled,
    pack,
    part,
    refuse,
    refuse_strays,
    require,
    require_middle,
    unpack,
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import Array, LazyTensor
from llmconv.timed_patterns import MatchTime, PatternProblem, compiled, finds

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", NV, MX, "mxfp8-quantized")
OF_GROUPS = ("dense", "mixed-precision")  # where each of `config_groups` may have a format of its own
WORDS, SCALES, ZEROS, GROUPS, SHAPE, GLOBAL = (
    f".weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape", "global_scale")
)

# fields that change what the weights mean, and the field in them that says how: not at all if empty or `dense`
NOT_READ = {"transform_config": "config_groups", "sparsity_config": "format", "moe_sparsity_config": "format"}


def open_compressed(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The quantized weights; MalformedInput for mismatched parts, UnsupportedInput for formats and fields unread."""
    config = checkpoint.config["quantization_config"]
    for name in {str(scheme.get("format")) for scheme in (config, *groups_of(config)) if scheme.get("format")}:
        if name not in (*FORMATS, *OF_GROUPS):
            raise UnsupportedInput(
                f"the model is stored by compressed-tensors as `{name[:40]}`, which is not supported",
                hint=f"supported are {', '.join(FORMATS)}; take the model it was quantized from",
            )
    for name, kind in NOT_READ.items():
        field = config.get(name)
        content = field.get(kind, field) if isinstance(field, Mapping) else field
        if content and content != "dense":
            problem = f"the model is stored by compressed-tensors with a `{name}`, which is not supported"
            raise UnsupportedInput(problem, hint="take the model it was quantized from")
    schemes, bias = WeightSchemes(config), exponent_bias(config)
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        if name.endswith(WORDS):
            stem = name.removesuffix(WORDS)
            scheme = schemes.of(stem)
            floats = scheme.kind == "float" and scheme.bits == 4
            if floats:
                kind = NV if scheme.group == 16 else MX
                weights[f"{stem}.weight"] = open_float4(checkpoint, stem, kind, scheme.group, bias)
            else:
                weights[f"{stem}.weight"] = _open_packed(checkpoint, stem, scheme)
        elif name.endswith(".weight") and tensor.dtype.name in LARGEST:
            weights[name] = _open_codes(checkpoint, name, schemes.of(name.removesuffix(".weight")))
    refuse_strays(checkpoint, (SCALES, ZEROS, GROUPS, SHAPE, GLOBAL), weights)
    return weights


def _open_codes(tensors: Mapping[str, LazyTensor], name: str, scheme: WeightScheme) -> ScaledWeight | GroupedWeight:
    """A weight of one code per element."""
    stem, codes = name.removesuffix(".weight"), tensors[name]
    _require_zeros(tensors, stem, scheme)
    if scheme.kind != ("int" if codes.dtype.name == "int8" else "float") or scheme.bits > 8:
        refuse(name, f"is stored as {codes.dtype.name}, the `config_groups` say {scheme.kind} of {scheme.bits} bits")
    block = (1, scheme.group) if scheme.group and scheme.group != WHOLE_ROW else scheme.block
    if block and stem + GROUPS in tensors:
        problem = f"`{name}` has groups in another order and no packed codes"
        raise UnsupportedInput(problem, hint="take the unquantized model")
    weight = open_scaled(tensors, name, stem + SCALES, block)
    if block and weight.block != (min(block[0], codes.shape[-2]), min(block[1], codes.shape[-1])):
        refuse(
            stem + SCALES, f"has shape {list(tensors[stem + SCALES].shape)}, not one scale per block of {list(block)}"
        )
    return _with_zeros(tensors, weight, scheme) if stem + ZEROS in tensors else weight


def _with_zeros(tensors: Mapping[str, LazyTensor], weight: ScaledWeight, scheme: WeightScheme) -> GroupedWeight:
    """A weight of int8 whose scales have zero points of the same shape, int8; value = (code - zero point) * scale."""
    name, end = weight.name, weight.name.removesuffix(".weight") + ZEROS
    codes, scales = tensors[name], tensors[weight.scales]
    if codes.dtype.name != "int8" or len(codes.shape) != 2 or scheme.block:
        kind = f"{codes.dtype.name} of {len(codes.shape)} axes"
        raise UnsupportedInput(f"`{name}` is {kind} with zero points", hint="take the unquantized model")
    zeros = require(tensors[end], end, scales.shape, ("int8",))
    height, width = weight.shape
    count = weight.cells[1]

    def spread(grid: Array) -> Array:
        return np.ascontiguousarray(np.broadcast_to(grid.reshape(-1, count), (height, count)))

    def stored_zeros() -> Array:
        found = _unsigned(spread(zeros.read()))
        return require_middle(found, 128, end) if scheme.symmetric else found

    return GroupedWeight(
        name,
        {**weight.parts, end: zeros},
        (height, width),
        name,
        weight.scales,
        lambda: spread(weight.grid),
        stored_zeros,
        groups_in_order(weight.scales, width, count, scheme.group or WHOLE_ROW),
        Packing(1, _unsigned, lambda numbers: (numbers ^ 0x80).view(np.int8), inputs_first=False),
        256,
    )


def _unsigned(codes: Array) -> Array:
    """int8 plus 128, as uint8."""
    return codes.view(np.uint8) ^ 0x80


def _open_packed(tensors: Mapping[str, LazyTensor], stem: str, scheme: WeightScheme) -> GroupedWeight:
    name, bits = stem + WORDS, scheme.bits
    words, scales = tensors[name], part(tensors, stem + SCALES, name)
    sizes = require(part(tensors, stem + SHAPE, name), stem + SHAPE, (2,), ("int64", "int32")).read().tolist()
    if not all(0 < size < 1 << 31 for size in sizes):
        refuse(stem + SHAPE, f"says {sizes}, which is not a shape")
    shape = (sizes[0], sizes[1])
    whole = scheme.group is None and not scheme.block
    if bits not in WIDTHS or scheme.kind != "int" or scheme.block or whole:
        odd = " in blocks" if scheme.block else " with one scale" if whole else ""
        raise UnsupportedInput(
            f"`{name}` is packed {scheme.kind} of {bits} bits{odd}",
            hint=f"supported: int of {', '.join(map(str, WIDTHS))} bits in groups; take the unquantized model",
        )
    require(words, name, (shape[0], -(-shape[1] * bits // 32)), ("int32",))
    if len(scales.shape) != 2:
        refuse(stem + SCALES, f"has shape {list(scales.shape)}, which is not a matrix")
    require(scales, stem + SCALES, (shape[0], scales.shape[1]), ("float16", "bfloat16", "float32"))
    _require_zeros(tensors, stem, scheme)
    zeros = tensors.get(stem + ZEROS)
    if zeros is not None:
        require(zeros, stem + ZEROS, (-(-shape[0] * bits // 32), scales.shape[1]), ("int32",))

    parts = {stem + end: tensors[stem + end] for end in (WORDS, SCALES, SHAPE, ZEROS, GROUPS) if stem + end in tensors}
    groups = _groups(tensors, stem, shape[1], scales.shape[1], scheme)
    return GroupedWeight(
        f"{stem}.weight",
        parts,
        shape,
        name,
        stem + SCALES,
        scales.read,
        partial(_zero_points, zeros, stem + ZEROS, shape[0], scheme) if zeros is not None else None,
        groups,
        Packing(1, partial(unpack, bits=bits), partial(pack, bits=bits, width=words.shape[1]), inputs_first=False),
        1 << bits,
    )


def _require_zeros(tensors: Mapping[str, LazyTensor], stem: str, scheme: WeightScheme) -> None:
    if not scheme.symmetric and not scheme.leaves_out_zeros:
        part(tensors, stem + ZEROS, f"{stem}.weight")


def _groups(tensors: Mapping[str, LazyTensor], stem: str, inputs: int, count: int, scheme: WeightScheme) -> Array:
    """The group of every input; an index of -1 says that they are in order."""
    size = WHOLE_ROW if scheme.group is None else scheme.group
    in_order = groups_in_order(stem + SCALES, inputs, count, size)
    if scheme.indexed and count > 1:
        part(tensors, stem + GROUPS, stem + WORDS)
    if stem + GROUPS not in tensors:
        return in_order
    groups = require(tensors[stem + GROUPS], stem + GROUPS, (inputs,), ("int32", "int64")).read()
    if (groups == -1).all():
        return in_order
    if groups.min() < 0 or groups.max() >= count:
        refuse(stem + GROUPS, f"names group {groups.max()}, there are {count}")
    return groups


def _zero_points(zeros: LazyTensor, name: str, outputs: int, scheme: WeightScheme) -> Array:
    """The zero points, out×groups."""
    found = unpack(zeros.read().T, scheme.bits)[:, :outputs].T
    return require_middle(found, 1 << (scheme.bits - 1), name) if scheme.symmetric else found


METHOD = QuantizationMethod("compressed-tensors", open_compressed, (*ACTIVATIONS, "input_global_scale"))
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
LINEAR, EMBEDDING = "Linear", "Embedding"  # the class of nearly all quantized modules, and that of tables
EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed\w*|\w*_embeddings?|wte|tok_embeddings)$")
PATTERN = "re:"
ORDERED_BY_GROUP = ("group", "dynamic", True)  # values of `actorder` that assign columns to groups by a stored index


@dataclass(frozen=True)
class WeightScheme:
    """How some weights are stored."""

    bits: int  # of a code
    kind: str  # `int` or `float`
    symmetric: bool  # there are no zero points
    group: int | None  # columns that share a scale, `WHOLE_ROW` where all of a row do; None for strategies without rows
    block: tuple[int, int] | None  # rows and columns that share a scale; None for other strategies
    indexed: bool  # the group of each column is stored
    leaves_out_zeros: bool  # a zero point of 0 was not saved


class WeightSchemes:
    """The scheme of every module, from a `quantization_config`; raises MalformedInput or UnsupportedInput."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        leaves_out = _leaves_out_zeros(config.get("version"))
        schemes = {
            target: _scheme(scheme["weights"], leaves_out)
            for scheme in groups_of(config)
            if isinstance(scheme.get("weights"), Mapping)
            for target in _targets(scheme)
        }
        self._schemes = dict(sorted(schemes.items(), key=lambda item: (item[0].startswith(PATTERN), item[0])))
        self._time = MatchTime()

    def of(self, module: str) -> WeightScheme:
        """A module's scheme; MalformedInput for none, several that differ, or an invalid or too slow pattern."""
        for target, scheme in self._schemes.items():
            if self._matches(target, module):
                return scheme
        for kind in (EMBEDDING, LINEAR) if EMBEDDINGS.search(module) else (LINEAR,):
            if kind in self._schemes:
                return self._schemes[kind]
        classes = {one for target, one in self._schemes.items() if not target.startswith(PATTERN) and "." not in target}
        choice = classes or set(self._schemes.values())
        if len(choice) != 1:
            refuse(module, f"is quantized, and {len(choice)} groups of `config_groups` may say how")
        return next(iter(choice))

    def _matches(self, target: str, module: str) -> bool:
        if not target.startswith(PATTERN):
            return target == module
        try:
            return finds(compiled(target.removeprefix(PATTERN)), module, self._time)
        except PatternProblem as problem:
            raise _refused(target, str(problem)) from problem


SAVES_ZEROS = (0, 9, 3)  # the package's version since which zero points of 0 are saved, too


def _leaves_out_zeros(version: Any) -> bool:
    """Whether the version that a `quantization_config` names did not save zero points of 0; the oldest name none."""
    if version is None:
        return True
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version) if isinstance(version, str) else None
    return numbers is not None and tuple(map(int, numbers.groups())) < SAVES_ZEROS


def groups_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    yield from (group for group in (groups.values() if isinstance(groups, dict) else ()) if isinstance(group, dict))


def _targets(scheme: Mapping[str, Any]) -> Sequence[str]:
    targets = scheme.get("targets", [LINEAR])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _refused(targets, "which are not a list of names")
    return targets


def _scheme(weights: Mapping[str, Any], leaves_out_zeros: bool) -> WeightScheme:
    given = {name: value for name, value in weights.items() if value is not None}
    bits, kind, symmetric = given.get("num_bits", 8), given.get("type", "int"), given.get("symmetric", True)
    if type(bits) is not int or not 0 < bits <= 32 or kind not in ("int", "float") or type(symmetric) is not bool:
        raise _refused({"num_bits": bits, "type": kind, "symmetric": symmetric}, "which is no number format")
    size = group_size(given, "group_size")
    strategy = given.get("strategy") or ("tensor" if size is None else "channel" if size == WHOLE_ROW else "group")
    if strategy not in STRATEGIES or (strategy == "tensor_group" and (bits, kind) != (4, "float")):
        raise UnsupportedInput(
            f"the model is stored by compressed-tensors with the strategy `{short(strategy)}`, not supported",
            hint=f"supported are {', '.join(STRATEGIES)}; take the model it was quantized from",
        )
    if (strategy in ("group", "tensor_group")) != (size is not None and size != WHOLE_ROW):
        raise _refused({"strategy": strategy, "group_size": size}, "which contradict each other")
    block = block_size(given.get("block_structure"))
    if strategy == "block" and block is None:
        raise _refused({"strategy": strategy}, "which needs a `block_structure`")
    group = {"channel": WHOLE_ROW, "group": size, "tensor_group": size}.get(strategy)
    indexed = strategy == "group" and given.get("actorder") in ORDERED_BY_GROUP
    # one zero point of a whole tensor may well be 0; those of all rows or groups are not
    leaves_out_zeros = leaves_out_zeros and strategy == "tensor"
    return WeightScheme(bits, kind, symmetric, group, block if strategy == "block" else None, indexed, leaves_out_zeros)


def _refused(value: Any, problem: str) -> MalformedInput:
    message = f"the `config_groups` of the model's `quantization_config` have {short(value, 80)}, {problem}"
    return MalformedInput(message, hint="repair the `config.json`, or download it again")
