"""The codes of a GGUF file as those of compressed-tensors, or as graphs of `llmconv export` have them.

For other programs, types whose values are a scale times a code (Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
TQ1_0, TQ2_0) become `pack-quantized` without zero points: the same codes in 4 or 8 bits, the same scales. Others have
an offset that no integer zero point gives, and stay dequantized. Layout:
`quantized_weights/methods/compressed_tensors.py`.

For graphs all types stay, embeddings too. Layout: `quantized_weights/methods/gguf.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from llmconv.convert.formats.gguf.configs import Keys
from llmconv.convert.formats.gguf.names import ARCHITECTURES, in_hugging_face_names
from llmconv.errors import listing
from llmconv.files.gguf_file import BLOCKS, Block, GGUFTensor
from llmconv.quantized_weights.methods.gguf import MIDDLE_CODE, SMALL
from llmconv.quantized_weights.packed_weight import pack, tiled
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

HALF = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")  # types whose scale is stored in float16
PARTS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16, "TQ1_0": 256, "TQ2_0": 256}  # elements of a scale, where not 32
OFFSETS = tuple(MIDDLE_CODE)
EMBEDDINGS = ("token_embd.", "position_embd.")  # looked up, not multiplied
BY_TYPE = {block.name: block for block in BLOCKS.values()}


@dataclass(frozen=True)
class Scheme:
    """How the codes of a matrix are stored."""

    bits: int
    group: int  # elements of a scale


def with_codes(
    keys: Keys, stored: Mapping[str, GGUFTensor], config: dict[str, Any], tensors: dict[str, LazyTensor]
) -> tuple[dict[str, Any], dict[str, LazyTensor], list[str]]:
    """The config and the tensors with codes in place of values where they are exact, and a warning about the others.

    `tensors` are the values in Hugging Face's names. Rows in another order have their codes and scales in it.
    """
    whole = _turned(keys, stored)
    exact = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.type in BY_TYPE and tensor.type not in OFFSETS and len(tensor.values.shape) > 1
        if not name.startswith(EMBEDDINGS) and name not in whole
    }
    words, scales = ({name: part(tensor) for name, tensor in exact.items()} for part in (_words, _scales))
    others = {name: tensor.values for name, tensor in stored.items() if name not in exact}
    by_words, by_scales = (in_hugging_face_names(keys, {**others, **parts})[1] for parts in (words, scales))
    found: dict[str, LazyTensor] = {}
    schemes: dict[str, Scheme] = {}
    for name, tensor in tensors.items():
        module, weight = name.removesuffix(".weight"), by_words[name]
        if weight.dtype.name != "int32":
            found[name] = tensor
            continue
        bits = 32 * weight.shape[-1] // tensor.shape[-1]
        schemes[module] = Scheme(bits, tensor.shape[-1] // by_scales[name].shape[-1])
        found[f"{module}.weight_packed"] = weight
        found[f"{module}.weight_scale"] = by_scales[name]
        found[f"{module}.weight_shape"] = in_memory(np.array(tensor.shape, np.int64), BY_NAME["int64"])
    left = Counter(tensor.type for name, tensor in stored.items() if tensor.type in OFFSETS and name not in whole)
    warnings = [
        f"{len(whole)} tensors are dequantized, since the model has their rows as columns: {listing(sorted(whole))}"
    ] * bool(whole)
    warnings += [
        f"{count} tensors of {kind} are dequantized: their offsets cannot be integer zero points"
        for kind, count in left.items()
    ]
    if schemes:
        plain = [name.removesuffix(".weight") for name, one in found.items() if name in tensors and len(one.shape) == 2]
        head = [] if "lm_head" in schemes else ["lm_head"]
        config = {
            **config,
            "torch_dtype": "float32",
            "quantization_config": _settings(schemes, sorted({*plain, *head})),
        }
    return config, found, warnings


def turned_in(architecture: str, names: Iterable[str]) -> set[str]:
    """The tensors of a file that are stored transposed."""
    family = ARCHITECTURES[architecture]
    patterns = [family.turned, *(parts.turned for parts in family.parts)]
    return {name for name in names if any(one and one.fullmatch(name) for one in patterns)}


def _turned(keys: Keys, stored: Mapping[str, GGUFTensor]) -> set[str]:
    """Those of blocks."""
    coded = (name for name, tensor in stored.items() if tensor.type in BY_TYPE and len(tensor.values.shape) > 1)
    return turned_in(keys.architecture, coded)


def types_by_name(keys: Keys, stored: Mapping[str, GGUFTensor]) -> dict[str, str]:
    """llama.cpp's type of each matrix, by Hugging Face name.

    A tensor of type numbers goes through the same changes as the values; of several that are joined, the first counts.
    """
    names = sorted({tensor.type for tensor in stored.values()})
    marked = {name: filled(tensor.values, names.index(tensor.type)) for name, tensor in stored.items()}
    tensors = in_hugging_face_names(keys, marked)[1]
    return {name: names[int(one.rows(0, 1).flat[0])] for name, one in tensors.items() if len(one.shape) > 1}


def filled(tensor: LazyTensor, number: int) -> LazyTensor:
    """A matrix of equal numbers; vectors are kept, since some of them are read with the configuration."""
    if len(tensor.shape) < 2:
        return tensor
    return LazyTensor(
        BY_NAME["float32"],
        tensor.shape,
        lambda start, stop: np.full((stop - start, *tensor.shape[1:]), number, np.float32),
    )


def with_graph_codes(
    keys: Keys, stored: Mapping[str, GGUFTensor], config: dict[str, Any], tensors: dict[str, LazyTensor]
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """The config and the tensors with codes, scales and offsets in place of the values of all matrices of blocks.

    Those whose rows are columns of the model are dequantized.
    """
    turned = _turned(keys, stored)
    coded = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.type in BY_TYPE and len(tensor.values.shape) > 1 and name not in turned
    }
    others = {name: tensor.values for name, tensor in stored.items() if name not in coded}

    def renamed(part: Callable[[GGUFTensor], LazyTensor]) -> dict[str, LazyTensor]:
        return in_hugging_face_names(keys, {**others, **{name: part(tensor) for name, tensor in coded.items()}})[1]

    parts = {".codes": renamed(_codes), ".scales": renamed(_wide_scales), ".offsets": renamed(_offsets)}
    kinds, found, types = types_by_name(keys, stored), dict[str, LazyTensor](), dict[str, str]()
    for name, tensor in tensors.items():
        if parts[".codes"][name].dtype.name != "int8" or len(tensor.shape) != 2:
            found[name] = tensor
            continue
        types[name] = kinds[name]
        offsets = types[name] in OFFSETS
        found |= {name + suffix: part[name] for suffix, part in parts.items() if suffix != ".offsets" or offsets}
    if not types:
        return config, tensors
    quantization = {"quant_method": "gguf", "types": types}
    return {**config, "torch_dtype": "float32", "quantization_config": quantization}, found


def _settings(schemes: Mapping[str, Scheme], ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config`: the scheme of most modules is that of the class, others name their modules."""
    counts = Counter(schemes.values())
    groups = {}
    for number, (scheme, _) in enumerate(counts.most_common()):
        targets = ["Linear"] if number == 0 else [name for name, own in schemes.items() if own == scheme]
        weights = {"num_bits": scheme.bits, "type": "int", "symmetric": True, "group_size": scheme.group}
        weights |= {"strategy": "group", "dynamic": False}
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    }


