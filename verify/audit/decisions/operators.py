"""What operators do to the values that follow from a call, as far as decisions go."""

from __future__ import annotations

import onnx

from llmconv.verify.audit.decisions.affine_forms import LENGTH, MASK, POSITION, TOKEN

INPUTS = {"input_ids": TOKEN, "attention_mask": MASK, "position_ids": POSITION, "write_indices": LENGTH}
"""Inputs of a graph, and what of a call they are."""

SAME = {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Tile", "Flatten", "Split", "Dropout"}
"""Other layouts of their first input."""

SUMS = {"Add", "Sub", "Neg", "Mul", "Div", "Sum"}
COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
LOGIC = {"And", "Or", "Xor", "Not"}
CURVES = {"Cos", "Sin"}
"""Alike everywhere: where they are wrong at one position, they are at all."""

BENDS = {"Log", "Sqrt", "Exp", "Pow", "Reciprocal", "Sigmoid", "Tanh"}
"""What comes of them is no whole number; nothing may be decided by it."""

PICKS = {"Gather", "Slice", "GatherElements", "GatherND"}
"""They give elements of their first input."""

BOUNDS = {
    "Slice": (1, 2),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "TensorScatter": (2,),
    "Trilu": (1,),
    "Loop": (0,),
    "TopK": (1,),
}
"""Inputs that say from where to where."""

LAYOUTS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Split": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "CumSum": (1,),
}
"""Inputs that say in which layout, and give no element of the result."""

INDEXED = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "RotaryEmbedding": 3,
    "GroupQueryAttention": 9,
}
"""The input that says where to look."""

TABLES = {"RotaryEmbedding": (1, 2), "GroupQueryAttention": (7, 8)}
"""The inputs in which these look."""

LENGTHS_OF_CACHE = {"GroupQueryAttention": (5, 6), "Attention": (6,)}
"""Inputs that say how much of a cache is filled."""

LIMITS = {"Clip": (1, 2), "Min": None, "Max": None}
"""Inputs that are limits of the others; None for all."""

ROUNDINGS = {"Floor", "Ceil", "Round"}
REDUCTIONS = {"ReduceSum", "ReduceMax", "ReduceMin", "ArgMax", "CumSum"}
SUMMED = {"ReduceSum", "CumSum"}
STEPS = {"Mod", "Div", "Relu", "Abs", "Sign", "Pad", "Add", "Sub", "ScatterND", "ScatterElements"}
PLAIN = {*COMPARISONS, *LOGIC, *CURVES, *BENDS, *LIMITS, *ROUNDINGS, *REDUCTIONS, *STEPS, "Mul"}
"""Operators of which their inputs' numbers say all."""

THRESHOLDS = {"ThresholdedRelu", "Shrink", "IsInf", "IsNaN", "Sign", "Hardmax", *ROUNDINGS}
"""Operators that decide on what the model computes by numbers of their own."""

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
"""Operators that give something else in every run."""

EXACT_BITS: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
    onnx.TensorProto.INT8: 7,
    onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT16: 15,
    onnx.TensorProto.UINT16: 16,
}
"""Integers beyond so many bits change in these types."""

HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, *EXACT_BITS} - HALVES
"""Types in which what is behind the point is lost."""


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """A whole number among a node's attributes."""
    return next((int(one.i) for one in node.attribute if one.name == name), default)
