"""SessionSettings: options with which onnxruntime opens a graph, and the memory in which its provider computes.

A half-precision graph may be rewritten in memory so that it computes in float32, with the same weights: onnxruntime's
CPU provider has almost no bfloat16 kernels, and `verify` compares half-precision graphs in float32, too. Weights in
external files stay as stored; a Cast follows each, which onnxruntime folds when it opens the graph, separately in every
session. WidenedWeights makes the float32 copies first, and every session gets the same memory
(`SessionOptions.add_initializer`). Prepacked weights cannot be shared: onnxruntime shares those between sessions in C++
only (1.31).
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from llmconv.argument_checks import require_threads
from llmconv.errors import UsageProblem, first_line
from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.onnxruntime.guard import EXACT, attributes, external_fields, graphs, is_external, refill
from llmconv.tensors import BLOCK_BYTES, Array

HALF_PRECISION: Mapping[str, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
# attributes that contain an element type
TYPE_ATTRIBUTES = {"to", "dtype", "stash_type", "output_dtype", "softmax_precision"}


def exact_number(tensor: onnx.TensorProto) -> Array | None:
    """The recorded number behind a half-precision scalar; None without one, or if the scalar is not its rounding."""
    stored: Array = numpy_helper.to_array(tensor)
    for entry in tensor.metadata_props:
        if entry.key == EXACT and stored.size == 1:
            number = np.full(stored.shape, _number(entry.value), np.float32)
            return number if np.array_equal(number.astype(stored.dtype), stored) else None
    return None


def _number(text: str) -> float:
    """NaN, which equals no constant, for a text that is not a number in the range of float32."""
    try:
        number = float(text)
    except ValueError:
        return float("nan")
    return number if abs(number) <= np.finfo(np.float32).max else float("nan")


def half_precision(model: onnx.ModelProto) -> str:
    """The half-precision dtype of a graph's inputs and outputs, `float16` or `bfloat16`; empty if they have none."""
    kinds = {port.type.tensor_type.elem_type for port in (*model.graph.input, *model.graph.output)}
    return next((name for name, kind in HALF_PRECISION.items() if kind in kinds), "")


def compute_in_float32(
    model: onnx.ModelProto, half: int, constant: Callable[[onnx.TensorProto], Array] = numpy_helper.to_array
) -> None:
    """Replaces the type `half` by float32 in place, not other half types; `constant` reads values of inline tensors."""
    for graph in graphs(model.graph):
        del graph.value_info[:]
        for info in [*graph.input, *graph.output]:
            kind = info.type.tensor_type
            kind.elem_type = TensorProto.FLOAT if kind.elem_type == half else kind.elem_type
        _widen_weights(graph, half)
        for tensor in graph.initializer:
            _widen_tensor(tensor, half, constant)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES:
                    attribute.i = TensorProto.FLOAT if attribute.i == half else attribute.i
                elif attribute.type == onnx.AttributeProto.TENSOR:
                    _widen_tensor(attribute.t, half, constant)


def _widen_tensor(tensor: onnx.TensorProto, half: int, constant: Callable[[onnx.TensorProto], Array]) -> None:
    if tensor.data_type == half and not is_external(tensor):
        tensor.CopyFrom(numpy_helper.from_array(constant(tensor).astype("float32"), tensor.name))


def _widen_weights(graph: onnx.GraphProto, half: int) -> None:
    """Adds a Cast after every external weight."""
    weights = [tensor for tensor in graph.initializer if tensor.data_type == half and is_external(tensor)]
    casts = []
    for tensor in weights:
        name, tensor.name = tensor.name, f"{tensor.name}:stored"
        casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}:wide", to=TensorProto.FLOAT))
    if casts:
        refill(graph.node, [*casts, *graph.node])


HOST = "cpu"  # onnxruntime's name of the host's memory

# onnxruntime's name of a provider's memory. Values of other providers are passed in the host's memory
MEMORY = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# numpy types by onnxruntime's names
TENSOR_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(double)": np.float64,
    "tensor(int8)": np.int8,
}
# the same for inputs
INPUT_DTYPES = {**TENSOR_DTYPES, "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8}
INPUT_DTYPES |= {"tensor(bool)": np.bool_}


@dataclass(frozen=True)
class Device:
    """The memory in which a provider computes."""

    memory: str = HOST  # onnxruntime's name of it: `cpu` or `cuda`
    index: int = 0  # number of the device
    # onnxruntime copies what is bound once, when it is bound: memory that the host changes later, or that another run
    # has written, has to be bound again
    copies: bool = False

    @classmethod
    def of(cls, provider: str, options: Mapping[str, Any]) -> Device:
        """The device of a provider, by onnxruntime's name and the option `device_id`."""
        memory = MEMORY.get(provider, HOST)
        index = int(options.get("device_id", 0)) if memory != HOST else 0
        return cls(memory, index, copies=provider != "CPUExecutionProvider")

    def place(self, array: Array) -> ort.OrtValue:
        """A copy of an array in this memory; onnxruntime frees it when neither a value nor an array refers to it."""
        array = np.ascontiguousarray(array)
        kind = onnx.TensorProto.BFLOAT16 if array.dtype == BFLOAT16 else array.dtype
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, kind, self.memory, self.index)
        if array.size:
            value.update_inplace(array.view(np.uint16) if array.dtype == BFLOAT16 else array)
        return value