def _words(tensor: GGUFTensor) -> LazyTensor:
    """Codes plus half their range in int32 words along the rows, [..., columns * bits / 32]."""
    bits = 4 if tensor.type in SMALL else 8
    width = tensor.values.shape[-1] * bits // 32

    def of(codes: Array) -> Array:
        unsigned = (codes.astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
        return pack(unsigned, bits, width)

    return _part(tensor, "int32", width, lambda codes, _, __: of(codes))


def _codes(tensor: GGUFTensor) -> LazyTensor:
    """Codes of the shape of the values."""
    return _part(tensor, "int8", tensor.values.shape[-1], lambda codes, _, __: codes)


def _wide_scales(tensor: GGUFTensor) -> LazyTensor:
    """Scales in float32 [..., columns / elements of a scale]."""
    return _part(tensor, "float32", tensor.values.shape[-1] // PARTS.get(tensor.type, 32), lambda _, scales, __: scales)


def _offsets(tensor: GGUFTensor) -> LazyTensor:
    """Offsets as scales, which are not read of a type without any."""
    width = tensor.values.shape[-1] // PARTS.get(tensor.type, 32)
    return _part(tensor, "float32", width, lambda _, __, offsets: offsets)


def _scales(tensor: GGUFTensor) -> LazyTensor:
    dtype, count = ("float16" if tensor.type in HALF else "float32"), PARTS.get(tensor.type, 32)
    return _part(tensor, dtype, tensor.values.shape[-1] // count, lambda _, scales, __: scales)


def _part(tensor: GGUFTensor, dtype: str, width: int, choose: Callable[..., Array]) -> LazyTensor:
    """What `choose` takes of codes, scales and offsets (or None), by rows of the file, [rows, columns or parts]."""
    kind: Block = BY_TYPE[tensor.type]
    shape = (*tensor.values.shape[:-1], width)
    rows = int(np.prod(shape[1:-1]))

    def load(start: int, stop: int) -> Array:
        data = tensor.blocks.rows(start * rows, stop * rows).reshape(-1, kind.width)
        count = (stop - start) * rows
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are refused when scales are used
            parts = kind.parts(data)
        found = choose(*(None if one is None else one.reshape(count, -1) for one in parts))
        return np.ascontiguousarray(found.astype(BY_NAME[dtype].numpy).reshape(stop - start, *shape[1:]))

    return tiled(LazyTensor(BY_NAME[dtype], shape, load), prod(tensor.values.shape[1:]))  # all of a row is unpacked
