"""Copies of float16 and bfloat16 graphs: one that computes in float32, and one that rounds after every node.

Half precision hides small faults: an epsilon, a variant of GELU, or rotary angles of too few bits change less than its
rounding. So such a graph is compared twice: unchanged, with the rounding noise of the model in that precision, and as a
copy that computes in float32 with the same weights, with the noise of float32.
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
from llmconv.verify.other_exporters.content_matching import InitializerContent
from llmconv.verify.other_exporters.graph_file import GraphFile
from llmconv.verify.other_exporters.half_precision.known_constants import KnownConstants
from llmconv.verify.results.report import Check

HALF_PRECISION = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
WITHOUT_KERNELS = "bfloat16"
"""The dtype for which onnxruntime's CPU provider has almost no kernels."""

IN_FLOAT32 = ", in float32"
"""Suffix of the scenarios of the float32 copy."""

ROUNDED = ", every value rounded"
"""Suffix of the scenarios of the copy that rounds after every node."""

TYPE_ATTRIBUTES = {"to", "dtype", "stash_type", "output_dtype", "softmax_precision"}
COPYING = {
    *("Reshape", "Transpose", "Slice", "Gather", "Concat", "Unsqueeze", "Squeeze", "Expand", "Split", "Identity"),
    *("Where", "Flatten", "Tile", "Pad", "Neg", "Max", "Min", "Relu", "If", "Loop", "ScatterND", "GatherND"),
}
"""Operators whose results are rounded if their inputs are."""


@contextmanager
def float32_copy(file: GraphFile, known: KnownConstants) -> Iterator[GraphFile]:
    """Context with a temporary copy of a graph in which float32 replaces the half-precision dtype.

    Args:
        file: the graph.
        known: numbers that half-precision constants may be roundings of.
    """
    model = _loaded(file)
    widen(model, HALF_PRECISION[file.dtype], known, _weights(file))
    with _saved(file, model) as copy:
        yield copy


@contextmanager
def rounding_copy(file: GraphFile) -> Iterator[GraphFile]:
    """Context with a temporary copy that computes every node in float32 and rounds the result to half precision.

    Half-precision kernels, which accumulate in float32, have the same arithmetic; onnxruntime's CPU provider has almost
    none for bfloat16. Inputs and outputs are float32 with rounded values.
    """
    model, dtype = _loaded(file), HALF_PRECISION[file.dtype]
    rounded = _half_precision_values(_loaded(file, weights=False), dtype)
    widen(model, dtype, KnownConstants(), ())
    _round(model, dtype, rounded)
    with _saved(file, model) as copy:
        yield replace(copy, model=file.model, emulated=True)


def half_precision_notes(file: GraphFile) -> list[str]:
    """Notes for the report on how a half-precision graph is run."""
    if file.dtype not in HALF_PRECISION:
        return []
    notes = [f"computes in {file.dtype}; scenarios named `…{IN_FLOAT32}` use a float32 copy with the same weights"]
    if file.dtype == WITHOUT_KERNELS:
        notes.append(f"onnxruntime's CPU has no {WITHOUT_KERNELS} kernels: nodes run in float32, results are rounded")
    return [f"{file.name}: {note}" for note in notes]


def unknown_tables(file: GraphFile, known: KnownConstants, tensors: Mapping[str, LazyTensor]) -> list[Check]:
    """Skipped checks for half-precision tables of unknown content, with which a float32 copy is not possible.

    Initializers with the shape of a model tensor or of a rotary table are assumed to be one, and are compared.

    Args:
        file: the graph.
        known: constants of the model.
        tensors: tensors of the model by name.
    """
    if file.dtype not in HALF_PRECISION:
        return []
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(HALF_PRECISION[file.dtype]))
    shapes = {shape for tensor in tensors.values() for shape in (tensor.shape, tensor.shape[::-1])}
    blank = Check(IN_FLOAT32.removeprefix(", "), file.name, "", verdict="skip")
    return [
        replace(
            blank, detail=f"the content of `{name}` ({file.dtype}) is unknown: a float32 copy would keep its rounding"
        )
        for name, content in file.contents.items()
        if content.dtype == kind and not content.matched and content.shape not in shapes
        if not _is_constant(content) and not known.is_rotary(content.shape)
    ]


