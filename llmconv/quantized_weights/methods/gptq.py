"""GPTQ, as AutoGPTQ, GPTQModel and optimum write it.

Layout (`auto_gptq/nn_modules/qlinear`, `gptqmodel/nn_modules/qlinear`): `qweight` int32 (in·bits/32)×out, the codes of
an output one below the other; `qzeros` int32 groups×(out·bits/32); `scales` groups×out; `g_idx` each input's group.
In the format `gptq` the zero points are stored less one, in `gptq_v2` as they are. `dynamic` has other bits and groups
for some modules, by regular expressions; what they are follows from the shapes and `g_idx`. Some writers say `gptq` and
store symmetric zero points as `gptq_v2` has them (vLLM's pull request 38966 names models): their value tells.
A zero point of 0 is stored as all ones. GPTQModel undoes that with carries into the next ones; AutoGPTQ writes other
bits, and it and vLLM read them as 0, or as one above the largest code: such files are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput, short
from llmconv.quantized_weights.packed_weight import (
    WIDTHS,
    GroupedWeight,
    Packing,
    group_size,
    groups_in_order,
    pack,
    part,
    refuse,
    refuse_strays,
    require,
    require_count,
    require_middle,
    unpack,
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import Array, LazyTensor

WORDS, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
FORMATS = {"gptq": True, "gptq_v2": False}  # whether the zero points of a `checkpoint_format` are stored less one
READ = {"pack_dtype": "int32", "adapter": None}  # the only value of a field that is read
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A one in every field of a word. GPTQModel adds it to whole words, which undoes what it subtracted from them, carries
included (`convert_gptq_v1_to_v2_format_module`)."""


def open_gptq(checkpoint: Checkpoint) -> Mapping[str, GroupedWeight]:
    """The quantized weights; raises MalformedInput, or UnsupportedInput for one kernel's layout or other bits."""
    config = checkpoint.config["quantization_config"]
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if layout not in FORMATS or config.get("is_marlin_format"):
        hint = "save it as `gptq` with GPTQModel, or take the model it was quantized from"
        raise UnsupportedInput(f"the model is GPTQ in the layout `{layout[:40]}`, which one kernel reads", hint=hint)
    for name, read in READ.items():  # fields that change what the tensors mean
        if config.get(name) not in (None, {}, read):
            problem = f"the model is GPTQ with `{name}` {short(config[name])}, which is not supported"
            hint = "save it with words of int32 and without adapters, or take the model it was quantized from"
            raise UnsupportedInput(problem, hint=hint)
    found = [name.removesuffix(WORDS) for name in checkpoint if name.endswith(WORDS)]
    weights = {f"{stem}.weight": open_module(checkpoint, stem, config, less_one=FORMATS[layout]) for stem in found}
    refuse_strays(checkpoint, (ZEROS, SCALES, GROUPS), weights)
    return weights