def host_value(array: Array) -> ort.OrtValue:
    """A contiguous array as a value on the same memory, which is valid as long as that array exists."""
    if array.dtype != BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def as_array(value: ort.OrtValue) -> Array:
    """A value of any device as an array; onnxruntime itself has none for bfloat16."""
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        array: Array = value.numpy()
        return array
    held = ort.OrtValue.ortvalue_from_shape_and_type(value.shape(), onnx.TensorProto.BFLOAT16)
    if not held.tensor_size_in_bytes():
        return np.empty(value.shape(), BFLOAT16)
    held.update_inplace(value)
    content = (ctypes.c_char * held.tensor_size_in_bytes()).from_address(held.data_ptr())
    return np.frombuffer(bytearray(content), BFLOAT16).reshape(value.shape())


CPU = "CPUExecutionProvider"
# changes a graph, given its path and its content without the weights
GraphTransform = Callable[[Path, onnx.ModelProto], None]
# dtypes for which onnxruntime's CPU provider has almost no kernels: such graphs compute in float32 there
WITHOUT_KERNELS = ("bfloat16",)
# defaults of providers: products of float32 are not rounded to TF32's 10 bits, as in torch
PROVIDER_DEFAULTS = {"CUDAExecutionProvider": {"use_tf32": "0"}}

LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disable": "ORT_DISABLE_ALL",
}

REMOTE_SILENCE = 20.0  # default seconds without a heartbeat after which a stage is lost


@dataclass(frozen=True)
class StageAddresses:
    """Where the stages of a model run that do not run in this process.

    Attributes:
        addresses: HOST:PORT or N=HOST:PORT of each, see `llmconv serve-stage`; with `ray`, all others run in actors
            of a Ray cluster.
        timeout: seconds without a heartbeat after which a stage is lost.
    """

    addresses: Sequence[str]
    timeout: float = REMOTE_SILENCE


