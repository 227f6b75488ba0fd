"""Classes of ONNX operators for the audit of decisions."""

from __future__ import annotations

import onnx

from llmconv.verify.audit.decisions.affine_forms import LENGTH, MASK, POSITION, TOKEN

INPUTS = {"input_ids": TOKEN, "attention_mask": MASK, "position_ids": POSITION, "write_indices": LENGTH}
"""Inputs of a graph, and the property of a call that each contains."""

SAME = {"Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Tile", "Flatten", "Split", "Dropout"}
"""Operators that change only the layout of their first input."""

SUMS = {"Add", "Sub", "Neg", "Mul", "Div", "Sum"}
COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
LOGIC = {"And", "Or", "Xor", "Not"}
PERIODIC = {"Cos", "Sin"}
"""Periodic functions: an error at one position appears at all."""

NONLINEAR = {"Log", "Sqrt", "Exp", "Pow", "Reciprocal", "Sigmoid", "Tanh"}
"""Nonlinear functions, whose results must not be compared."""

SELECTIONS = {"Gather", "Slice", "GatherElements", "GatherND"}
"""Operators that select elements of their first input."""

BOUNDS = {
    "Slice": (1, 2),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "TensorScatter": (2,),
    "Trilu": (1,),
    "Loop": (0,),
    "TopK": (1,),
}
"""Inputs that are bounds, by operator."""

LAYOUTS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Split": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "CumSum": (1,),
}
"""Inputs that determine only the layout of the result, by operator."""

INDEXED = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "RotaryEmbedding": 3,
    "GroupQueryAttention": 9,
}
"""The input that is an index, by operator."""

TABLES = {"RotaryEmbedding": (1, 2), "GroupQueryAttention": (7, 8)}
"""The inputs that are lookup tables, by operator."""

LENGTHS_OF_CACHE = {"GroupQueryAttention": (5, 6), "Attention": (6,)}
"""Inputs that contain the filled length of a cache, by operator."""

LIMITS = {"Clip": (1, 2), "Min": None, "Max": None}
"""Inputs that limit the others, by operator; None for all inputs."""

ROUNDINGS = {"Floor", "Ceil", "Round"}
REDUCTIONS = {"ReduceSum", "ReduceMax", "ReduceMin", "ArgMax", "CumSum"}
SUMMED = {"ReduceSum", "CumSum"}
STEPS = {"Mod", "Div", "Relu", "Abs", "Sign", "Pad", "Add", "Sub", "ScatterND", "ScatterElements"}
TRANSPARENT = {*COMPARISONS, *LOGIC, *PERIODIC, *NONLINEAR, *LIMITS, *ROUNDINGS, *REDUCTIONS, *STEPS, "Mul"}
"""Operators that involve no numbers other than those of their inputs."""

THRESHOLDS = {"ThresholdedRelu", "Shrink", "IsInf", "IsNaN", "Sign", "Hardmax", *ROUNDINGS}
"""Operators that compare model values with built-in numbers."""

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
"""Operators with different results in each run."""

EXACT_BITS: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.BFLOAT16: 8,
    onnx.TensorProto.INT8: 7,
    onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT16: 15,
    onnx.TensorProto.UINT16: 16,
}
"""Number of bits up to which integers are exact, by element type."""

SMALLEST_HALF: dict[int, float] = {onnx.TensorProto.FLOAT16: -65504.0}
"""The smallest number of a half-precision type, which masks contain; that of bfloat16 is as large as in float32."""

HALVES = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
INTEGERS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, *EXACT_BITS} - HALVES
"""Integer types, in which fractions are lost."""


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """The value of an integer attribute.

    Args:
        node: the node.
        name: name of the attribute.
        default: returned if the node lacks it.
    """
    return next((int(one.i) for one in node.attribute if one.name == name), default)
