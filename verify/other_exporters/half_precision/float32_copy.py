"""Half-precision graphs: the float32 copy of a float16 or bfloat16 graph, and bfloat16 where no kernel computes it.

Half precision hides mild faults: an epsilon, a GELU's form, rotary angles of too few bits change less than its rounding
does. So a half graph is judged twice: as it is, against the noise of the model in its own precision, and as a copy that
computes in float32 with the same weights, against the noise of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference

from llmconv.runtime.onnxruntime.guard import graphs
from llmconv.tensors import LazyTensor
from llmconv.verify.other_exporters.content_matching import Content
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.half_precision.known_constants import Known
from llmconv.verify.results.report import Check

HALVES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
EMULATED = "bfloat16"
"""What onnxruntime's CPU provider has next to no kernels for."""

IN_FLOAT32 = ", in float32"
"""What the names of the float32 copy's scenarios end with."""

ROUNDED = ", every value rounded"
"""What the names of those scenarios end with that are run on an emulation beside onnxruntime's own half precision."""

TYPE_ATTRIBUTES = {"to", "dtype", "stash_type", "output_dtype", "softmax_precision"}
MOVING = {
    *("Reshape", "Transpose", "Slice", "Gather", "Concat", "Unsqueeze", "Squeeze", "Expand", "Split", "Identity"),
    *("Where", "Flatten", "Tile", "Pad", "Neg", "Max", "Min", "Relu", "If", "Loop", "ScatterND", "GatherND"),
}
"""Operators whose results need no rounding, where their inputs are rounded."""


@contextmanager
def widened(file: GraphFile, known: Known) -> Iterator[GraphFile]:
    """The float32 twin of a half graph: a temporary copy whose every half-precision type is float32.

    Args:
        known: numbers of which a half-precision constant may be the rounding, see `Known`.
    """
    model = _loaded(file)
    widen(model, HALVES[file.dtype], known, _weights(file))
    with _saved(file, model) as copy:
        yield copy


@contextmanager
def emulated(file: GraphFile) -> Iterator[GraphFile]:
    """A temporary copy that computes every node in float32 and rounds what it gives to the graph's precision.

    That is the arithmetic of a half-precision kernel, which accumulates in float32; onnxruntime's CPU provider has next
    to none for bfloat16. The ports are float32 and carry rounded values.
    """
    model, half = _loaded(file), HALVES[file.dtype]
    rounded = _half_values(_loaded(file, weights=False), half)
    widen(model, half, Known(), ())
    _round(model, half, rounded)
    with _saved(file, model) as copy:
        yield replace(copy, model=file.model, emulated=True)


def half_notes(file: GraphFile) -> list[str]:
    """How a half-precision graph is run, and what its float32 copy cannot undo."""
    if file.dtype not in HALVES:
        return []
    notes = [f"computes in {file.dtype}; scenarios named `…{IN_FLOAT32}` are of a float32 copy with the same weights"]
    if file.dtype == EMULATED:
        notes.append(f"onnxruntime's CPU has no {EMULATED} kernels: nodes run in float32, results are rounded")
    return [f"{file.name}: {note}" for note in notes]


def unknown_tables(file: GraphFile, known: Known, tensors: Mapping[str, LazyTensor]) -> list[Check]:
    """Why a graph has no float32 copy: tables in half precision that are neither the model's nor computed from it.

    What has the shape of a tensor of the model or of a rotary table is taken for one, right or wrong, and compared.
    """
    if file.dtype not in HALVES:
        return []
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(HALVES[file.dtype]))
    shapes = {shape for tensor in tensors.values() for shape in (tensor.shape, tensor.shape[::-1])}
    blank = Check(IN_FLOAT32.removeprefix(", "), file.name, "", verdict="skip")
    return [
        replace(blank, detail=f"`{name}` is {file.dtype} and unknown: a float32 copy would have its rounding")
        for name, content in file.contents.items()
        if content.dtype == kind and not content.matched and content.shape not in shapes
        if not _is_plain(content) and not known.is_rotary(content.shape)
    ]


