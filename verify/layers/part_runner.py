"""PartRunner: runs parts of a graph by themselves, each in sessions of its own that are closed afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from llmconv.errors import LlmconvError, MalformedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.low_memory.graph_pieces import ValueTypes, cut_graph, values_read_by
from llmconv.runtime.low_memory.pieced_graph import DeclaredValue, open_piece
from llmconv.runtime.low_memory.split_products import split_products
from llmconv.runtime.onnxruntime.device import INPUT_DTYPES
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.process_heap import trim
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import Array


class PartRunner:
    """Runs parts of a graph on values that are given or that other parts computed.

    Args:
        model: the graph without its weights.
        folder: the folder of its weights.
        settings: of onnxruntime.
        limit: maximum size of the weights in memory, in bytes of float32; a single larger matrix is allowed.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path, settings: SessionSettings, limit: int) -> None:
        self._model, self._folder, self._limit = model, folder, limit
        self._settings = replace(settings, arena=False)
        self._nodes = list(model.graph.node)
        declared = [DeclaredValue.of(port) for port in model.graph.input]
        self._types: ValueTypes = {port.name: (port.type, port.shape) for port in declared}
        self._values: dict[str, ort.OrtValue] = {}

    def feed(self, given: Mapping[str, Array], like: str = "") -> None:
        """Sets values; floats are cast to the dtype of the value.

        Args:
            given: by name.
            like: a known value of the same type, for values that no part has computed.
        """
        for name, array in given.items():
            if name not in self._types and like in self._types:
                self._types = {**self._types, name: self._types[like]}
            kind = self._types[name][0] if name in self._types else ""
            dtype = INPUT_DTYPES.get(kind, array.dtype)
            with np.errstate(over="ignore"):  # after a layer that overflows, the hidden state is infinite
                self._values[name] = as_input(array, dtype)

    def run(self, nodes: Collection[int], outputs: Sequence[str]) -> dict[str, Array]:
        """Runs a part; its outputs can be read by other parts.

        Args:
            nodes: indices of its nodes.
            outputs: the values to compute.

        Raises:
            MalformedInput: onnxruntime cannot run it.
        """
        part = self._part(nodes, outputs)
        split_products(part, self._limit)
        try:
            for piece in cut_graph(part, self._limit):
                session = open_piece(piece, self._types, self._folder, self._settings, self._limit)
                self._types |= {arg.name: (arg.type, arg.shape) for arg in session.get_outputs()}
                feeds = {name: self._values[name] for name in piece.inputs}
                self._values |= zip(piece.outputs, session.run_with_ort_values(piece.outputs, feeds), strict=True)
                del session
                trim()
        except LlmconvError:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise_if_out_of_memory(error, "in a layer of a graph")
            raise MalformedInput(
                f"a layer fails in onnxruntime: {first_line(error)}", hint="run `llmconv verify --method whole`"
            ) from error
        return {name: self._values[name].numpy() for name in outputs}

    def _part(self, nodes: Collection[int], outputs: Sequence[str]) -> onnx.ModelProto:
        """The nodes as a graph of their own, which reads the values that other nodes computed."""
        model = onnx.ModelProto(ir_version=self._model.ir_version, opset_import=self._model.opset_import)
        model.functions.extend(self._model.functions)
        chosen = [self._nodes[at] for at in sorted(nodes)]
        read = {name for node in chosen for name in values_read_by(node)}
        model.graph.node.extend(chosen)
        model.graph.initializer.extend(tensor for tensor in self._model.graph.initializer if tensor.name in read)
        model.graph.input.extend(port for port in self._model.graph.input if port.name in read)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return model
