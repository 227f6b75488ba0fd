"""The eager model cut to a few layers, its parameters fake: shapes and dtypes, no memory.

Computed buffers (rotary tables, ALiBi slopes) stay real, because they become constants of the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.export.input_maps import decoder_config
from llmconv.export.tracing.experts import EXPERTS
from llmconv.export.tracing.rotary_scaling import frequencies_from_positions
from llmconv.runtime.custom_code import custom_classes

CODE_FIELDS = ("auto_map", "_attn_implementation", "_attn_implementation_internal", "attn_implementation")
"""Config fields that name code or kernels to load; a checkpoint is data, so they are not passed on."""


def load_config(fields: dict[str, Any], code: Path | None = None) -> Any:
    """The transformers config of a `config.json`, without anything that would load code.

    Args:
        fields: of `config.json`.
        code: the model's folder, where its own code is to build it; `build` then does so, too.

    Raises:
        UnsupportedInput: transformers does not know the `model_type`, or the weights are quantised.
    """
    if fields.get("quantization_config"):
        raise UnsupportedInput(
            "the weights are quantised (`quantization_config`)", hint="export the model it was quantised from"
        )
    with refusing("read this config"):
        known = {name: value for name, value in _plain(fields).items() if name != "model_type"}
        config = (
            custom_classes(code, fields)[0](**known) if code else AutoConfig.for_model(fields["model_type"], **known)
        )
        if depth(config) < 1:
            raise ValueError(f"it has {depth(config)} layers")
        return config


def _plain(value: Any) -> Any:
    """Without `CODE_FIELDS`; infinity and NaN, which JSON has not, stand there as `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _plain(item) for name, item in value.items() if name not in CODE_FIELDS}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever transformers or torch raise about a model becomes one line: they promise no class of error.

    Raises:
        UnsupportedInput: something was raised.
    """
    try:
        yield
    except LlmconvError:
        raise
    except Exception as error:
        reason = first_line(error, 200).split(". Should contain")[0]
        raise UnsupportedInput(
            f"transformers and torch cannot {what}: {type(error).__name__}: {reason}",
            hint="mend `config.json`; if eager transformers runs the model, it has something that cannot be traced",
        ) from error


def depth(config: Any) -> int:
    """How many layers the decoder has; a config of an encoder and a decoder counts them apart."""
    config = decoder_config(config)
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def period(config: Any) -> int:
    """Length of the repeating pattern of the layers (1 when all are alike), by every list with one entry per layer."""
    total = depth(config)
    decoder = decoder_config(config)
    fields = [*decoder.to_dict().values(), getattr(decoder, "layer_types", None)]  # which some configs work out
    lists = [value for value in fields if isinstance(value, list) and len(value) == total]
    lists += [[value.get(str(layer)) for layer in range(total)] for value in fields if _is_by_layer(value)]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * total
    return next(p for p in range(1, total + 1) if kinds[p:] == kinds[:-p])


def shortened(config: Any, num_layers: int) -> Any:
    """The same config with `num_layers` layers; per-layer lists are cut to match."""
    decoder = decoder_config(config)
    if decoder is not config:
        whole = copy.deepcopy(config)
        whole.text_config = shortened(decoder, num_layers)
        return whole
    total = depth(config)
    fields = config.to_dict()
    fields[type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    if "decoder_layers" in fields:
        fields["decoder_layers"] = num_layers
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == total:
            fields[name] = value[:num_layers]
        elif _is_by_layer(value):
            fields[name] = {key: item for key, item in value.items() if int(key) < num_layers}
    kept = {name: value for name, value in fields.items() if not _is_computed(config, name)}
    kept.pop("model_type", None)
    return type(config)(**kept)  # not by `model_type`: a text model inside another has none of its own


def _is_by_layer(value: Any) -> bool:
    """A mapping from numbers of layers, which are texts in `config.json`."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdigit() for key in value)


def _is_computed(config: Any, name: str) -> bool:
    """A field that the config works out from others and does not take."""
    stated = getattr(type(config), type(config).attribute_map.get(name, name), None)
    return isinstance(stated, property) and stated.fset is None


def build(config: Any) -> PreTrainedModel:
    """The eager float32 model of `config`, in eval mode, with fake parameters."""
    with _fake_parameters() as mode:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    for module, name in stored_buffers(model):
        with mode:
            module._buffers[name] = torch.empty_like(module.get_buffer(name))
    frequencies_from_positions(model)
    return model.eval()


def stored_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Buffers that are weights in all but name: a checkpoint stores them, and training changes them."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            is_stored = name not in module._non_persistent_buffers_set
            if buffer is not None and is_stored and buffer.is_floating_point():
                yield module, name


class _FakeEmpty(TorchFunctionMode):
    """`torch.empty` gives fake tensors: modules make their large parameters with it, and no buffer has its content."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.empty:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


@contextmanager
def _fake_parameters() -> Iterator[FakeTensorMode]:
    """Every parameter registered meanwhile is replaced by a fake one, so no initialisation touches memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    empty = _FakeEmpty(mode)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            with mode:
                parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined] # some initialisers read what they wrote
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign,assignment]
    try:
        with empty:
            yield mode
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