def open_module(
    tensors: Mapping[str, LazyTensor], stem: str, config: Mapping[str, Any], *, less_one: bool
) -> GroupedWeight:
    """The weight of the module `stem`; its bits follow from the shapes, since they may differ between modules."""
    name = stem + WORDS
    names = [stem + end for end in (WORDS, ZEROS, SCALES)]
    words, zeros, scales = (part(tensors, each, name) for each in names)
    if len(words.shape) != 2 or len(scales.shape) != 2 or 0 in words.shape or 0 in scales.shape:
        refuse(name, f"has shape {list(words.shape)} and scales of {list(scales.shape)}, which are not matrices")
    outputs, bits = words.shape[1], _bits(tensors, stem, config, words)
    inputs = tensors[stem + GROUPS].num_rows if stem + GROUPS in tensors else words.shape[0] * 32 // bits
    height = scales.shape[0]
    require(words, name, (-(-inputs * bits // 32), outputs), ("int32",))
    require(scales, stem + SCALES, (height, outputs), ("float16", "bfloat16", "float32"))
    require(zeros, stem + ZEROS, (height, -(-outputs * bits // 32)), ("int32",))
    parts = {each: tensors[each] for each in (*names, stem + GROUPS) if each in tensors}
    groups = _groups(tensors, stem, config, inputs, height)

    return GroupedWeight(
        f"{stem}.weight",
        parts,
        (outputs, inputs),
        name,
        stem + SCALES,
        lambda: scales.read().T,
        lambda: _zeros(config, zeros.read(), bits, less_one, stem, outputs).T,
        groups,
        Packing(1, partial(unpack, bits=bits), partial(pack, bits=bits, width=words.shape[0])),
        1 << bits,
    )


def _bits(tensors: Mapping[str, LazyTensor], stem: str, config: Mapping[str, Any], words: LazyTensor) -> int:
    bits = config.get("bits")
    if config.get("dynamic"):
        part(tensors, stem + GROUPS, stem + WORDS)
    if (config.get("dynamic") or bits is None) and stem + GROUPS in tensors:
        bits = words.shape[0] * 32 // max(1, tensors[stem + GROUPS].num_rows)
    if type(bits) is not int or bits not in WIDTHS:
        problem = f"`{stem}` is GPTQ of {short(bits, 20)} bits"
        raise UnsupportedInput(problem, hint=f"supported: {', '.join(map(str, WIDTHS))}")
    return bits


def _groups(tensors: Mapping[str, LazyTensor], stem: str, config: Mapping[str, Any], inputs: int, height: int) -> Array:
    """The group of every input; without `g_idx` they are in order, unless the config says otherwise."""
    size = None if config.get("dynamic") else group_size(config, "group_size")
    if stem + GROUPS not in tensors:
        if height > 1 and config.get("desc_act"):
            part(tensors, stem + GROUPS, stem + WORDS)
        return groups_in_order(stem + SCALES, inputs, height, size)
    require_count(stem + SCALES, inputs, height, size)
    groups = require(tensors[stem + GROUPS], stem + GROUPS, (inputs,), ("int32", "int64")).read()
    if groups.min() < -height or groups.max() >= height:
        refuse(stem + GROUPS, f"names group {groups.max()}, there are {height}")
    return groups % height


def _zeros(config: Mapping[str, Any], words: Array, bits: int, less_one: bool, stem: str, outputs: int) -> Array:
    """Zero points [groups, outputs]; those of `sym` are the middle code, which some kernels assume without reading.

    `dynamic` leaves modules out (`-:`), or has other settings for some, of which `sym` may be one.
    """
    middle, rules = 1 << (bits - 1), config.get("dynamic")
    others = [rule for rule in rules.values() if isinstance(rule, Mapping)] if isinstance(rules, Mapping) else []
    as_stored, found = unpack(words, bits)[:, :outputs], zero_points(words, bits, less_one)[:, :outputs]
    if config.get("sym") is not True or any("sym" in rule for rule in others):
        if less_one and not _by_gptqmodel(config) and (as_stored == 2 * middle - 1).any():
            problem = f"`{stem}{ZEROS}` has zero points of 0, which AutoGPTQ, GPTQModel and vLLM read differently"
            raise UnsupportedInput(problem, hint="save it as `gptq_v2`, or take the model it was quantized from")
        return found
    if less_one and (as_stored == middle).all():
        return as_stored
    return require_middle(found, middle, stem + ZEROS)


def _by_gptqmodel(config: Mapping[str, Any]) -> bool:
    meta = config.get("meta")
    return isinstance(meta, Mapping) and "gptqmodel" in str(meta.get("quantizer")).lower()


def zero_points(words: Array, bits: int, less_one: bool) -> Array:
    """The zero points in `words` int32 [groups, words], as uint8; `less_one`: the file stores each minus one."""
    if not less_one:
        return unpack(words, bits)
    if bits in ONES:
        with np.errstate(over="ignore"):
            return unpack(words.view(np.uint32) + np.uint32(ONES[bits]), bits)
    return (unpack(words, bits) + np.uint8(1)) & np.uint8((1 << bits) - 1)


METHOD = QuantizationMethod("gptq", open_gptq)