@dataclass(frozen=True)
class StageOptions:
    """What the settings of one stage replace; the attributes are those of `SessionSettings`."""

    provider: str
    provider_options: Mapping[str, str]
    entries: Mapping[str, str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class SessionSettings:
    """Options with which onnxruntime opens a graph.

    Attributes:
        threads: threads per operator; 0 for one per core.
        prepack: copies weights into the layout of the kernels: prompts and steps are faster (docs/speed.md), but each
            session holds its own copy of the weights instead of sharing the mapped file.
        optimization: `all`, `layout`, `extended`, `basic` or `disable`.
        garbage: shared cache buffers start with large numbers instead of zeros, for `verify`.
        arena: keeps freed memory for the next call.
        reuse: reuses the memory of values that are no longer read; onnxruntime 1.31 then assumes that the past and the
            present of GroupQueryAttention have the same size.
        float_activations: activations are not rounded to int8 for products with dequantized weights.
        yields: threads stop spinning after a run and release the cores to other sessions; for all sessions except the
            one that runs step after step.
        provider: execution provider, such as `cpu` or `CUDAExecutionProvider`; the CPU runs unsupported operators.
        provider_options: options of that provider.
        entries: session configuration entries, such as `session.intra_op.allow_spinning`.
        attributes: fields of `onnxruntime.SessionOptions`; they override the attributes above.
        free_dimensions: sizes of symbolic axes by symbol.
        change: called with the path and content of every graph before it is opened; may change the content.
        timeout: minimum seconds allowed for opening a graph and for each run (more for larger models and longer
            prompts, see `time_limit`); None for 60.
        widened: shares float32 copies of half-precision weights with other sessions; not with `prepack`.
        packed_cache: folder where packed weights are kept for later sessions, which map them, see `packed_cache`; None
            to pack them in memory.
        stages: options of single stages of graphs in stages, by their number from 1.
        extra_inputs: returns the extra inputs of the family, called for a graph that has some.
    """

    threads: int = 0
    prepack: bool = False
    optimization: str = "all"
    garbage: bool = False
    arena: bool = True
    reuse: bool = True
    float_activations: bool = False
    yields: bool = False
    provider: str = CPU
    provider_options: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    free_dimensions: Mapping[str, int] = field(default_factory=dict)
    change: GraphTransform | None = None
    timeout: float | None = None
    widened: WidenedWeights | None = field(default=None, compare=False, repr=False)
    packed_cache: Path | None = None
    stages: Mapping[int, StageOptions] = field(default_factory=dict)
    extra_inputs: Callable[[], Sequence[ExtraInput]] | None = field(default=None, compare=False, repr=False)

    def of_stage(self, number: int) -> SessionSettings:
        """The settings of one stage, the first of which has number 1."""
        own = self.stages.get(number)
        return replace(self, stages={}, **(vars(own) if own else {}))

    def require_stages(self, count: int) -> None:
        """Raises UsageProblem for settings of a stage that does not exist."""
        if odd := [number for number in self.stages if number > count]:
            raise UsageProblem(
                f"the session options have a section `[stage {odd[0]}]`, but the graphs have {count} "
                f"stage{'s' * (count > 1)}",
                hint=f"stages are numbered from 1 to {count}; `llmconv export --stages K` makes K of them",
            )

    def options(self) -> ort.SessionOptions:
        """The settings as `onnxruntime.SessionOptions`; raises UsageProblem for one that onnxruntime refuses."""
        require_threads(self.threads)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = self.arena
        options.enable_mem_reuse = self.reuse
        options.log_severity_level = 4  # errors are raised; do not log them, too
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[self.optimization])
        options.add_session_config_entry("session.disable_prepacking", "0" if self.prepack else "1")
        options.add_session_config_entry("session.force_spinning_stop", str(int(self.yields)))
        if self.float_activations:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            for name, value in self.attributes.items():
                setattr(options, name, value)
            for name, text in self.entries.items():
                options.add_session_config_entry(name, text)
            for symbol, size in self.free_dimensions.items():
                options.add_free_dimension_override_by_name(symbol, size)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise UsageProblem(f"invalid session option: {first_line(error)}", hint=NAMES) from error
        return options

    def prepare(self, path: Path, model: onnx.ModelProto, options: ort.SessionOptions) -> bool:
        """Changes the graph `model` of `path`, without its weights, as the settings demand; whether it did."""
        if self.change:
            self.change(path, model)
        is_on_cpu, half = provider_name(self.provider) == CPU, half_precision(model)
        if is_on_cpu and half in WITHOUT_KERNELS:
            compute_in_float32(model, HALF_PRECISION[half])
        if is_on_cpu and self.widened and not self.prepack:
            self.widened.share(path, model, options)
        return bool(self.change or (is_on_cpu and (self.widened or half in WITHOUT_KERNELS)))

    @property
    def device(self) -> Device:
        """Memory in which the provider computes; UsageProblem if this build of onnxruntime does not have it."""
        return Device.of(provider_name(self.provider), self.provider_options)

    def start(self) -> None:
        """Starts the provider, once in a process; UsageProblem if onnxruntime would fall back to the CPU."""
        name, options = self.providers()[0]
        if name != CPU:
            _start(name, tuple(sorted((str(key), str(value)) for key, value in options.items())))

    def providers(self) -> list[Any]:
        """Providers, preferred first, for `InferenceSession`; UsageProblem for a missing one or a refused option."""
        name = provider_name(self.provider)
        if str(self.provider_options.get("enable_cuda_graph", "0")).lower() in ("1", "true"):
            raise UsageProblem(
                "`enable_cuda_graph` replays a call with the addresses and shapes of the first one, and each call here "
                "has its own",
                hint="leave it out",
            )
        return [(name, {**PROVIDER_DEFAULTS.get(name, {}), **self.provider_options})] + [CPU] * (name != CPU)


