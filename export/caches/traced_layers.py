"""The cache of the traced model: transformers' cache layers over tensors that are graph inputs.

transformers updates the states of a layer in place, at fixed addresses; a trace needs new tensors instead. Scans of
states are ONNX functions of standard operators, defined once per graph and called once per layer. They take any number
of tokens and continue a given state, so one graph serves prompts, later turns and single steps; a runtime expands them
when it loads the graph. Their definitions in ONNX's text syntax are in the files of the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import parser
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from llmconv.export.library_patches import EMPTY_LAYER
from llmconv.runtime.extra_inputs import SCAN, layer_of


class PastLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache; `update` concatenates, even if the family's own cache layer keeps only a window."""

    keys: Any
    values: Any

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends along the sequence axis; inputs and results are `[batch, kv_heads, length, head_dim]`."""
        past = self.keys is not None
        self.keys = torch.cat([self.keys, key_states], dim=-2) if past else key_states
        self.values = torch.cat([self.values, value_states], dim=-2) if past else value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]


class RecordedStates(dict[int, Tensor]):
    """Recurrent states by number that record reads, by the cache or (before transformers 5.21) by its layer."""

    last_read: Tensor | None = None
    """The state that was read last: some scans of transformers do not receive the state as an argument."""

    def __getitem__(self, number: int) -> Tensor:
        """A state, recorded in `last_read`."""
        RecordedStates.last_read = super().__getitem__(number)
        return RecordedStates.last_read


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One layer's windows `[batch, channels, kernel]` and recurrent states; they are zeros at the beginning."""

    def __init__(self, conv: Sequence[Tensor], recurrent: Sequence[Tensor]) -> None:
        super().__init__(number_of_states=max(len(conv), len(recurrent)))
        self.conv_states.update(enumerate(conv))
        self.recurrent_states = RecordedStates(enumerate(recurrent))
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)
        self.is_conv_states_initialized = self.is_recurrent_states_initialized = self.has_previous_state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Returns the window followed by the new columns, and keeps the last columns."""
        window = self.conv_states[state_idx]
        columns = torch.cat([window, conv_states], dim=-1)
        self.conv_states[state_idx] = columns[..., -window.shape[-1] :]
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class HybridLayer(StateLayer, PastLayer):
    """A layer with attention and states."""

    def __init__(self, keys: Tensor, values: Tensor, conv: Sequence[Tensor], recurrent: Sequence[Tensor]) -> None:
        PastLayer.__init__(self, keys, values)
        StateLayer.__init__(self, conv, recurrent)


class TracedCache(Cache):  # type: ignore[misc]
    """A cache over flat tensors, one per graph name, past or present."""

    is_step: Tensor | None = None  # whether the call is one token after a past

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor], num_layers: int) -> None:
        by_layer: list[dict[str, list[Tensor]]] = [{} for _ in range(num_layers)]
        for name, tensor in zip(names, tensors, strict=True):
            by_layer[layer_of(name) or 0].setdefault(_part(name), []).append(tensor)
        super().__init__(layers=[_layer(**parts) for parts in by_layer])

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in _tensors(layer)]


def _part(name: str) -> str:
    """`key`, `value`, `conv` or `recurrent`."""
    prefix, _, rest = name.partition(".")
    return rest.partition(".")[2] if prefix in {"past_key_values", "present"} else prefix.partition("_")[2]


def _layer(
    key: Sequence[Tensor] = (),
    value: Sequence[Tensor] = (),
    conv: Sequence[Tensor] = (),
    recurrent: Sequence[Tensor] = (),
) -> Any:
    if not key:
        return StateLayer(conv, recurrent) if conv or recurrent else EMPTY_LAYER()
    if conv or recurrent:
        return HybridLayer(key[0], value[0], conv, recurrent)
    return PastLayer(key[0], value[0])


def _tensors(layer: Any) -> list[Tensor]:
    found = [layer.keys, layer.values] if isinstance(layer, PastLayer) else []
    if isinstance(layer, StateLayer):
        found += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [tensor for tensor in found if tensor is not None]


HEADER = f'<domain: "{SCAN}", opset_import: ["" : 23]>'

CHUNKS = """
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    most = Constant <value_ints = [64]> ()
    length = Shape <start = 1, end = 2> (x)
    chunk = Min (length, most)
    short = Sub (length, one)
    filled = Div (short, chunk)
    chunks = Add (filled, one)
    padded = Mul (chunks, chunk)
    missing = Sub (padded, length)
    pads = Concat <axis = 0> (zero, missing)
    axis = Constant <value_ints = [1]> ()
    zero_scalar = Constant <value_int = 0> ()
    one_scalar = Constant <value_int = 1> ()
    chunk_scalar = Squeeze (chunk)
    steps = Range (zero_scalar, chunk_scalar, one_scalar)
    rows = Unsqueeze (steps, last)
    columns = Unsqueeze (steps, zero)
    after = Greater (rows, columns)
    seen = GreaterOrEqual (rows, columns)
    nothing = Constant <value_float = 0.0> ()
    never = Constant <value = float {-inf}> ()
"""
"""Divides the L tokens of `x` (axis 1) into equal chunks of at most 64, so that a step computes one token only.

`pads` pads axis 1; `seen` and `after` are the causal masks of a chunk, with and without its diagonal.
"""


def call(name: str, inputs: Sequence[Tensor], shapes: Sequence[Sequence[Any]]) -> tuple[Tensor, ...]:
    """Float32 outputs, with these shapes, of an ONNX function's call in a trace; inputs of any dtype become float32."""
    wide = [tensor.float() for tensor in inputs]
    dtypes = [torch.float32] * len(shapes)
    return tuple(torch.onnx.ops.symbolic_multi_out(f"{SCAN}::{name}", wide, dtypes=dtypes, shapes=shapes, version=1))


def define_functions(model: ir.Model, texts: Mapping[str, str]) -> None:
    """Adds the definitions of the functions that nodes in the domain `llmconv.scan` call, in place."""
    for name in sorted({node.op_type for node in model.graph if node.domain == SCAN}):
        function = ir.serde.deserialize_function(function_proto(texts[name]))
        model.functions[function.identifier()] = function
        model.opset_imports[SCAN] = 1


def function_proto(text: str) -> onnx.FunctionProto:
    return parser.parse_function(HEADER + text)
