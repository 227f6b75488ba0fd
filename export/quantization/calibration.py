"""Importance of the columns of weights: the mean square of the activations of each, measured on a text.

The model's own float32 graph runs on the text in pieces (`runtime.low_memory.graph_pieces`), so that the weights of one
piece are in memory at a time, and returns, instead of logits, the sum of squares of the other factor of every product.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from llmconv.errors import InputRefused, UnsupportedInput, first_line
from llmconv.export.quantization.selection import product_layout
from llmconv.export.traced_graph import NodeEditor, TracedGraph, integers, producer, remove_unused
from llmconv.export.weights import StoredRows, WeightSource, bind, leaves, match_weights
from llmconv.files.weight_ranges import Mapped
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.onnxruntime.guard import refill
from llmconv.tensors import Array

if TYPE_CHECKING:  # onnxruntime, which codes that a model has already do without
    import onnxruntime as ort

    from llmconv.runtime.low_memory.pieced_graph import GraphPiece, ValueTypes

PIECE_BYTES = 256 << 20  # maximum size of the weights of a piece in float32
PREFIX = "columns:"  # names of the outputs with a number per column; the rest is the label of the stored rows

Reduction = Callable[[NodeEditor, ir.Value], ir.Value]  # inserts nodes that reduce values [tokens, K] to numbers [K]


@dataclass(frozen=True)
class TextRun:
    """A text that runs through the model's float32 graph, which has a growing cache and its weights still inputs.

    `tensors` are in files of one folder, `texts` token ids int64 [1, tokens]. What runs raises UnsupportedInput: the
    graph takes embeddings, or onnxruntime cannot map the weights; OutOfMemory: memory ran out.
    """

    traced: TracedGraph
    texts: Sequence[Array]
    tensors: Mapping[str, Mapped]

    @cached_property
    def matches(self) -> Mapping[str, WeightSource]:
        return match_weights(self.traced, self.tensors)

    @property
    def folder(self) -> Path:
        return next(iter(self.tensors.values())).path.parent

    @property
    def rows(self) -> dict[str, StoredRows]:
        return {leaf.label: leaf for match in self.matches.values() for leaf in leaves(match)}

    def bound(self, option: str = "--calibrate") -> TracedGraph:
        """A copy of the graph that maps the weights; an error says to leave out the option."""
        if self.traced.spec.embeddings:
            raise UnsupportedInput(
                "`--calibrate` needs graphs that take tokens, not embeddings", hint=f"leave out `{option}`"
            )
        copy = self.traced.copy()
        bind(copy, self.matches, self.tensors)
        return copy

    def reduced(self, reduction: Reduction, wanted: Container[str] | None = None) -> Iterator[tuple[str, Array]]:
        """Label of every multiplied matrix, and its activations on a text, reduced over all tokens; text by text.

        `wanted` are labels of matrices, None for all.
        """
        for name, found in self.outputs(_observing(self.bound().model, reduction, wanted)):
            yield name.removeprefix(PREFIX), found

    def outputs(self, model: onnx.ModelProto) -> Iterator[tuple[str, Array]]:
        """Name and value of every output of a bound graph for every text, one piece of the graph after the other."""
        wanted = {info.name for info in model.graph.output}
        for step in self.steps(model, PIECE_BYTES):
            for state, made in zip(step.states, step.run(step.piece.outputs), strict=True):
                yield from ((name, value.numpy()) for name, value in made.items() if name in wanted)
                step.pass_on(state, made)

    def steps(self, model: onnx.ModelProto, most: int) -> Iterator[PieceOfText]:
        """The pieces of a bound graph in order, cut at `most` bytes of weights; each passes on what later ones read."""
        from llmconv.runtime.low_memory.pieced_graph import cut_graph  # noqa: PLC0415 - onnxruntime, as above

        states = [start_values(model, text) for text in self.texts]
        types = input_types(model)
        pieces = cut_graph(model, most)
        for at, piece in enumerate(pieces):
            later = {name for one in pieces[at + 1 :] for name in one.inputs}
            yield PieceOfText(piece, states, later, types, self.folder)


@dataclass(frozen=True)
class PieceOfText:
    """A piece of a graph, and the values by name that enter it, for every text."""

    piece: GraphPiece
    states: Sequence[dict[str, ort.OrtValue]]
    later: Container[str]  # names of the values that later pieces read
    types: ValueTypes
    folder: Path

    def run(
        self, names: Sequence[str], weights: Mapping[str, Array] = MappingProxyType({})
    ) -> Iterator[dict[str, ort.OrtValue]]:
        """The named outputs for every text, with other values of some `weights`.

        Raises UnsupportedInput: onnxruntime cannot run it; OutOfMemory: memory ran out.
        """
        import onnxruntime as ort  # noqa: PLC0415 - as above

        built = self.piece.build(self.types)
        replaced = [tensor for tensor in built.graph.initializer if tensor.name in weights]
        given = {one.name: ort.OrtValue.ortvalue_from_numpy(weights[one.name]) for one in replaced}
        for tensor in replaced:
            port = onnx.helper.make_tensor_value_info(tensor.name, onnx.TensorProto.FLOAT, tensor.dims)
            built.graph.input.append(port)
            built.graph.initializer.remove(tensor)
        refill(built.graph.output, [output for output in built.graph.output if output.name in names])
        session = open_piece(built, self.folder)
        self.types.update({arg.name: (arg.type, arg.shape) for arg in session.get_outputs()})
        wanted = {arg.name for arg in session.get_inputs()}
        for state in self.states:
            feeds = {name: value for name, value in {**state, **given}.items() if name in wanted}
            try:
                made = session.run_with_ort_values(names, feeds)
            except Exception as error:  # onnxruntime's exceptions share no base class of their own
                raise_if_out_of_memory(error, "while the text was run")
                problem = f"onnxruntime cannot run the text through the model: {first_line(error)}"
                raise UnsupportedInput(problem, hint="leave out `--calibrate`") from error
            yield dict(zip(names, made, strict=True))

    def pass_on(self, state: dict[str, ort.OrtValue], made: Mapping[str, ort.OrtValue]) -> None:
        """Makes the state of a text what later pieces read of it and of the outputs of this one."""
        kept = {name: value for name, value in {**state, **made}.items() if name in self.later}
        state.clear()
        state.update(kept)


def column_sums(run: TextRun) -> dict[str, Array]:
    """Sums of the squares and of the magnitudes of each column that a matrix multiplies: label to float64 [2, K]."""
    sums: dict[str, Array] = {}

    def both(editor: NodeEditor, values: ir.Value) -> ir.Value:
        axis = integers(editor.graph, 0)
        squares = editor.one("ReduceSumSquare", [values, axis], {"keepdims": 0})
        magnitudes = editor.one("ReduceSum", [editor.one("Abs", [values]), axis], {"keepdims": 0})
        return editor.one("Concat", [squares, magnitudes], {"axis": 0})

    for label, found in run.reduced(both):
        sums[label] = sums.get(label, 0) + found.astype(np.float64).reshape(2, -1)
    return sums


def column_importance(run: TextRun, sums: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Importance by name of the stored tensor: float32 [K], or [experts, K] of a stack; around 1 on average.

    `sums` are the `column_sums` if they are known.
    """
    known = column_sums(run) if sums is None else sums
    return _by_tensor({label: found[0] for label, found in known.items()}, run.rows)


