"""A quantized base: seen as a checkpoint of plain weights, and what becomes of it after a merge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.placement.targets import CONV1D, CONV1D_TYPES
from llmconv.convert.algebra.operations import listing
from llmconv.convert.models.dtype import with_dtype
from llmconv.convert.quantization.methods import QuantizationMethod, methods
from llmconv.convert.quantization.packed_weight import PackedWeight, with_recent_rows
from llmconv.convert.quantization.transposed import transposed_weight
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem
from llmconv.tensors import BY_NAME, LazyTensor, cast

FIELD = "quantization_config"
CHOICES = ("dequantize", "requantize")
NUMBER = r"(?<=\.)\d+(?=\.)"
PLAIN_TYPE = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class QuantizedBase:
    """A checkpoint with quantized weights.

    Attributes:
        stored: the checkpoint as it lies in the files.
        method: how its weights are quantized.
        weights: the quantized ones, by their plain names.
        plain: the same checkpoint with plain names; the quantized weights are in float32, as they come out of the
            formula, so that a merge rounds once.
    """

    stored: Checkpoint
    method: QuantizationMethod
    weights: Mapping[str, PackedWeight]
    plain: Checkpoint

    def dequantized(self, merged: Checkpoint, dtype: str) -> Checkpoint:
        """What a merge made of `plain`, its quantized weights rounded once: to bfloat16 where `dtype` is `keep`."""
        if dtype != "keep":
            return merged
        tensors = {
            name: cast(tensor, PLAIN_TYPE) if self._was_quantized(name) else tensor for name, tensor in merged.items()
        }
        return replace(merged, tensors=tensors, config=with_dtype(merged.config, tensors))

    def _was_quantized(self, name: str) -> bool:
        """Whether a result comes from a quantized weight; a merge may add copies of layers."""
        if name in self.plain:
            return name in self.weights
        return re.sub(NUMBER, "{}", name) in {re.sub(NUMBER, "{}", weight) for weight in self.weights}

    def dequantizing(self, dtype: str) -> str:
        """The line that says so."""
        kind = PLAIN_TYPE.name if dtype == "keep" else dtype
        return f"{len(self.weights)} quantized weights ({self.method.name}) become plain {kind}"

    def requantized(self, merged: Checkpoint) -> tuple[Checkpoint, dict[str, PackedWeight]]:
        """What a merge made of `plain`, stored as the base is; and the weights that changed, by their plain names.

        What nothing touches passes with the bytes it has.

        Raises:
            UnsupportedInput: the merge moved weights to other places, or changed their shape.
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
        """The tensors of the files that are not as they were, by name, with the plain name of their weight."""
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
    """A checkpoint as a quantized base, or None where its config does not say that it is one.

    Raises:
        MalformedInput: the parts of a weight are missing or do not fit each other.
        UnsupportedInput: a method that is not known.
    """
    if not checkpoint.config.get(FIELD):
        return None
    method = _method(checkpoint.config)
    weights = {name: _as_model(checkpoint, weight) for name, weight in method.open(checkpoint).items()}
    if not weights:
        raise MalformedInput(
            f"the base's config says `{method.name}`, but no weight in its files is quantized",
            hint=f"take `{FIELD}` out of its `config.json` if the weights are plain",
        )
    plain = replace(checkpoint, tensors=_plain(checkpoint, method, weights), config=_without(checkpoint.config))
    return QuantizedBase(checkpoint, method, weights, plain)


def _as_model(checkpoint: Checkpoint, weight: PackedWeight) -> PackedWeight:
    """The weight as the plain model holds it."""
    is_conv1d = checkpoint.config.get("model_type") in CONV1D_TYPES and weight.name.rpartition(".")[0].endswith(CONV1D)
    return transposed_weight(weight) if is_conv1d and len(weight.shape) == 2 else weight


def _plain(
    checkpoint: Checkpoint, method: QuantizationMethod, weights: Mapping[str, PackedWeight]
) -> dict[str, LazyTensor]:
    """The tensors with each quantized weight where its first part was."""
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
    """How a config says that its weights are quantized; None where it does not."""
    settings = config.get(FIELD)
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if name is None and any(str(key).startswith("load_in_") for key in settings):
        return "bitsandbytes"  # transformers before 4.37 did not write which
    return str(name)


def _method(config: Mapping[str, Any]) -> QuantizationMethod:
    name = str(method_name(config))
    if name not in methods() or not isinstance(config[FIELD], Mapping):
        raise UnsupportedInput(
            f"the base is quantized with `{name[:40]}`, which is not known",
            hint=f"known are {', '.join(methods())}; merge into the model it was quantized from, then quantize",
        )
    return methods()[name]


def check_choice(choice: str | None, base: QuantizedBase | None, dtype: str) -> None:
    """Refuses a quantized base without a choice, and choices that contradict each other.

    Raises:
        UnsupportedInput: there is no choice.
        UsageProblem: the choice is not known, or does not go with the base or `dtype`.
    """
    if choice is not None and choice not in CHOICES:
        raise UsageProblem(f"there is no way `{choice}` with a quantized base", hint=f"one of: {', '.join(CHOICES)}")
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