def _is_plain(content: Content) -> bool:
    """Whether all values are equal, such as zeros."""
    values = content.read()
    return bool((values == values.ravel()[0]).all())


def _weights(file: GraphFile) -> set[str]:
    return {name for name, content in file.contents.items() if content.names}


def _loaded(file: GraphFile, *, weights: bool = True) -> onnx.ModelProto:
    """The graph without functions of its own."""
    model = onnx.load(file.path, load_external_data=weights)
    return inliner.inline_local_functions(model) if model.functions else model


@contextmanager
def _saved(file: GraphFile, model: onnx.ModelProto) -> Iterator[GraphFile]:
    with TemporaryDirectory(prefix="llmconv-float32-") as folder:
        path = Path(folder) / file.path.name
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        yield replace(file, path=path, model=onnx.load(path, load_external_data=False))


# --- types ------------------------------------------------------------------------------------------------------------


def widen(model: onnx.ModelProto, half: int, known: Known, weights: Iterable[str]) -> None:
    """Turns one half-precision type into float32 wherever it stands; the other one stays, as a fault would.

    Args:
        weights: initializers that are tensors of the model: their values are what they are.
    """
    kept = set(weights)
    for graph in graphs(model.graph):
        del graph.value_info[:]
        for port in [*graph.input, *graph.output]:
            kind = port.type.tensor_type
            kind.elem_type = TensorProto.FLOAT if kind.elem_type == half else kind.elem_type
        for tensor in graph.initializer:
            _widen_tensor(tensor, half, Known() if tensor.name in kept else known)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES:
                    attribute.i = TensorProto.FLOAT if attribute.i == half else attribute.i
                elif attribute.type == onnx.AttributeProto.TENSOR:
                    _widen_tensor(attribute.t, half, known)


def _widen_tensor(tensor: onnx.TensorProto, half: int, known: Known) -> None:
    if tensor.data_type == half:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(known.restored(values), tensor.name))


# --- rounding ---------------------------------------------------------------------------------------------------------


def _half_values(model: onnx.ModelProto, half: int) -> set[str]:
    """Names of all values of that type; where onnx knows no rule for an operator, its result is as its first input."""
    types: dict[str, int] = {}
    for graph in graphs(shape_inference.infer_shapes(model).graph):
        ports = [*graph.input, *graph.output, *graph.value_info]
        types |= {port.name: port.type.tensor_type.elem_type for port in ports if port.type.tensor_type.elem_type}
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            first = next((types[name] for name in node.input if types.get(name) in {half, TensorProto.FLOAT}), 0)
            for name in node.output:
                types.setdefault(name, first)
    return {name for name, kind in types.items() if kind == half}


def _round(model: onnx.ModelProto, half: int, values: set[str]) -> None:
    """Puts a cast to `half` and back behind every node, and every input, that gives one of the values."""
    given = {port.name for port in model.graph.input} & values
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        renamed = {name: f"{name}:rounded" for name in given}
        if graph is model.graph:
            nodes += [node for name in sorted(given) for node in _pair(name, renamed[name], half)]
        for node in graph.node:
            new = onnx.NodeProto.FromString(node.SerializeToString())
            new.input[:] = [renamed.get(name, name) for name in new.input]
            nodes.append(new)
            if node.op_type in MOVING and not node.domain:
                continue
            for at, name in enumerate(node.output):
                if name and name in values:
                    new.output[at] = f"{name}:exact"
                    nodes += _pair(new.output[at], name, half)
        del graph.node[:]
        graph.node.extend(nodes)


def _pair(source: str, target: str, half: int) -> list[onnx.NodeProto]:
    low = f"{target}:half"
    return [
        helper.make_node("Cast", [source], [low], name=f"{target}:narrow", to=half),
        helper.make_node("Cast", [low], [target], name=f"{target}:widen", to=TensorProto.FLOAT),
    ]