def _is_constant(content: InitializerContent) -> bool:
    """Whether all values are equal."""
    values = content.read()
    return bool((values == values.ravel()[0]).all())


def _weights(file: GraphFile) -> set[str]:
    return {name for name, content in file.contents.items() if content.names}


def _loaded(file: GraphFile, *, weights: bool = True) -> onnx.ModelProto:
    """The graph with its functions inlined."""
    model = onnx.load(file.path, load_external_data=weights)
    return inliner.inline_local_functions(model) if model.functions else model


@contextmanager
def _saved(file: GraphFile, model: onnx.ModelProto) -> Iterator[GraphFile]:
    with TemporaryDirectory(prefix="llmconv-float32-") as folder:
        path = Path(folder) / file.path.name
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        yield replace(file, path=path, model=onnx.load(path, load_external_data=False))


# --- types ------------------------------------------------------------------------------------------------------------


def widen(model: onnx.ModelProto, half: int, known: KnownConstants, weights: Iterable[str]) -> None:
    """Replaces one half-precision dtype by float32 in a graph; the other one would be a fault and stays.

    Args:
        model: the graph, changed in place.
        half: the half-precision element type.
        known: numbers that constants may be roundings of.
        weights: initializers that are tensors of the model, whose values are exact.
    """
    kept = set(weights)
    for graph in graphs(model.graph):
        del graph.value_info[:]
        for info in [*graph.input, *graph.output]:
            kind = info.type.tensor_type
            kind.elem_type = TensorProto.FLOAT if kind.elem_type == half else kind.elem_type
        for tensor in graph.initializer:
            _widen_tensor(tensor, half, KnownConstants() if tensor.name in kept else known)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES:
                    attribute.i = TensorProto.FLOAT if attribute.i == half else attribute.i
                elif attribute.type == onnx.AttributeProto.TENSOR:
                    _widen_tensor(attribute.t, half, known)


def _widen_tensor(tensor: onnx.TensorProto, half: int, known: KnownConstants) -> None:
    if tensor.data_type == half:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(known.restored(values), tensor.name))


# --- rounding ---------------------------------------------------------------------------------------------------------


def _half_precision_values(model: onnx.ModelProto, half: int) -> set[str]:
    """Names of all values of a dtype; an operator unknown to onnx is assumed to keep that of its first input."""
    types: dict[str, int] = {}
    for graph in graphs(shape_inference.infer_shapes(model).graph):
        infos = [*graph.input, *graph.output, *graph.value_info]
        types |= {info.name: info.type.tensor_type.elem_type for info in infos if info.type.tensor_type.elem_type}
        types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
        for node in graph.node:
            first = next((types[name] for name in node.input if types.get(name) in {half, TensorProto.FLOAT}), 0)
            for name in node.output:
                types.setdefault(name, first)
    return {name for name, kind in types.items() if kind == half}


def _round(model: onnx.ModelProto, half: int, values: set[str]) -> None:
    """Inserts casts to `half` and back after every node and every input that returns one of the values."""
    inputs = {info.name for info in model.graph.input} & values
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        renamed = {name: f"{name}:rounded" for name in inputs}
        if graph is model.graph:
            nodes += [node for name in sorted(inputs) for node in _rounding_casts(name, renamed[name], half)]
        for node in graph.node:
            new = onnx.NodeProto.FromString(node.SerializeToString())
            new.input[:] = [renamed.get(name, name) for name in new.input]
            nodes.append(new)
            if node.op_type in COPYING and not node.domain:
                continue
            for at, name in enumerate(node.output):
                if name and name in values:
                    new.output[at] = f"{name}:exact"
                    nodes += _rounding_casts(new.output[at], name, half)
        del graph.node[:]
        graph.node.extend(nodes)


def _rounding_casts(source: str, target: str, half: int) -> list[onnx.NodeProto]:
    low = f"{target}:half"
    return [
        helper.make_node("Cast", [source], [low], name=f"{target}:narrow", to=half),
        helper.make_node("Cast", [low], [target], name=f"{target}:widen", to=TensorProto.FLOAT),
    ]
