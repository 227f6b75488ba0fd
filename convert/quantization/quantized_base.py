"""QuantizedBase: a quantized checkpoint as plain weights, and its merged result, dequantized or requantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.placement.targets import CONV1D, CONV1D_TYPES
from llmconv.convert.models.dtype import with_dtype
from llmconv.convert.quantization.methods import QuantizationMethod, methods
from llmconv.convert.quantization.packed_weight import PackedWeight, with_recent_rows
from llmconv.convert.quantization.transposed import transposed_weight
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.tensors import BY_NAME, LazyTensor, cast

FIELD = "quantization_config"
CHOICES = ("dequantize", "requantize")
NUMBER = r"(?<=\.)\d+(?=\.)"
PLAIN_TYPE = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class QuantizedBase:
    """A checkpoint with quantized weights.

    Attributes:
        stored: the checkpoint as stored in the files.
        method: its quantization method.
        weights: the quantized weights, by their plain names.
        plain: the checkpoint with plain names and values; quantized weights are in float32, not yet rounded, so that
            a merge rounds once.
    """

    stored: Checkpoint
    method: QuantizationMethod
    weights: Mapping[str, PackedWeight]
    plain: Checkpoint

    def dequantized(self, merged: Checkpoint, dtype: str) -> Checkpoint:
        """The result of merging into `plain`, with quantized weights rounded once: to bfloat16 for `keep`."""
        if dtype != "keep":
            return merged
        tensors = {
            name: cast(tensor, PLAIN_TYPE) if self._was_quantized(name) else tensor for name, tensor in merged.items()
        }
        return replace(merged, tensors=tensors, config=with_dtype(merged.config, tensors))

    def _was_quantized(self, name: str) -> bool:
        """Whether a merged tensor comes from a quantized weight, also as a copy of a layer."""
        if name in self.plain:
            return name in self.weights
        return re.sub(NUMBER, "{}", name) in {re.sub(NUMBER, "{}", weight) for weight in self.weights}

    def dequantizing(self, dtype: str) -> str:
        """The warning about dequantized weights."""
        kind = PLAIN_TYPE.name if dtype == "keep" else dtype
        return f"{len(self.weights)} quantized weights ({self.method.name}) become plain {kind}"

    def requantized(self, merged: Checkpoint) -> tuple[Checkpoint, dict[str, PackedWeight]]:
        """The result of merging into `plain`, in the base's format; and the changed weights, by their plain names.

        Unchanged weights keep their bytes.

        Raises:
            UnsupportedInput: the merge renamed or resized quantized weights.
        """
        self._require_in_place(merged)
        changed = {
            name: weight.requantized(with_recent_rows(merged[name]))
            for name, weight in self.weights.items()
            if merged[name] is not self.plain[name]
        }
        home = {part: name for name, weight in self.weights.items() for part in weight.parts}
        tensors = {}
        for name, tensor in self.stored.items():
            if home.get(name) in changed:
                tensors[name] = changed[home[name]].parts[name]
            elif name in home or name not in self.plain:
                tensors[name] = tensor
            elif name in merged:
                tensors[name] = merged[name]
        tensors |= {name: merged[name] for name in merged if name not in tensors and name not in self.weights}
        return replace(merged, tensors=tensors, config={**merged.config, FIELD: self.stored.config[FIELD]}), changed

    def changed_parts(self, changed: Mapping[str, PackedWeight]) -> dict[str, str]:
        """Names of the changed tensors in the files, with the plain name of their weight."""
        return {
            part: name
            for name, weight in changed.items()
            for part, tensor in weight.parts.items()
            if tensor is not self.stored[part]
        }

    def _require_in_place(self, merged: Checkpoint) -> None:
        names = {id(tensor): name for name, tensor in self.plain.items()}
        moved = [name for name, tensor in merged.items() if name in self.plain and names.get(id(tensor), name) != name]
        moved += [
            name for name, weight in self.weights.items() if name not in merged or merged[name].shape != weight.shape
        ]
        moved += [name for name in merged if name not in self.plain and self._was_quantized(name)]
        if moved:
            raise UnsupportedInput(
                f"the merge moves or resizes weights of the base, {listing(moved)} among them, which stay quantized",
                hint="give `--base-quant dequantize`",
            )


def quantized_base(checkpoint: Checkpoint) -> QuantizedBase | None:
    """A checkpoint as a quantized base, or None if its config has no `quantization_config`.

    Raises:
        MalformedInput: missing or mismatched parts of a weight.
        UnsupportedInput: an unknown method.
    """
    if not checkpoint.config.get(FIELD):
        return None
    method = _method(checkpoint.config)
    weights = {name: _as_model(checkpoint, weight) for name, weight in method.open(checkpoint).items()}
    if not weights:
        raise MalformedInput(
            f"the base's config has `{method.name}`, but no weight in its files is quantized",
            hint=f"take `{FIELD}` out of its `config.json` if the weights are plain",
        )
    plain = replace(checkpoint, tensors=_plain(checkpoint, method, weights), config=_without(checkpoint.config))
    return QuantizedBase(checkpoint, method, weights, plain)


def _as_model(checkpoint: Checkpoint, weight: PackedWeight) -> PackedWeight:
    """The weight in the orientation of the plain model."""
    is_conv1d = checkpoint.config.get("model_type") in CONV1D_TYPES and weight.name.rpartition(".")[0].endswith(CONV1D)
    return transposed_weight(weight) if is_conv1d and len(weight.shape) == 2 else weight


def _plain(
    checkpoint: Checkpoint, method: QuantizationMethod, weights: Mapping[str, PackedWeight]
) -> dict[str, LazyTensor]:
    """The plain tensors in file order; a quantized weight comes in place of its first part."""
    home = {part: name for name, weight in weights.items() for part in weight.parts}
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in checkpoint.items():
        if name in home:
            tensors.setdefault(home[name], weights[home[name]].plain)
        elif not name.endswith(method.dropped or ("\0",)):
            tensors[name] = tensor
    return tensors


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != FIELD}


def method_name(config: Mapping[str, Any]) -> str | None:
    """The quantization method in a config, or None."""
    settings = config.get(FIELD)
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if name is None and any(str(key).startswith("load_in_") for key in settings):
        return "bitsandbytes"  # transformers before 4.37 did not write the method
    return str(name)


def _method(config: Mapping[str, Any]) -> QuantizationMethod:
    name = str(method_name(config))
    if name not in methods() or not isinstance(config[FIELD], Mapping):
        raise UnsupportedInput(
            f"the base is quantized with `{name[:40]}`, which is not supported",
            hint=f"supported are {', '.join(methods())}; merge into the model it was quantized from, then quantize",
        )
    return methods()[name]


def check_choice(choice: str | None, base: QuantizedBase | None, dtype: str) -> None:
    """Refuses a quantized base without `--base-quant`, and contradicting options.

    Args:
        choice: `--base-quant`: one of `CHOICES`, or None.
        base: the quantized base; None for a plain one.
        dtype: `--dtype`.

    Raises:
        UnsupportedInput: a quantized base without `choice`.
        UsageProblem: an unknown choice, or one that contradicts the base or `dtype`.
    """
    if choice is not None and choice not in CHOICES:
        raise UsageProblem(f"invalid `--base-quant {choice}`", hint=f"one of: {', '.join(CHOICES)}")
    if base is None and choice is not None:
        raise UsageProblem(f"`--base-quant {choice}` is given, but the base is not quantized", hint="leave it out")
    if base is not None and choice is None:
        raise UnsupportedInput(
            f"the base is quantized ({base.method.name})",
            hint="give `--base-quant dequantize` for plain bfloat16 weights, or `--base-quant requantize` to store the "
            "result as the base is, where enough of the update survives; better: merge into the unquantized model",
        )
    if choice == "requantize" and dtype != "keep":
        raise UsageProblem(
            f"`--dtype {dtype}` is given with `--base-quant requantize`, which keeps the types of the base",
            hint="leave `--dtype` out, or give `--base-quant dequantize`",
        )
