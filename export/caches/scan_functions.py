"""Scans as ONNX functions of standard operators, defined once per graph and called once per layer.

They take any number of tokens and continue a given state, so one graph serves prompts, later turns and single steps.
A runtime expands them when it loads the graph. The definitions in ONNX's text syntax are in the files of the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import parser
from torch import Tensor

DOMAIN = "llmconv.scan"
HEADER = f'<domain: "{DOMAIN}", opset_import: ["" : 23]>'

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
    return tuple(torch.onnx.ops.symbolic_multi_out(f"{DOMAIN}::{name}", wide, dtypes=dtypes, shapes=shapes, version=1))


def define_functions(model: ir.Model, texts: Mapping[str, str]) -> None:
    """Adds the definitions of the functions that nodes in the domain `llmconv.scan` call, in place."""
    for name in sorted({node.op_type for node in model.graph if node.domain == DOMAIN}):
        function = ir.serde.deserialize_function(function_proto(texts[name]))
        model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1


def function_proto(text: str) -> onnx.FunctionProto:
    """The ONNX function with this definition."""
    return parser.parse_function(HEADER + text)
