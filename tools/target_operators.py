"""What `tools.target_tables` keeps: operators that exported graphs can contain, and facts that no page lists."""

from __future__ import annotations

Types = dict[str, list[str]]

_NAMES = """
    Abs Add And ArgMax ArgMin Attention Cast CastLike Ceil Clip Concat Constant ConstantOfShape Conv Cos CumSum
    DequantizeLinear Div DynamicQuantizeLinear DynamicQuantizeMatMul Einsum Equal Erf Exp Expand EyeLike FastGelu
    Flatten Floor FusedMatMul Gather GatherBlockQuantized GatherElements GatherND Gelu Gemm Greater GreaterOrEqual
    GroupNormalization GroupQueryAttention HardSwish Identity If IsInf IsNaN LayerNormalization LeakyRelu Less
    LessOrEqual Log LogSoftmax Loop MatMul MatMulInteger MatMulNBits Max Min Mod Mul Neg NonZero Not OneHot Or Pad Pow
    QMoE QuantizeLinear RMSNormalization Range Reciprocal ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape RotaryEmbedding Round Scan ScatterElements ScatterND Shape Sigmoid
    Sign SimplifiedLayerNormalization Sin Size SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softmax
    Softplus Split Sqrt Squeeze Sub Sum Swish Tanh TensorScatter Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
OPERATORS = frozenset(_NAMES.split())

_TYPES = "bfloat16 bool double float16 float32 int16 int32 int64 int8 uint32 uint8"
ELEMENT_TYPES = frozenset(_TYPES.split())
"""Types that graphs contain."""

FLOATS = ["float16", "float32"]
NUMBERS = [*FLOATS, "int32", "uint32"]
"""WebGPU's types of numbers; int64 only with the option `enableInt64`, which is not counted on."""

BYTES = ["uint8"]
INDEXES = ["int32", "int64"]
_FLOAT_OPERATORS = """Abs Attention Ceil Conv Cos Einsum Erf Exp FastGelu Floor GatherElements Gelu HardSwish
    GroupQueryAttention LeakyRelu Log MatMul Neg RMSNormalization Reciprocal Relu SimplifiedLayerNormalization Sigmoid
    Sin SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softplus Sqrt Tanh"""
_WITH_BOOLEANS = "Expand Flatten Reshape Unsqueeze Where"

WEBGPU_TYPES: dict[str, Types] = {
    **{name: {"T": FLOATS} for name in _FLOAT_OPERATORS.split()},
    **{name: {"T": [*NUMBERS, "bool"]} for name in _WITH_BOOLEANS.split()},
    "And": {"T": ["bool"]},
    "Not": {"X": ["bool"]},
    "Cast": {"T1": [*NUMBERS, "bool", "uint8"], "T2": [*NUMBERS, "bool", "int64", "uint8"]},
    "CumSum": {"T": NUMBERS, "T2": INDEXES},
    "Gather": {"T": [*NUMBERS, "bool"], "Tind": INDEXES},
    "GatherBlockQuantized": {"T2": FLOATS, "Tind": INDEXES},
    "If": {},
    "LayerNormalization": {"T": FLOATS, "U": FLOATS},
    "MatMulNBits": {"T1": FLOATS, "T2": BYTES, "T3": BYTES},
    "Pow": {"T": NUMBERS, "T1": NUMBERS},
    "QMoE": {"T": FLOATS, "T2": FLOATS},
    "Range": {"T": ["float32", "int32"]},
    "RotaryEmbedding": {"T": FLOATS, "M": ["int64"]},
    "ScatterElements": {"T": NUMBERS, "Tind": INDEXES},
    "TopK": {"T": FLOATS, "I": ["int64"]},
}
"""Element types by type constraint where they are not `T = NUMBERS`, read from the kernels' registrations."""

SIGNATURES: dict[str, list[list[str]]] = {
    "SimplifiedLayerNormalization": [["T", "V"], ["V", "U"]],
    "com.microsoft:DynamicQuantizeMatMul": [["T1", "T2", "T1", "T2", "T1"], ["T1"]],
    "com.microsoft:FastGelu": [["T", "T"], ["T"]],
    "com.microsoft:FusedMatMul": [["T", "T"], ["T"]],
    "com.microsoft:GatherBlockQuantized": [["T1", "Tind", "T2", "T1"], ["T2"]],
    "com.microsoft:Gelu": [["T"], ["T"]],
    "com.microsoft:GroupQueryAttention": [
        [
            "T",
            "T",
            "T",
            "T_CACHE",
            "T_CACHE",
            "M",
            "M",
            "T",
            "T",
            "tensor(int64)",
            "T",
            "T",
            "T_KV_SCALE",
            "T_KV_SCALE",
        ],
        ["T", "T_CACHE", "T_CACHE", "T"],
    ],
    "com.microsoft:MatMulNBits": [["T1", "T2", "T1", "T3", "T4", "T1"], ["T1"]],
    "com.microsoft:QMoE": [["T", "T", "T1", "T2", "T", "T1", "T2", "T", "T1", "T2", "T"], ["T"]],
    "com.microsoft:RotaryEmbedding": [["T", "M", "T", "T"], ["T"]],
    "com.microsoft:SkipLayerNormalization": [["T", "T", "T", "T", "T"], ["T", "U", "U", "T"]],
    "com.microsoft:SkipSimplifiedLayerNormalization": [["T", "T", "T", "T"], ["T", "U", "U", "T"]],
}
"""Type constraints of inputs and outputs of the operators that onnx does not define."""
