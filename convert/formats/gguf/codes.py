"""The codes of a GGUF file as those of compressed-tensors, which `llmconv export` reads.

Types whose values are a scale times a code (Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0) become
`pack-quantized` without zero points: the same codes in 4 or 8 bits, the same scales. Others have an offset that no
integer zero point gives, and stay dequantized. Layout: `llmconv/quantized_weights/methods/compressed_tensors.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmconv.convert.formats.gguf.configs import Keys
from llmconv.convert.formats.gguf.names import ARCHITECTURES, in_hugging_face_names
from llmconv.errors import listing
from llmconv.files.gguf_file import BLOCKS, Block, GGUFTensor
from llmconv.quantized_weights.packed_weight import pack
from llmconv.tensors import BY_NAME, Array, LazyTensor, in_memory

SMALL = ("Q4_0", "Q3_K", "TQ1_0", "TQ2_0")  # types with codes of 4 bits
HALF = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0")  # types whose scale is stored in float16
PARTS = {"Q3_K": 16, "Q6_K": 16, "TQ1_0": 256, "TQ2_0": 256}  # elements of a scale, where not 32
OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
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
    turned = [parts.turned for parts in ARCHITECTURES[keys.architecture].parts if parts.turned]
    whole = {name for name, one in stored.items() if one.type in BY_TYPE and any(t.fullmatch(name) for t in turned)}
    exact = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.type in BY_TYPE and tensor.type not in OFFSETS and len(tensor.values.shape) > 1
        if not name.startswith(EMBEDDINGS) and keys.architecture != "gpt2"  # whose matrices are turned
        if name not in whole
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
    if keys.architecture == "gpt2":
        return config, tensors, ["codes of GPT-2 are not kept: its matrices are stored turned"]
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

    return _part(tensor, "int32", width, lambda codes, _: of(codes))


def _scales(tensor: GGUFTensor) -> LazyTensor:
    dtype, count = ("float16" if tensor.type in HALF else "float32"), PARTS.get(tensor.type, 32)
    return _part(tensor, dtype, tensor.values.shape[-1] // count, lambda _, scales: scales)


def _part(tensor: GGUFTensor, dtype: str, width: int, choose: Callable[[Array, Array], Array]) -> LazyTensor:
    """What `choose` takes of codes and scales, which it is given by rows of the file, [rows, columns or scales]."""
    kind: Block = BY_TYPE[tensor.type]
    shape = (*tensor.values.shape[:-1], width)
    rows = int(np.prod(shape[1:-1]))

    def load(start: int, stop: int) -> Array:
        data = tensor.blocks.rows(start * rows, stop * rows).reshape(-1, kind.width)
        codes, scales, _ = kind.parts(data)
        count = (stop - start) * rows
        found = choose(codes.reshape(count, -1), scales.reshape(count, -1))
        return np.ascontiguousarray(found.astype(BY_NAME[dtype].numpy).reshape(stop - start, *shape[1:]))

    return LazyTensor(BY_NAME[dtype], shape, load)
