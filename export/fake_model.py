"""The eager model cut to a few layers, its parameters fake: shapes and dtypes, no memory.

Computed buffers (rotary tables, ALiBi slopes) stay real, because they become constants of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmconv.errors import LlmconvError, UnsupportedInput

CODE_FIELDS = ("auto_map", "_attn_implementation", "_attn_implementation_internal", "attn_implementation")
"""Config fields that name code or kernels to load; a checkpoint is data, so they are not passed on."""


def load_config(fields: dict[str, Any]) -> Any:
    """The transformers config of a `config.json`, without anything that would load code.

    Raises:
        UnsupportedInput: transformers does not know the `model_type`, or the weights are quantised.
    """
    if fields.get("quantization_config"):
        raise UnsupportedInput(
            "the weights are quantised (`quantization_config`)", hint="export the model it was quantised from"
        )
    known = {name: value for name, value in fields.items() if name not in (*CODE_FIELDS, "model_type")}
    with refusing("read this config"):
        config = AutoConfig.for_model(fields["model_type"], **known)
        layers = config.get_text_config(decoder=True).num_hidden_layers
        if layers < 1:
            raise ValueError(f"it has {layers} layers")
        return config


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
        reason = (str(error).strip().splitlines() or [""])[0].split(". Should contain")[0][:200]
        raise UnsupportedInput(
            f"transformers and torch cannot {what}: {type(error).__name__}: {reason}",
            hint="mend `config.json`; if eager transformers runs the model, it has something that cannot be traced",
        ) from error


def period(config: Any) -> int:
    """Length of the repeating pattern of layer kinds (1 when all are alike)."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[:-p])


def shortened(config: Any, num_layers: int) -> Any:
    """The same config with `num_layers` layers; per-layer lists are cut to match."""
    total = config.num_hidden_layers
    fields = config.to_dict()
    fields[type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == total:
            fields[name] = value[:num_layers]
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build(config: Any) -> PreTrainedModel:
    """The eager float32 model of `config`, in eval mode, with fake parameters."""
    with _fake_parameters():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


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
def _fake_parameters() -> Iterator[None]:
    """Every parameter registered meanwhile is replaced by a fake one, so no initialisation touches memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    empty = _FakeEmpty(mode)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            with mode:
                parameter = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign,assignment]
    try:
        with empty:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