def largest_of(found: Iterable[tuple[str, Array]]) -> dict[str, Array]:
    """The elementwise largest of the arrays of each name."""
    largest: dict[str, Array] = {}
    for name, values in found:
        largest[name] = np.maximum(largest[name], values) if name in largest else values
    return largest


def require_finite(name: str, values: Array) -> None:
    """Raises InputRefused if `values`, from activations that matrix `name` multiplies, are not all finite."""
    if not np.isfinite(values).all():
        raise InputRefused(
            f"`{name}` is multiplied with values that are not finite on the text",
            hint="check the model, or leave out `--calibrate`",
        )


def _observing(model: ir.Model, reduction: Reduction, wanted: Container[str] | None) -> onnx.ModelProto:
    """The graph with reduced inputs of products as its only outputs."""
    graph = model.graph
    reduced: dict[ir.Value, ir.Value] = {}
    outputs: dict[str, ir.Value] = {}
    for node in list(graph):
        if product_layout(node) is None or node.inputs[0] is None:
            continue
        label = label_of(node.inputs[1])
        if label and PREFIX + label not in outputs and (wanted is None or label in wanted):
            left = node.inputs[0]
            if left not in reduced:
                editor = NodeEditor(graph, node, f"columns/{len(reduced)}")
                reduced[left] = reduction(editor, as_matrix(editor, left))
            copy = NodeEditor(graph, node, f"columns/{label}").one("Identity", [reduced[left]])
            copy.name = PREFIX + label
            outputs[copy.name] = copy
    for value in outputs.values():
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None])
    graph.outputs[:] = list(outputs.values())
    remove_unused(model)
    return ir.to_proto(model)


