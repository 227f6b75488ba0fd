"""QuantizedCheckpoint: a checkpoint with quantized weights, and the same checkpoint with their plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from llmconv.checkpoint import Checkpoint, is_conv1d, transposed
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.not_a_model_folder import refuse_unexplained_codes
from llmconv.plugins import each_plugin
from llmconv.quantized_weights.packed_weight import IntegerCodes, PackedWeight
from llmconv.tensors import Array, LazyTensor

FIELD = "quantization_config"
UNKNOWN_TO_TRANSFORMERS = {"mlx", "modelopt"}  # methods whose weights transformers does not load
CODES = {"int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2"}  # dtypes that no plain weight has


@dataclass(frozen=True)
class QuantizationMethod:
    """One quantization format; each file of the folder `methods` has one as its constant `METHOD`."""

    name: str  # the `quant_method` of a `quantization_config`, equal to the file's name except for `-`
    # `open(checkpoint)` returns the quantized weights by their plain names; it checks their parts from headers and
    # small tensors, and refuses unknown layouts
    open: Callable[[Checkpoint], Mapping[str, PackedWeight]]
    # suffixes of names of tensors that plain weights do not need, such as scales of activations
    dropped: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def methods() -> dict[str, QuantizationMethod]:
    rows = dict(each_plugin("llmconv.quantized_weights.methods", "METHOD", QuantizationMethod))
    return {row.name: row for row in rows.values()}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint with quantized weights."""

    stored: Checkpoint  # the checkpoint as stored in the files
    method: QuantizationMethod  # its quantization method
    weights: Mapping[str, PackedWeight]  # the quantized weights, by their plain names
    plain: Checkpoint  # the checkpoint with plain names and values; quantized weights are in float32, not yet rounded


def quantized_checkpoint(checkpoint: Checkpoint) -> QuantizedCheckpoint | None:
    """The quantized weights, None without `quantization_config`; MalformedInput, UnsupportedInput for a method."""
    if (kind := method_name(checkpoint.config)) is None:
        refuse_unexplained_codes(checkpoint, checkpoint.config)
        return None
    if problem := unsupported(checkpoint.config):
        raise problem
    method = methods()[kind]
    weights: dict[str, PackedWeight] = {}
    for name, weight in method.open(checkpoint).items():  # in the orientation of the plain model
        turned = len(weight.shape) == 2 and is_conv1d(checkpoint.config, weight.name)
        weights[name] = TransposedWeight(weight.name, weight.parts, weight.shape[::-1], weight) if turned else weight
    if not weights:
        raise _nothing(checkpoint, method)
    # refuses a weight that is stored both as codes and as plain values
    for name, weight in weights.items():
        if name in checkpoint and name not in weight.parts:
            raise MalformedInput(
                f"`{name}` is stored twice: as codes (`{next(iter(weight.parts))}`) and as plain values",
                hint="remove the one that does not belong to the model, or copy or download the model again",
            )
    # the plain tensors in file order; a quantized weight comes in place of its first part
    home = {part: name for name, weight in weights.items() for part in weight.parts}
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in checkpoint.items():
        if name in home:
            tensors.setdefault(home[name], weights[home[name]].plain)
        elif not name.endswith(method.dropped or ("\0",)):
            tensors[name] = tensor
    config = without_settings(checkpoint.config)
    plain = replace(checkpoint, tensors=tensors, config=config, dequantized=frozenset(weights))
    return QuantizedCheckpoint(checkpoint, method, weights, plain)


OF_MLX = "quantization"  # mlx-lm writes its settings under this name, too


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with settings of codes, as they are stored."""
    names = (FIELD, OF_MLX) if is_mlx(config.get(OF_MLX)) else (FIELD,)
    return {name: config[name] for name in names if name in config}


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without settings of quantization, which composite models may have in `text_config`, too."""
    left = {"compression_config", *settings_of(config)}
    kept = {name: value for name, value in config.items() if name not in left}
    return {name: without_settings(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def _nothing(checkpoint: Checkpoint, method: QuantizationMethod) -> InputRefused:
    """The refusal of a model without a quantized weight that the method knows."""
    if codes := next((name for name, tensor in checkpoint.items() if tensor.dtype.name in CODES), None):
        return UnsupportedInput(
            f"`{codes}` has codes under a name that is not known for `{method.name}`",
            hint="quantize the model again with a newer version of the program that wrote it, or take the model it was "
            "quantized from",
        )
    return MalformedInput(
        f"the model's config has `{method.name}`, but no weight in its files is quantized",
        hint=f"take `{FIELD}` out of `config.json` if the weights are plain",
    )


def unsupported(config: Mapping[str, Any]) -> UnsupportedInput | None:
    """The error for a model whose configuration names a method that llmconv does not read."""
    kind = method_name(config)
    if kind is None or (kind in methods() and isinstance(config.get(FIELD) or config.get(OF_MLX), Mapping)):
        return None
    hint = f"supported are {', '.join(methods())}; take the model it was quantized from"
    return UnsupportedInput(f"the model is quantized with `{kind[:40]}`, which is not supported", hint=hint)


def method_name(config: Mapping[str, Any]) -> str | None:
    settings = config.get(FIELD)
    if is_mlx(settings or config.get(OF_MLX)):
        return "mlx"
    if not settings:
        return None
    name = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if name is None and any(str(key).startswith("load_in_") for key in settings):
        return "bitsandbytes"  # transformers before 4.37 did not write the method
    return str(name)


def is_mlx(settings: Any) -> bool:
    """Whether these are the settings of MLX (mlx-lm `utils.py`): bits and group, and those of single modules."""
    if not isinstance(settings, Mapping) or not {"bits", "group_size"} <= settings.keys():
        return False
    others = {name: value for name, value in settings.items() if name not in ("bits", "group_size", "mode")}
    is_other = {"quant_method", "sym", "desc_act", "zero_point"} & others.keys()
    return not is_other and all(isinstance(value, Mapping) or value is False for value in others.values())


@dataclass(frozen=True, eq=False)
class TransposedWeight(PackedWeight):
    """The transpose of another weight, which is `stored` in the files."""

    stored: PackedWeight

    @property
    def plain(self) -> LazyTensor:
        return transposed(self.stored.plain)

    def values(self, start: int, stop: int) -> Array:
        return self.plain.rows(start, stop)

    @property
    def integers(self) -> IntegerCodes | None:
        found = self.stored.integers
        return replace(found, turned=True) if found else None

    def requantized(self, weight: LazyTensor) -> Self:
        stored = self.stored.requantized(transposed(weight))
        return replace(self, parts=stored.parts, stored=stored)
