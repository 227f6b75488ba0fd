"""PiecedGraph: a graph whose weights are never all there; see `pieces`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from llmconv.errors import LlmconvError, MalformedInput, UnsupportedInput, first_line
from llmconv.memory import raise_if_out_of_memory
from llmconv.runtime.cache_names import is_state, past_of
from llmconv.runtime.low_memory.graph_pieces import TYPES, Piece, cut
from llmconv.runtime.low_memory.lockstep import HINT
from llmconv.runtime.low_memory.planned_calls import PlannedCall
from llmconv.runtime.low_memory.precomputed import Drawer, Foreseen
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.guard import load_guarded, nodes
from llmconv.runtime.onnxruntime.io_binding import as_input
from llmconv.runtime.onnxruntime.process_heap import trim
from llmconv.runtime.onnxruntime.runner import LENGTH_AXIS, TENSOR_DTYPES, OrtCache, OrtGraph, SessionSettings
from llmconv.runtime.onnxruntime.session_settings import Change
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.runtime.runner import Cache, Step
from llmconv.tensors import Array

PIECE = 1 << 30
"""Bytes of weights in float32 that are there at a time, where no single matrix has more."""

KINDS = {int(number): name for name, number in TYPES.items()}
Values = dict[str, ort.OrtValue]
Ports = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Port:
    """An input or output as onnxruntime would declare it."""

    name: str
    type: str
    shape: list[int | str]

    @classmethod
    def of(cls, info: onnx.ValueInfoProto) -> Port:
        """As the graph declares it."""
        tensor = info.type.tensor_type
        axes = [axis.dim_param or axis.dim_value for axis in tensor.shape.dim]
        return cls(info.name, KINDS.get(tensor.elem_type, f"type {tensor.elem_type}"), axes)


class Declared:
    """What a session says of its graph, without a session.

    Args:
        paths: of the graph, or of its stages in order.
        change: see `SessionSettings`.
    """

    def __init__(self, paths: Sequence[Path], change: Change | None = None) -> None:
        self.models = [load_guarded(path) for path in paths]
        if change:
            for path, model in zip(paths, self.models, strict=True):
                change(path, model)
        self.op_types = {node.op_type for model in self.models for node in nodes(model)}

    @property
    def whole(self) -> Any:
        """There is no session.

        Raises:
            UnsupportedInput: always; only graphs that fill buffers in place ask for it.
        """
        raise UnsupportedInput(
            "a graph that fills buffers in place cannot run in pieces",
            hint=HINT,
        )

    def get_inputs(self) -> list[Port]:
        """As `SessionChain.get_inputs`."""
        made: set[str] = set()
        fed: dict[str, Port] = {}
        for model in self.models:
            for info in model.graph.input:
                if info.name not in made:
                    fed.setdefault(info.name, Port.of(info))
            made |= {port.name for port in model.graph.output}
        return list(fed.values())

    def get_outputs(self) -> list[Port]:
        """As `SessionChain.get_outputs`."""
        taken = {info.name for model in self.models for info in model.graph.input}
        given = [Port.of(info) for model in self.models for info in model.graph.output if info.name not in taken]
        return sorted(given, key=lambda port: port.name.startswith("present"))


class PiecedGraph(OrtGraph):
    """An `OrtGraph` that makes all calls with one piece of it, then with the next.

    Args:
        path: of its (first) file.
        settings: of the sessions.
        entry: what the manifest says of it.
        drawer: where results are kept.
        piece: bytes of weights in float32 that are there at a time.

    Raises:
        MalformedInput: the guard refuses a file.
        UnsupportedInput: the graph fills buffers in place.
    """

    def __init__(
        self, path: Path, settings: SessionSettings, *, entry: GraphEntry, drawer: Drawer, piece: int = PIECE
    ) -> None:
        super().__init__(path, replace(settings, arena=False), entry=entry)
        self._folder, self._settings = path.parent, replace(settings, arena=False)
        self.foreseen = Foreseen(self.name, self._run_all, drawer)
        self._pieces = [piece_ for model in self._session.models for piece_ in cut(model, piece)]
        self._limit = piece
        self._present_of = {past_of(name): name for name in self.present_names}

    def _connect(self, paths: Sequence[Path], settings: SessionSettings) -> Any:
        return Declared(paths, settings.change)

    def run(self, input_ids: Array, attention_mask: Array, position_ids: Array, past: Cache | None = None) -> Step:
        """As `OrtGraph.run`; what was foreseen is there."""
        return self.foreseen.run(input_ids, attention_mask, position_ids, past)

    def _run_all(self, calls: Sequence[PlannedCall]) -> list[Step]:
        """All calls, piece by piece; of a piece, a call comes after the one that it continues."""
        values: list[Values] = [self._given(call) for call in calls]
        ports = {name: (self.types[name], shape) for name, shape in self.inputs.items()}
        wanted = {*self.result_names, *self.present_names}
        for at, piece in enumerate(self._pieces):
            try:
                self._run_piece(piece, calls, values, ports)
            except LlmconvError:
                raise
            except Exception as error:  # onnxruntime's exceptions share no base class of their own
                raise_if_out_of_memory(error, f"in `{self.name}`")
                raise MalformedInput(f"`{self.name}` fails in onnxruntime: {first_line(error)}", hint=HINT) from error
            trim()
            later = wanted.union(*(piece.inputs for piece in self._pieces[at + 1 :]))
            values = [{name: value for name, value in mine.items() if name in later} for mine in values]
        return [self._gathered(call, mine) for call, mine in zip(calls, values, strict=True)]

    def _run_piece(self, piece: Piece, calls: Sequence[PlannedCall], values: list[Values], ports: Ports) -> None:
        """Adds the outputs of a piece to the values of every call; its session is gone afterwards."""
        session = self._open(piece, ports)
        ports |= {port.name: (port.type, port.shape) for port in session.get_outputs()}
        for call, mine in zip(calls, values, strict=True):
            feeds = {name: self._fed(name, piece, call, mine, values) for name in piece.inputs}
            mine |= zip(piece.outputs, session.run_with_ort_values(piece.outputs, feeds), strict=True)

    def _open(self, piece: Piece, ports: Ports) -> LimitedSession:
        settings = self._settings
        if piece.weight_bytes > self._limit:  # no second copy of a large matrix
            settings = replace(settings, optimization="disable")
        options = settings.options()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._folder))
        content = piece.build(ports).SerializeToString()
        limit = TimeLimit(piece.weight_bytes, settings.timeout)
        return LimitedSession(content, options, ["CPUExecutionProvider"], limit)

    def _given(self, call: PlannedCall) -> Values:
        """Tokens, mask and positions of a call, and its past as far as it is there."""
        tokens = {"attention_mask": call.attention_mask, "position_ids": call.position_ids}
        named = {**self.embed(call.input_ids), **tokens}
        values = {name: as_input(array) for name, array in named.items() if name in self.inputs}
        if call.parent is None:
            past = self._past_values(call.past, len(call.input_ids))
            values |= zip(self.past_names, past, strict=False)
        return values

    def _fed(self, name: str, piece: Piece, call: PlannedCall, mine: Values, values: list[Values]) -> ort.OrtValue:
        """An input of a piece; a past that is still to come gives its shape, where that is all that is asked."""
        if name in mine or call.parent is None or name not in self._present_of:
            return mine[name]
        made = values[call.parent].get(self._present_of[name])
        if made is not None:
            return made
        shape = [len(call.input_ids), *(axis for axis in self.inputs[name][1:])]
        if not is_state(name):
            shape[LENGTH_AXIS] = call.past_length
        known = [axis for axis in shape if isinstance(axis, int)]
        if name not in piece.shapes_only or len(known) < len(shape):
            raise UnsupportedInput(f"`{self.name}` takes `{name}` before its layer", hint=HINT)
        dtype = TENSOR_DTYPES[self.types[name]]
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(known, dtype))

    def _gathered(self, call: PlannedCall, values: Values) -> Step:
        lengths = [values[name].shape()[LENGTH_AXIS] for name in self.present_names if not is_state(name)]
        length = max(lengths, default=call.attention_mask.shape[1])
        present = OrtCache(self.present_names, [values[name] for name in self.present_names], length)
        return self._step([values[name].numpy() for name in self.result_names], present)