def as_matrix(editor: NodeEditor, values: ir.Value) -> ir.Value:
    """Values [..., K] as [tokens, K]."""
    width = editor.one("Shape", [values], {"start": -1})
    shape = editor.one("Concat", [integers(editor.graph, -1), width], {"axis": 0})
    return editor.one("Reshape", [values, shape])


def label_of(value: ir.Value | None) -> str:
    """The label of the stored rows that a factor is, or is cast or transposed from; empty for others."""
    while value is not None and (node := producer(value, "Cast", "Transpose")):
        value = node.inputs[0]
    is_stored = value is not None and isinstance(value.const_value, ir.ExternalTensor)
    return (value.name or "") if is_stored and value is not None else ""


def input_types(model: onnx.ModelProto) -> ValueTypes:
    types: ValueTypes = {}
    for info in model.graph.input:
        axes = [axis.dim_param or axis.dim_value for axis in info.type.tensor_type.shape.dim]
        is_integer = info.type.tensor_type.elem_type == onnx.TensorProto.INT64
        types[info.name] = ("tensor(int64)" if is_integer else "tensor(float)", axes)
    return types


def open_piece(piece: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    """A session of a part of the graph, which maps weights in `folder`.

    Raises UnsupportedInput: onnxruntime cannot map the weights; OutOfMemory: memory ran out.
    """
    import onnxruntime as ort  # noqa: PLC0415 - as above

    from llmconv.runtime.onnxruntime.packed_cache import WEIGHTS_FOLDER, followed  # noqa: PLC0415 - as above
    from llmconv.runtime.onnxruntime.session_settings import SessionSettings  # noqa: PLC0415 - as above

    options = SessionSettings(arena=False).options()
    linked, home = followed(piece, folder.resolve())
    options.add_session_config_entry(WEIGHTS_FOLDER, str(home))
    content = linked.SerializeToString()
    try:
        return ort.InferenceSession(content, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise_if_out_of_memory(error, "while the text was run")
        raise UnsupportedInput(
            f"onnxruntime cannot open the model's weights in `{folder}`: {first_line(error)}",
            hint="if they are links, copy the folder with `cp -rL`; or leave out `--calibrate`",
        ) from error


def start_values(model: onnx.ModelProto, text: Array) -> dict[str, ort.OrtValue]:
    import onnxruntime as ort  # noqa: PLC0415 - as above

    positions = np.arange(text.shape[1], dtype=np.int64)[None]
    tokens = {"input_ids": text, "attention_mask": np.ones_like(text), "position_ids": positions}
    made: dict[str, Array] = {}
    for info in model.graph.input:
        axes = info.type.tensor_type.shape.dim
        sizes = [axis.dim_value or (1 if at == 0 else 0) for at, axis in enumerate(axes)]
        made[info.name] = tokens[info.name] if info.name in tokens else np.zeros(sizes, np.float32)
    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in made.items()}


def _by_tensor(sums: Mapping[str, Array], rows: Mapping[str, StoredRows]) -> dict[str, Array]:
    """Sums of squares by tensor: those of row ranges added, those of a stack's matrices one below the other."""
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for label, squares in sums.items():
        name, _, part = label.partition("[")
        index = part.rstrip("]")
        known = rows.get(label)
        if index.isdigit() and (known is None or known.single):
            stacks.setdefault(name, {})[int(index)] = squares
        else:
            found[name] = found.get(name, 0) + squares
    for name, by_index in stacks.items():
        found[name] = np.stack([by_index[index] for index in sorted(by_index)])
    return {name: scaled(squares) for name, squares in found.items()}


def scaled(squares: Array) -> Array:
    """Sums divided by their mean; all 1 where nothing was seen, as for an expert that no token chose."""
    mean = squares.mean(axis=-1, keepdims=True)
    seen = np.isfinite(mean) & (mean > 0)
    return np.where(seen, squares / np.where(seen, mean, 1), 1).astype(np.float32)
