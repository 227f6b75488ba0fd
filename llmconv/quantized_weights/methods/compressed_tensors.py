"""compressed-tensors, as llm-compressor writes it for vLLM: float8 or int8 with scales, or packed low-bit integers.

Layout (`compressed_tensors/compressors/naive_quantized`, `pack_quantized`): `X.weight` with `X.weight_scale` of one, of
out×1, of out×groups or of blocks; or `X.weight_packed` int32 out×(in·bits/32) with `X.weight_scale` out×groups,
`X.weight_shape`, and, where the codes are not symmetric, `X.weight_zero_point` int32 (out·bits/32)×groups. Packed codes
and zero points are stored plus half their range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.errors import UnsupportedInput
from llmconv.quantized_weights.grouped import GroupedWeight, Packing
from llmconv.quantized_weights.methods import QuantizationMethod
from llmconv.quantized_weights.methods.fp8 import ACTIVATIONS, block_size
from llmconv.quantized_weights.packed_bits import WIDTHS, pack, unpack
from llmconv.quantized_weights.packed_weight import PackedWeight, part, refuse, require
from llmconv.quantized_weights.scaled import LARGEST, ScaledWeight, open_scaled
from llmconv.tensors import Array, LazyTensor

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense", "mixed-precision")
WORDS, SCALES, ZEROS, GROUPS, SHAPE = (
    f".weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")
)


def open_compressed(checkpoint: Checkpoint) -> Mapping[str, PackedWeight]:
    """The quantized weights of a checkpoint.

    Raises:
        MalformedInput: missing, unexpected or mismatched parts.
        UnsupportedInput: another format.
    """
    config = checkpoint.config["quantization_config"]
    schemes = list(_schemes(config))
    for name in {str(scheme.get("format")) for scheme in (config, *schemes) if scheme.get("format")}:
        _require_known(name)
    blocks = [weights["block_structure"] for weights in map(_weights, schemes) if "block_structure" in weights]
    block = block_size(blocks[0] if blocks else None)
    weights: dict[str, PackedWeight] = {}
    for name, tensor in checkpoint.items():
        if name.endswith(WORDS):
            stem = name.removesuffix(WORDS)
            weights[f"{stem}.weight"] = _open_packed(checkpoint, stem)
        elif name.endswith(".weight") and tensor.dtype.name in LARGEST:
            weights[name] = _open_codes(checkpoint, name, block)
    for name in checkpoint:
        if name.endswith((SCALES, ZEROS, GROUPS, SHAPE)) and f"{name.rpartition('.')[0]}.weight" not in weights:
            refuse(name, "does not belong to a quantized weight")
    return weights


def _schemes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = config.get("config_groups")
    yield from (group for group in (groups.values() if isinstance(groups, dict) else ()) if isinstance(group, dict))


def _weights(scheme: Mapping[str, Any]) -> Mapping[str, Any]:
    found = scheme.get("weights")
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}


def _require_known(name: str) -> None:
    if name not in FORMATS:
        raise UnsupportedInput(
            f"the model is stored by compressed-tensors as `{name[:40]}`, which is not supported",
            hint=f"supported are {', '.join(FORMATS[:4])}; take the model it was quantized from",
        )


def _open_codes(tensors: Mapping[str, LazyTensor], name: str, block: tuple[int, int] | None) -> ScaledWeight:
    """A weight of one code per element."""
    stem = name.removesuffix(".weight")
    if stem + ZEROS in tensors:
        raise UnsupportedInput(f"`{name}` has zero points and no packed codes", hint="take the unquantized model")
    scales, shape = part(tensors, stem + SCALES, name), tensors[name].shape
    groups = scales.shape[1] if len(scales.shape) == 2 and scales.shape[:1] == shape[:1] else 0
    if block is None and groups > 1 and shape[-1] % groups == 0:
        block = (1, shape[-1] // groups)
    return open_scaled(tensors, name, stem + SCALES, block)


def _open_packed(tensors: Mapping[str, LazyTensor], stem: str) -> GroupedWeight:
    """A weight of packed integers."""
    name = stem + WORDS
    words, scales = tensors[name], part(tensors, stem + SCALES, name)
    shape = _shape(part(tensors, stem + SHAPE, name), stem + SHAPE)
    bits = next((bits for bits in WIDTHS if words.shape == (shape[0], -(-shape[1] * bits // 32))), 0)
    if not bits or len(scales.shape) != 2 or 0 in scales.shape or shape[1] % scales.shape[1]:
        refuse(name, f"has shape {list(words.shape)} and scales of {list(scales.shape)} for a weight of {list(shape)}")
    require(words, name, words.shape, ("int32",))
    require(scales, stem + SCALES, (shape[0], scales.shape[1]), ("float16", "bfloat16", "float32"))
    zeros = tensors.get(stem + ZEROS)
    if zeros is not None:
        require(zeros, stem + ZEROS, (-(-shape[0] * bits // 32), scales.shape[1]), ("int32",))

    parts = {stem + end: tensors[stem + end] for end in (WORDS, SCALES, SHAPE, ZEROS, GROUPS) if stem + end in tensors}
    groups = _groups(tensors, stem, shape[1], scales.shape[1])
    return GroupedWeight(
        f"{stem}.weight",
        parts,
        shape,
        name,
        stem + SCALES,
        scales.read,
        partial(_zero_points, zeros, bits, shape[0]) if zeros is not None else None,
        groups,
        Packing(1, partial(unpack, bits=bits), partial(pack, bits=bits, width=words.shape[1]), inputs_first=False),
        1 << bits,
    )


def _shape(tensor: LazyTensor, name: str) -> tuple[int, int]:
    sizes = require(tensor, name, (2,), ("int64", "int32")).read().tolist()
    if not all(0 < size < 1 << 31 for size in sizes):
        refuse(name, f"says {sizes}, which is not a shape")
    return sizes[0], sizes[1]


def _groups(tensors: Mapping[str, LazyTensor], stem: str, inputs: int, count: int) -> Array:
    if stem + GROUPS not in tensors:
        return np.arange(inputs) // (inputs // count)
    groups = require(tensors[stem + GROUPS], stem + GROUPS, (inputs,), ("int32", "int64")).read()
    if groups.min() < 0 or groups.max() >= count:
        refuse(stem + GROUPS, f"names group {groups.max()}, there are {count}")
    return groups


def _zero_points(zeros: LazyTensor, bits: int, outputs: int) -> Array:
    """The zero points, out×groups."""
    return unpack(zeros.read().T, bits)[:, :outputs].T


METHOD = QuantizationMethod(
    "compressed-tensors",
    open_compressed,
    ACTIVATIONS,
)