@cache
def _start(provider: str, options: tuple[tuple[str, str], ...]) -> None:
    """Opens a graph of one node; for CUDA, first loads its libraries from the packages that pip installed."""
    if provider == "CUDAExecutionProvider":
        with redirect_stdout(sys.stderr):
            ort.preload_dlls()
    port = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "start", port[:1], port[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    ort.set_default_logger_severity(3)  # kernels of CUDA warn by this logger, in every call
    session = ort.InferenceSession(model.SerializeToString(), providers=[(provider, dict(options)), CPU])
    if provider not in session.get_providers():
        hint = "install the libraries that it needs (docs/targets.md); without `--provider` the CPU is used"
        raise UsageProblem(f"onnxruntime could not start `{provider}` and would compute on the CPU", hint=hint)


NAMES = "names and values are those of onnxruntime's `SessionOptions` and session configuration keys"


def for_concurrent_use(settings: SessionSettings | None) -> SessionSettings:
    """Settings of a graph whose threads release the cores to another graph after each run."""
    return replace(settings or SessionSettings(), yields=True)


def short_provider(provider: str) -> str:
    """The short name of a provider, such as `cuda` for `CUDAExecutionProvider`."""
    return provider.lower().removesuffix("executionprovider")


def provider_name(provider: str) -> str:
    """onnxruntime's name of a provider such as `cuda`; UsageProblem if this build of onnxruntime does not have it."""
    available = ort.get_available_providers()
    spelled: dict[str, str] = {name.lower(): name for name in available}
    if (found := spelled.get(short_provider(provider) + "executionprovider")) is None:
        short = ", ".join(map(short_provider, available))
        hint = f"it has {short}; other builds (`pip install onnxruntime-gpu`, docs/targets.md) have others"
        raise UsageProblem(f"this onnxruntime has no provider `{provider}`", hint=hint)
    return found


def with_options(
    settings: SessionSettings | None, provider: str | None, threads: int | None, timeout: float | None
) -> SessionSettings:
    """Settings (None for those of a new session) with a provider, threads or a timeout (seconds) that are not None.

    Raises UsageProblem for an invalid one, and for a provider that does not start.
    """
    require_threads(threads or 0)
    if timeout is not None and not 0 < timeout < inf:
        raise UsageProblem(f"`timeout` is {timeout}", hint="give a finite number of seconds above zero")
    given = {"provider": provider and provider_name(provider), "threads": threads, "timeout": timeout}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    made = replace(settings or SessionSettings(), **changes)
    made.start()
    return made


STORED: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}

# operators that read matrices, and are never folded, because their other input depends on the call
PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "Gather"}
Place = tuple[Path, int, int, tuple[int, ...]]  # file, offset, element type and shape of a stored weight


class WidenedWeights:
    """The copies, by the place of the stored weight; this object must outlive the sessions."""

    def __init__(self) -> None:
        self._values: dict[Place, ort.OrtValue] = {}

    def share(self, path: Path, model: onnx.ModelProto, options: ort.SessionOptions) -> None:
        """Replaces every Cast of a stored matrix to float32 by the shared copy, in place; adds the copies to `options`.

        Other weights are small, and onnxruntime may fold nodes that read them, for which it needs their own values.
        `model` is without its weights, which are in the folder of `path`.
        """
        weights = {one.name: one for one in model.graph.initializer if one.data_type in STORED and is_external(one)}
        uses = Counter(name for node in model.graph.node for name in node.input)
        read = Counter(name for node in model.graph.node if node.op_type in PRODUCTS for name in node.input)
        casts = [
            node
            for node in model.graph.node
            if _widens(node, weights) and uses[node.input[0]] == 1 and read[node.output[0]] == uses[node.output[0]]
        ]
        for node in casts:
            tensor = weights[node.input[0]]
            options.add_initializer(node.output[0], self._copy(path.parent, tensor))
            tensor.name, tensor.data_type = node.output[0], TensorProto.FLOAT
        replaced = {node.output[0] for node in casts}
        refill(model.graph.node, [node for node in model.graph.node if node.output[0] not in replaced])

    def _copy(self, folder: Path, tensor: onnx.TensorProto) -> ort.OrtValue:
        fields = external_fields(tensor)
        file, offset = (folder / fields["location"]).resolve(), int(fields.get("offset") or 0)
        place = file, offset, tensor.data_type, (*tensor.dims,)
        if place not in self._values:
            self._values[place] = ort.OrtValue.ortvalue_from_numpy(widened(*place))
        return self._values[place]


def _widens(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> bool:
    """Whether a node casts a stored weight to float32."""
    is_cast = node.op_type == "Cast" and not node.domain and node.input[0] in weights
    return is_cast and attributes(node).get("to") == TensorProto.FLOAT


def widened(path: Path, offset: int, kind: int, shape: tuple[int, ...]) -> Array:
    """FLOAT16 or BFLOAT16 values at byte `offset` as float32, in blocks: no more than a block is held twice."""
    result = np.empty(shape, np.float32)
    flat, dtype = result.reshape(-1), STORED[kind]
    step = BLOCK_BYTES // dtype.itemsize
    with open(path, "rb") as file:
        file.seek(offset)
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            block[...] = np.frombuffer(file.read(block.size * dtype.itemsize), dtype)
    return result
