"""AWQ in the layout `gemm`, as AutoAWQ writes it.

Layout (`awq/modules/linear/gemm.py`): `qweight` int32 in×(out/8), eight outputs of 4 bits in a word, in the order 0, 2,
4, 6, 1, 3, 5, 7; `qzeros` the same of groups×(out/8); `scales` groups×out. Zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput, short
from llmconv.quantized_weights.packed_weight import (
    GroupedWeight,
    Packing,
    group_size,
    groups_in_order,
    part,
    refuse,
    refuse_strays,
    require,
    require_middle,
)
from llmconv.quantized_weights.quantized_checkpoint import QuantizationMethod
from llmconv.tensors import Array, LazyTensor

WORDS, ZEROS, SCALES = ".qweight", ".qzeros", ".scales"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS, PER_WORD = 4, 8


def open_awq(checkpoint: Checkpoint) -> Mapping[str, GroupedWeight]:
    """The quantized weights; raises MalformedInput, or UnsupportedInput unless 4 bits in the layout `gemm`."""
    config = checkpoint.config["quantization_config"]
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if config.get("backend") == "llm-awq":  # its layout counts, whatever the version says
        version = "llm-awq"
    bits = config.get("bits", config.get("w_bit", BITS))
    if version != "gemm" or bits != BITS:
        hint = "supported: `gemm` of 4 bits; save it with AutoAWQ, or take the model it was quantized from"
        raise UnsupportedInput(f"the model is AWQ in the layout `{version[:40]}` of {short(bits, 20)} bits", hint=hint)
    found = [name.removesuffix(WORDS) for name in checkpoint if name.endswith(WORDS)]
    weights = {f"{stem}.weight": open_module(checkpoint, stem, config) for stem in found}
    refuse_strays(checkpoint, (ZEROS, SCALES), weights)
    return weights


def open_module(tensors: Mapping[str, LazyTensor], stem: str, config: Mapping[str, Any]) -> GroupedWeight:
    """The weight of the module `stem`; errors as `open_awq`."""
    name = stem + WORDS
    names = [stem + end for end in (WORDS, ZEROS, SCALES)]
    words, zeros, scales = (part(tensors, each, name) for each in names)
    if len(words.shape) != 2 or len(scales.shape) != 2 or 0 in words.shape or 0 in scales.shape:
        refuse(name, f"has shape {list(words.shape)} and scales of {list(scales.shape)}, which are not matrices")
    inputs, outputs, height = words.shape[0], words.shape[1] * PER_WORD, scales.shape[0]
    require(words, name, words.shape, ("int32",))
    require(scales, stem + SCALES, (height, outputs), ("float16", "bfloat16", "float32"))
    require(zeros, stem + ZEROS, (height, words.shape[1]), ("int32",))

    parts = {each: tensors[each] for each in names}
    groups = groups_in_order(stem + SCALES, inputs, height, group_size(config, "group_size", "q_group_size"))
    return GroupedWeight(
        f"{stem}.weight",
        parts,
        (outputs, inputs),
        name,
        stem + SCALES,
        lambda: scales.read().T,
        lambda: _checked(config, unpack_outputs(zeros.read().T), stem),
        groups,
        Packing(PER_WORD, unpack_outputs, pack_outputs),
        1 << BITS,
    )


def _checked(config: Mapping[str, Any], zeros: Array, stem: str) -> Array:
    """Zero points; without `zero_point` they are the middle code."""
    return require_middle(zeros, 1 << (BITS - 1), stem + ZEROS) if config.get("zero_point") is False else zeros


def unpack_outputs(words: Array) -> Array:
    """int32 of (out/8)×columns to uint8 of out×columns."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((len(bits), PER_WORD, bits.shape[1]), np.uint8)
    for place, output in enumerate(ORDER):
        codes[:, output] = bits >> np.uint32(BITS * place) & np.uint32(15)
    return codes.reshape(-1, bits.shape[1])


def pack_outputs(codes: Array) -> Array:
    """The reverse of `unpack_outputs`."""
    grouped = codes.reshape(-1, PER_WORD, codes.shape[1]).astype(np.uint32)
    words = np.zeros((len(grouped), codes.shape[1]), np.uint32)
    for place, output in enumerate(ORDER):
        words |= grouped[:, output] << np.uint32(BITS * place)
    return words.view(np.int32)


METHOD = QuantizationMethod("awq", open_awq)
