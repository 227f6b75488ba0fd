"""GraphPiece: a graph is cut into pieces that run one after another, so that only the weights of one are in memory.

Graphs compute in float32 with weights of any dtype: they cast each initializer, and onnxruntime folds the cast when it
opens a session. For a whole graph it would hold a float32 copy of every weight. A piece is opened, run for all calls,
and closed. Cuts lie between nodes in the graph's order; a node that depends on weights only goes where it is used.

PiecedGraph runs the pieces. Products with large matrices are split into products with blocks of their rows, which fit
into memory. The columns of a product are independent of each other, so the numbers are those of the whole product, up
to the order in which a kernel sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from llmconv.errors import UnsupportedInput
from llmconv.memory import trim
from llmconv.output.manifest import GraphEntry
from llmconv.runtime.extra_inputs import ModelCall, is_past, is_present, is_state, layer_of, past_of
from llmconv.runtime.low_memory.weights import (
    LOW_MEMORY_HINT,
    PlannedCall,
    PrecomputedRunner,
    SpilledArray,
    SpilledCache,
    SpillFile,
)
from llmconv.runtime.onnxruntime.graph import (
    LENGTH_AXIS,
    OrtCache,
    OrtGraph,
    outer_inputs,
    outer_outputs,
    refusing,
    step_of,
)
from llmconv.runtime.onnxruntime.guard import (
    attributes,
    external_fields,
    is_external,
    load_guarded,
    nodes,
    refill,
    values_read_by,
)
from llmconv.runtime.onnxruntime.lora_names import declared_factors
from llmconv.runtime.onnxruntime.packed_cache import WEIGHTS_FOLDER, followed
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import (
    INPUT_DTYPES,
    TENSOR_DTYPES,
    Device,
    GraphTransform,
    SessionSettings,
    as_array,
)
from llmconv.runtime.onnxruntime.shared_buffers import as_input
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Step

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
CODES = {TensorProto.INT8, TensorProto.UINT8}
TYPES = {kind: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for kind, dtype in INPUT_DTYPES.items()}
# onnxruntime's type name and the shape of values, by value name
ValueTypes = dict[str, tuple[str, Sequence[int | str | None]]]


@dataclass(frozen=True)
class GraphPiece:
    """Consecutive nodes of a graph."""

    model: onnx.ModelProto
    nodes: tuple[onnx.NodeProto, ...]  # nodes of this piece, including those that compute its constants
    inputs: tuple[str, ...]  # values from earlier pieces, or graph inputs
    outputs: tuple[str, ...]  # values that later pieces use, or graph outputs
    weight_bytes: int  # size of the weights in float32
    shapes_only: frozenset[str]  # inputs whose shape alone is used

    def build(self, types: ValueTypes) -> onnx.ModelProto:
        """The piece as a separate graph; `types` has an entry for every input."""
        built = onnx.ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import)
        built.functions.extend(self.model.functions)
        graph = built.graph
        graph.name = self.model.graph.name or "piece"
        graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in values_read_by(node)}
        graph.initializer.extend(tensor for tensor in self.model.graph.initializer if tensor.name in used)
        for name in self.inputs:
            kind, shape = types[name]
            graph.input.append(onnx.helper.make_tensor_value_info(name, TYPES[kind], shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.outputs)  # onnxruntime infers the type
        return built


def cut_graph(model: onnx.ModelProto, limit: int) -> list[GraphPiece]:
    """The pieces of a graph, each with weights of at most `limit` bytes in float32, or one node with larger ones."""
    return _GraphCutter(model, limit).pieces()


class _GraphCutter:
    def __init__(self, model: onnx.ModelProto, limit: int) -> None:
        self._model, self._limit = model, limit
        self._sizes = {tensor.name: _float_bytes(tensor) for tensor in model.graph.initializer}
        constant = {*self._sizes, ""}
        wanted = {info.name for info in model.graph.output}
        self._producers: dict[str, int] = {}
        self._live: list[onnx.NodeProto] = []
        nodes = list(model.graph.node)
        for at, node in enumerate(nodes):
            if values_read_by(node) <= constant and not wanted & set(node.output):
                constant |= set(node.output)
                self._producers |= dict.fromkeys(node.output, at)
            else:
                self._live.append(node)
        self._nodes, self._constant = nodes, constant

    def pieces(self) -> list[GraphPiece]:
        # node indices at which all pieces but the last end
        inside = self._inside_layers()
        ends: list[int] = []
        current: set[str] = set()
        allowed = start = 0
        for at, node in enumerate(self._live):
            if at not in inside:
                allowed = at
            current |= self._weights(node)
            if self._bytes(current) > self._limit and allowed > start:
                ends.append(allowed)
                start = allowed
                current = {name for one in self._live[start : at + 1] for name in self._weights(one)}
        return [self._piece(start, stop) for start, stop in zip([0, *ends], [*ends, len(self._live)], strict=True)]

    def _inside_layers(self) -> set[int]:
        """Nodes between a layer's past and its present; no cut is there: a call needs the whole present of the last."""
        indices: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(self._live):
            past = {name for name in values_read_by(node) if is_past(name)} if node.op_type != "Shape" else set()
            for name in past | {name for name in node.output if is_present(name)}:
                indices[layer_of(name) or 0].append(at)
        return {at for found in indices.values() for at in range(min(found) + 1, max(found) + 1)}

    def _piece(self, start: int, stop: int) -> GraphPiece:
        mine = self._live[start:stop]
        constants = {at for node in mine for at in self._needed(node)}
        nodes = _gathered_first([*(self._nodes[at] for at in sorted(constants)), *mine], self._large())
        made = {name for node in mine for name in node.output}
        read = [name for node in mine for name in values_read_by(node)]
        inputs = tuple(dict.fromkeys(name for name in read if name not in made | self._constant))
        later = {name for node in self._live[stop:] for name in values_read_by(node)}
        later |= {info.name for info in self._model.graph.output}
        seen = {name for node in mine if node.op_type != "Shape" for name in values_read_by(node)}
        return GraphPiece(
            self._model,
            tuple(nodes),
            inputs,
            tuple(name for node in mine for name in node.output if name in later),
            self._bytes({name for node in mine for name in self._weights(node)}),
            frozenset(set(inputs) - seen),
        )

    def _large(self) -> set[str]:
        return {name for name, size in self._sizes.items() if size > self._limit}

    def _needed(self, node: onnx.NodeProto) -> set[int]:
        """Indices of the nodes that compute the constants of a node."""
        found: set[int] = set()
        open_names = list(values_read_by(node))
        while open_names:
            if (at := self._producers.get(open_names.pop())) is not None and at not in found:
                found.add(at)
                open_names += values_read_by(self._nodes[at])
        return found

    def _weights(self, node: onnx.NodeProto) -> set[str]:
        """The initializers that a node depends on, except large tables of which it gathers rows."""
        nodes = [node, *(self._nodes[at] for at in self._needed(node))]
        names = {name for one in nodes for name in values_read_by(one) if name in self._sizes}
        return names - self._large() if node.op_type == "Gather" else names

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._sizes[name] for name in names)


def _gathered_first(nodes: Sequence[onnx.NodeProto], large: set[str]) -> list[onnx.NodeProto]:
    """Moves casts of a large table after the Gather of its rows: the same values, without a copy of the table."""
    casts = {node.output[0]: node for node in nodes if node.op_type == "Cast" and node.input[0] in large}
    found: list[onnx.NodeProto] = []
    for node in nodes:
        cast = casts.get(node.input[0]) if node.op_type == "Gather" else None
        if cast is None:
            found.append(node)
            continue
        rows, after = onnx.NodeProto(), onnx.NodeProto()
        rows.CopyFrom(node)
        after.CopyFrom(cast)
        rows.input[0], rows.output[0] = cast.input[0], f"{node.output[0]}:stored"
        after.input[0], after.output[0], after.name = rows.output[0], node.output[0], f"{node.name}/Cast"
        found += [rows, after]
    used = {name for node in found for name in values_read_by(node)}
    return [node for node in found if node.output[0] not in casts or node.output[0] in used]


def _float_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of an initializer as float32; codes of 8 bits count alike, since onnxruntime copies them to pack them."""
    wide = tensor.data_type in FLOATS or tensor.data_type in CODES
    return int(prod(tensor.dims)) * (4 if wide else onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


PIECE_BYTES = 1 << 30  # maximum size of the weights of a piece, in bytes of float32; a single larger matrix is allowed
KINDS = {int(number): name for name, number in TYPES.items()}
Values = dict[str, ort.OrtValue]


@dataclass(frozen=True)
class DeclaredValue:
    """An input or output in the form of `onnxruntime.NodeArg`."""

    name: str
    type: str
    shape: list[int | str]

    @classmethod
    def of(cls, info: onnx.ValueInfoProto) -> DeclaredValue:
        tensor = info.type.tensor_type
        axes = [axis.dim_param or axis.dim_value for axis in tensor.shape.dim]
        return cls(info.name, KINDS.get(tensor.elem_type, f"type {tensor.elem_type}"), axes)


class DeclaredGraph:
    """The inputs and outputs of a graph (`paths`: of its stages) in the form of `SessionChain`, without a session."""

    def __init__(self, paths: Sequence[Path], change: GraphTransform | None = None) -> None:
        self.models = [load_guarded(path) for path in paths]
        if change:
            for path, model in zip(paths, self.models, strict=True):
                change(path, model)
        self.op_types = {node.op_type for model in self.models for node in nodes(model)}
        sides = [(_ports(model, factors=False), model.graph.output) for model in self.models]
        self._stages = [(list(map(DeclaredValue.of, one)), list(map(DeclaredValue.of, two))) for one, two in sides]

    @property
    def last(self) -> Any:
        """Always raises UnsupportedInput: only graphs with a shared cache buffer need the session."""
        raise UnsupportedInput("a graph with a shared cache buffer cannot run in pieces", hint=LOW_MEMORY_HINT)

    takes_start = False

    def device_of(self, name: str) -> Device:
        """As `SessionChain.device_of`: pieces compute on the CPU."""
        return Device()

    def get_inputs(self) -> list[DeclaredValue]:
        return outer_inputs(self._stages)

    def get_outputs(self) -> list[DeclaredValue]:
        return outer_outputs(self._stages)

    def get_factors(self) -> list[DeclaredValue]:
        return [DeclaredValue.of(info) for model in self.models for info in _ports(model, factors=True)]


def _ports(model: onnx.ModelProto, *, factors: bool) -> list[onnx.ValueInfoProto]:
    """The inputs of a graph for LoRA factors, which have a default, or the others."""
    declared = declared_factors(model)
    return [info for info in model.graph.input if (info.name in declared) is factors]


def open_piece(
    piece: GraphPiece, types: ValueTypes, folder: Path, settings: SessionSettings, limit: int
) -> LimitedSession:
    """A session of a piece with inputs of `types`; its weights have at most `limit` bytes in float32."""
    if piece.weight_bytes > limit:  # avoids a second copy of a large matrix
        settings = replace(settings, optimization="disable")
    options = settings.options()
    model, folder = followed(piece.build(types), folder)
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    content = model.SerializeToString()
    return LimitedSession(content, options, ["CPUExecutionProvider"], TimeLimit(piece.weight_bytes, settings.timeout))


class PiecedGraph(OrtGraph):
    """An `OrtGraph`, from its (first) file `path`, that runs all calls on one piece, then on the next.

    `file` stores the results; the weights of a piece have at most `piece_bytes` in float32. Raises MalformedInput if
    `guard` refuses a file, UnsupportedInput for a graph with a shared cache buffer.
    """

    def __init__(
        self,
        path: Path,
        settings: SessionSettings,
        *,
        entry: GraphEntry,
        file: SpillFile,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(path, replace(settings, arena=False), entry=entry)
        self._folder, self._settings = path.parent, replace(settings, arena=False)
        self.precomputed = PrecomputedRunner(self.name, lambda calls: self.run_all(calls, file), file)
        for model in self._session.models:
            split_products(model, piece_bytes)
        self._pieces = [piece for model in self._session.models for piece in cut_graph(model, piece_bytes)]
        self._limit = piece_bytes
        self._dependent = frozenset[str]().union(*map(dependent_values, self._session.models))
        self._present_of = {past_of(name): name for name in self.present_names}

    def _connect(self, paths: Sequence[Path], settings: SessionSettings) -> Any:
        return DeclaredGraph(paths, settings.change)

    def run_call(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        """As `OrtGraph.run`, for tokens only; returns precomputed results if there are any."""
        return self.precomputed.prefill(*call.arrays, past, extras)

    def run_all(self, calls: Sequence[PlannedCall], file: SpillFile | None = None) -> list[Step]:
        """Runs all calls piece by piece; within a piece, a call runs after the call that it continues.

        Keys and values go into a `file` once no later piece reads them.
        """
        values: list[Values] = [self._inputs(call) for call in calls]
        spilled: list[dict[str, SpilledArray]] = [{} for _ in calls]
        types: ValueTypes = {name: (self.types[name], shape) for name, shape in self.inputs.items()}
        wanted = {*self.result_names, *self.present_names}
        for at, piece in enumerate(self._pieces):
            with refusing(self.name, LOW_MEMORY_HINT):
                self._run_piece(piece, calls, values, types)
            trim()
            read = set[str]().union(*(piece.inputs for piece in self._pieces[at + 1 :]))
            if file:
                done = {name for past, name in self._present_of.items() if read.isdisjoint((past, name))}
                for mine, kept in zip(values, spilled, strict=True):
                    kept |= {name: file.put(as_array(mine.pop(name))) for name in done & mine.keys()}
            values = [{name: one for name, one in mine.items() if name in wanted | read} for mine in values]
        values.reverse()
        return [self._result(call, values.pop(), kept) for call, kept in zip(calls, spilled, strict=True)]

    def _run_piece(
        self, piece: GraphPiece, calls: Sequence[PlannedCall], values: list[Values], types: ValueTypes
    ) -> None:
        """Adds the outputs of a piece to the values of every call; the session is closed afterwards.

        What weights alone decide, such as a dequantized block of the head, is computed once for all calls.
        """
        session = open_piece(piece, types, self._folder, self._settings, self._limit)
        types |= {arg.name: (arg.type, arg.shape) for arg in session.get_outputs()}
        is_fixed = self._dependent.isdisjoint(piece.outputs)
        made: Values = {}
        for call, mine in zip(calls, values, strict=True):
            if not (is_fixed and made):
                feeds = {name: self._input(name, piece, call, mine, values) for name in piece.inputs}
                made = dict(zip(piece.outputs, session.run_with_ort_values(piece.outputs, feeds), strict=True))
            mine |= made

    def _inputs(self, call: PlannedCall) -> Values:
        """The inputs of a call: tokens, mask and positions, and the past if it exists already."""
        named = {**call.tokens.named, **self.embed(call.input_ids), **self.extra_values(call.extras).of(call.tokens)}
        values = {name: as_input(array, self._dtypes[name]) for name, array in named.items() if name in self.inputs}
        if call.parent is None:
            values |= zip(self.past_names, self._past_values(call.past, len(call.input_ids)), strict=False)
        return values

    def _input(
        self, name: str, piece: GraphPiece, call: PlannedCall, mine: Values, values: list[Values]
    ) -> ort.OrtValue:
        """An input of a piece; zeros for a past that is not computed yet, if the piece uses only its shape."""
        if name in mine or call.parent is None or name not in self._present_of:
            return mine[name]
        if (made := values[call.parent].get(self._present_of[name])) is not None:
            return made
        shape = [len(call.input_ids), *(axis for axis in self.inputs[name][1:])]
        if not is_state(name):
            shape[LENGTH_AXIS] = call.past_length
        known = [axis for axis in shape if isinstance(axis, int)]
        if name not in piece.shapes_only or len(known) < len(shape):
            problem = f"`{self.name}` reads `{name}` before the layer that it belongs to"
            raise UnsupportedInput(problem, hint=LOW_MEMORY_HINT)
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(known, TENSOR_DTYPES[self.types[name]]))

    def _result(self, call: PlannedCall, values: Values, spilled: dict[str, SpilledArray]) -> Step:
        growing = [name for name in self.present_names if not is_state(name)]
        lengths = [(spilled[name].shape if name in spilled else values[name].shape())[LENGTH_AXIS] for name in growing]
        length = max(lengths, default=call.attention_mask.shape[1])
        present: Cache = SpilledCache(b"", length, {name: spilled[name] for name in self.present_names if spilled})
        if not spilled:
            present = OrtCache(self.present_names, [values[name] for name in self.present_names], length)
        return step_of(self.result_names, [values[name].numpy() for name in self.result_names], present)


def dependent_values(model: onnx.ModelProto) -> set[str]:
    """The values of a graph that depend on its inputs; those of nodes with a graph inside may.

    The size of a value times 0 does not, with which graphs keep onnxruntime from computing weights when a session
    opens. Of other values the product has their shape.
    """
    found, zeros, sizes = {port.name for port in model.graph.input}, set[str](), set[str]()
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].t.data_type == TensorProto.INT64:
            zeros |= set() if np.any(onnx.numpy_helper.to_array(node.attribute[0].t)) else set(node.output)
        elif node.op_type == "Mul" and not zeros.isdisjoint(node.input) and not sizes.isdisjoint(node.input):
            continue
        sizes.update(node.output if node.op_type == "Size" else ())
        if not found.isdisjoint(node.input) or any(attribute.HasField("g") for attribute in node.attribute):
            found.update(node.output)
    return found


class PiecedRunner(OrtRunner):
    """Prompts and steps on one graph in pieces, several calls in one pass over its weights."""

    def __init__(self, graph: PiecedGraph) -> None:
        super().__init__(graph, graph)
        self.run_all, declared = graph.run_all, graph.outputs.get("logits", [0, 0])
        self.last_logits = bool(graph.entry.last_logits) or declared[1] == 1


FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Product:
    """A `Gemm` with a stored matrix [rows, columns], which a `Cast` may convert first."""

    node: onnx.NodeProto
    cast: onnx.NodeProto | None
    matrix: onnx.TensorProto


def split_products(model: onnx.ModelProto, limit: int) -> None:
    """Splits products with matrices larger than `limit` bytes in float32, in place; `model` is without its weights."""
    large = (product for product in _products(model) if prod(product.matrix.dims) * FLOAT_BYTES > limit)
    products = {product.node.output[0]: product for product in large}
    if not products:
        return
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        product = products.get(node.output[0]) if node.output else None
        nodes += _split(model.graph, product, limit) if product else [node]
    used = {name for node in nodes for name in node.input}
    dropped = {product.cast.output[0] for product in products.values() if product.cast}
    refill(model.graph.node, [node for node in nodes if not (node.output and node.output[0] in dropped - used)])


def _products(model: onnx.ModelProto) -> Iterator[_Product]:
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    casts = {node.output[0]: node for node in model.graph.node if node.op_type == "Cast" and node.input[0] in stored}
    for node in model.graph.node:
        if node.op_type != "Gemm" or node.domain or len(node.input) != 2 or attributes(node).get("transB") != 1:
            continue
        cast = casts.get(node.input[1])
        matrix = stored.get(cast.input[0] if cast else node.input[1])
        if matrix is not None and len(matrix.dims) == 2 and is_external(matrix):
            yield _Product(node, cast, matrix)


def _split(graph: onnx.GraphProto, product: _Product, limit: int) -> list[onnx.NodeProto]:
    """The products with blocks of rows, and the concatenation of their results."""
    rows, columns = product.matrix.dims
    step = max(1, limit // (columns * FLOAT_BYTES))
    nodes: list[onnx.NodeProto] = []
    results: list[str] = []
    for start in range(0, rows, step):
        block = _rows(product.matrix, start, min(start + step, rows))
        graph.initializer.append(block)
        matrix = block.name
        if product.cast:
            nodes.append(_copy(product.cast, [block.name], f"{block.name}:cast"))
            matrix = nodes[-1].output[0]
        nodes.append(_copy(product.node, [product.node.input[0], matrix], f"{product.node.output[0]}:{start}"))
        results.append(nodes[-1].output[0])
    whole = helper.make_node("Concat", results, [product.node.output[0]], f"{product.node.name}/Concat", axis=1)
    return [*nodes, whole]


def _copy(node: onnx.NodeProto, inputs: list[str], output: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    copy.input.extend(inputs)
    copy.output.append(output)
    copy.name = f"{node.name}:{output}"
    return copy


def _rows(matrix: onnx.TensorProto, start: int, stop: int) -> onnx.TensorProto:
    """Rows `start:stop` of a matrix, as another range of its file."""
    fields = external_fields(matrix)
    row = int(fields["length"]) // matrix.dims[0]
    fields |= {"offset": str(int(fields.get("offset", 0)) + start * row), "length": str((stop - start) * row)}
    block = onnx.TensorProto(name=f"{matrix.name}[{start}:{stop}]", data_type=matrix.data_type)
    block.dims.extend([stop - start, matrix.dims[1]])
    block.data_location = onnx.TensorProto.EXTERNAL
    for key, value in fields.items():
        block.external_data.add(key=key, value=value)
    return block
