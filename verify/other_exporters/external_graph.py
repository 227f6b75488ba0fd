"""ExternalGraph: a graph of any exporter in onnxruntime, with the input and output names of its input map.

A call that a graph does not support in one run is split, as its own clients do: into single tokens if it takes one, and
into runs of the whole sequence if it has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.runtime.extra_inputs import ExtraValues, ModelCall, cache_order, is_present
from llmconv.runtime.onnxruntime.graph import SessionChain, refusing
from llmconv.runtime.onnxruntime.guard import attributes, load_guarded, nodes
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache, Extras, Step
from llmconv.tensors import Array
from llmconv.verify.other_exporters.port_map import AXES, Binding, bind, find_port_maps
from llmconv.verify.other_exporters.quantized.schemes import quantized_operators
from llmconv.verify.other_exporters.quantized.tensor_matching import InitializerContent, MatchedMatrix
from llmconv.verify.results import Check, problem_of
from llmconv.verify.scenarios.calls import Call, PastEdit, SyntheticPast

DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}
CacheShapesByName = Mapping[str, tuple[int, ...]]
RING_MARGIN = 512  # new tokens for which a ring buffer has room in addition to its window


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the eager model, for graphs with dynamic axes."""

    # of keys and values of one token, `[1, heads, 1, head_dim]`, by names as in reports
    cache_shapes: CacheShapesByName
    window: int | None = None  # size of the sliding window in tokens; None without one


class ExternalGraph:
    """One graph in one session; `limits` are the calls that it does not support.

    `shapes` are declared ones by name; `outputs` are names of its cache outputs, as in reports. The name in reports is
    by default the file name. Raises MalformedInput: onnxruntime cannot open it.
    """

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        binding: Binding,
        sizes: ModelSizes,
        settings: SessionSettings,
        name: str = "",
    ) -> None:
        self.name, self.path, self.binding, self._sizes = name or path.name, path, binding, sizes
        self.limits = GraphLimits.of(model, binding)
        self._session = SessionChain([path], settings, joins=False)
        declared = [*self._session.get_inputs(), *self._session.get_outputs()]
        self.shapes = {arg.name: arg.shape for arg in declared}
        self._dtypes = {arg.name: _dtype(self.name, arg.name, arg.type) for arg in declared}
        self.dtype = self._dtypes[binding.port_map.logits]
        self.outputs = sorted(binding.present, key=cache_order)

    @property
    def keeps_cache(self) -> bool:
        return bool(self.binding.past)

    def run(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        """Continues `past` by a call.

        Raises UsageProblem: values of extra inputs are given; InputRefused: the past belongs to another kind of runner;
        MalformedInput: onnxruntime cannot run the graph on them.
        """
        ExtraValues(given=extras or {})
        past = ExternalCache.made_up(past) if isinstance(past, SyntheticPast) else past
        if past is not None and not isinstance(past, ExternalCache):
            raise InputRefused(
                f"`{self.name}` cannot continue the cache of another runner", hint="start without a past"
            )
        (batch, new), mask = call.input_ids.shape, call.attention_mask
        before = past or ExternalCache({}, {}, call.input_ids[:, :0], call.position_ids[:, :0])
        ids = np.concatenate([before.input_ids, call.input_ids], axis=1)
        positions = np.concatenate([before.position_ids, call.position_ids], axis=1)
        if not self.keeps_cache:
            logits, given = self._call(ids, mask, positions, {})
            return Step(logits[:, -new:], ExternalCache(given, given, ids, positions))
        width, given = self.limits.width(batch, before.length, new), dict(before.given)
        pieces = []
        for start in range(before.length, before.length + new, width):
            end = min(start + width, before.length + new)
            logits, given = self._call(ids[:, start:end], mask[:, :end], positions[:, start:end], given)
            pieces.append(logits)
        rings, length = self.limits.rings, ids.shape[1]
        kept = {name: unroll_ring(array, length) if name in rings else array for name, array in given.items()}
        return Step(np.concatenate(pieces, axis=1), ExternalCache(kept, given, ids, positions))

    def _call(
        self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """One run: logits `[batch, tokens, vocabulary]`, and the cache by names as in reports."""
        row = self.binding.port_map
        wanted = [row.logits, *(self.binding.present[name] for name in self.outputs)]
        feeds = self.feeds(ids, mask, positions, past)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        with refusing(self.name, "check whether the graph's own client can run it"):
            logits, *present = [value.numpy() for value in self._session.run_with_ort_values(wanted, values)]
        given = {name: _transpose(array, row.axes, AXES) for name, array in zip(self.outputs, present, strict=True)}
        return (logits[:, None] if logits.ndim == 2 else logits), given

    def feeds(self, ids: Array, mask: Array, positions: Array, past: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs of one run, by the graph's names and in its dtypes.

        `ids`, `positions`: `[batch, new tokens]`. `mask`: `[batch, past and new tokens]`. `past`: `[batch, heads,
        tokens, head_dim]` by names as in reports; empty without a past.
        """
        row = self.binding.port_map
        given = {row.tokens: ids, row.mask: mask, row.positions: positions, row.branch: np.array([bool(past)])}
        given = {name: given.get(name, np.array(self._sizes.window or 0)) for name in self.binding.inputs}
        for name, port in self.binding.past.items():
            given[port] = _transpose(past[name] if past else self._empty(name, len(ids)), AXES, row.axes)
        return {name: np.ascontiguousarray(array, dtype=self._dtypes[name]) for name, array in given.items()}

    def _empty(self, name: str, batch: int) -> Array:
        """Keys or values of no tokens, or an empty ring buffer, with the model's sizes."""
        length = (self._sizes.window or 0) + RING_MARGIN if name in self.limits.rings else 0
        heads, size = self._sizes.cache_shapes[name][1], self._sizes.cache_shapes[name][3]
        return np.zeros((batch, heads, length, size))


def _transpose(array: Array, given: str, wanted: str) -> Array:
    return array if given == wanted else array.transpose([given.index(axis) for axis in wanted])


def _dtype(graph: str, port: str, declared: str) -> str:
    if declared not in DTYPES:
        raise InputRefused(
            f"`{graph}` has `{port}` of the unsupported type {declared}",
            hint="verify runs graphs of float32, float16 or float64",
        )
    return DTYPES[declared]


@dataclass(frozen=True)
class ExternalCache:
    """The cache that a graph returned, with its tokens."""

    # keys and values in the order of the tokens, `[batch, heads, tokens, head_dim]` by name; a sliding layer may keep
    # the last tokens only
    kept: Mapping[str, Array]
    given: Mapping[str, Array]  # keys and values as the graph returned them; its next past
    # input_ids, position_ids: all tokens and positions so far, int64 `[batch, length]`
    input_ids: Array
    position_ids: Array

    @classmethod
    def made_up(cls, past: SyntheticPast) -> ExternalCache:
        """A synthetic past, whose tokens are unknown and therefore 0."""
        arrays = past.arrays()
        unknown = np.zeros((past.rows, past.length), dtype=np.int64)
        return cls(arrays, arrays, unknown, unknown)

    @property
    def length(self) -> int:
        return int(self.input_ids.shape[1])

    def arrays(self) -> dict[str, Array]:
        """See `Cache.arrays`; tokens that a layer no longer keeps are zeros."""
        return {name: _padded_left(array, self.length) for name, array in self.kept.items()}

    def edited(self, edit: PastEdit, mask: Array) -> ExternalCache:
        """See `PastEdit.apply`; in ring buffers only the order of the rows changes."""
        rows = list(edit.rows) if edit.rows is not None else slice(None)
        end = self.length - edit.drop
        ids, positions = self.input_ids[rows, :end], self.position_ids[rows, :end]
        whole = {name for name, array in self.kept.items() if self.given[name] is array}
        arrays = {
            name: edit.of_array(name, array, mask) if name in whole else array[rows]
            for name, array in self.given.items()
        }
        kept = {name: arrays[name] if name in whole else array[rows] for name, array in self.kept.items()}
        return ExternalCache(kept, arrays, ids, positions)


def _padded_left(array: Array, length: int) -> Array:
    missing = length - array.shape[2]
    return np.pad(array, ((0, 0), (0, 0), (missing, 0), (0, 0))) if missing > 0 else array


def unroll_ring(ring: Array, length: int) -> Array:
    """The last of `length` tokens in a ring buffer `[batch, heads, size, head_dim]`, in their order.

    Token t is at index t modulo the size of the ring.
    """
    size = ring.shape[2]
    return ring[:, :, np.arange(max(0, length - size), length) % size]


GROUPED = "GroupQueryAttention"
BIAS = 10  # index of its input `attention_bias`; without it the operator only counts the ones of the mask


@dataclass(frozen=True)
class GraphLimits:
    """Properties of a graph that limit its calls."""

    rows: int | None  # fixed batch size; None if dynamic
    tokens: int | None  # fixed number of new tokens; None if dynamic
    # takes_mask, takes_positions: whether it has those inputs
    takes_mask: bool
    takes_positions: bool
    counts_mask: bool  # whether it derives only the sequence length from the mask
    single: bool  # whether several new tokens after a past require a batch of 1
    rings: frozenset[str] = frozenset()  # names, as in reports, of keys and values in ring buffers
    keeps_cache: bool = True  # whether it continues a past

    @classmethod
    def of(cls, model: onnx.ModelProto, binding: Binding) -> GraphLimits:
        ids = next(info for info in model.graph.input if info.name == binding.port_map.tokens)
        shape = [axis.dim_value or None for axis in ids.type.tensor_type.shape.dim]
        rows, tokens = (*shape, None, None)[:2]
        grouped = [node for node in nodes(model) if node.op_type == GROUPED]
        biased = all(len(node.input) > BIAS and node.input[BIAS] for node in grouped)
        in_rings = {one for node in grouped if attributes(node).get("sliding_window_cache") for one in node.input[3:5]}
        rings = frozenset(name for name, port in binding.past.items() if port in in_rings)
        takes = (binding.takes_mask, binding.takes_positions)
        return cls(rows, tokens, *takes, not biased, bool(grouped), rings, keeps_cache=bool(binding.past))

    def refusal(self, call: Call) -> str:
        rows = len(call.input_ids)
        if self.rows is not None and rows != self.rows:
            return f"the graph has a batch size of {self.rows}, not {rows}"
        if not call.uniform and not self.takes_positions:
            return "the graph has no input for positions"
        if call.edit.drop and self.rings:
            return "the graph keeps its sliding layers in ring buffers, from which tokens cannot be removed"
        if call.known and self.rings:
            return "the graph keeps its sliding layers in ring buffers, which cannot hold a synthetic past"
        if call.known and not self.keeps_cache:
            return "the graph has no input for a past"
        if call.attention_mask.all():
            return ""
        if not self.takes_mask:
            return "the graph has no input for a mask"
        return f"{GROUPED} only counts the ones of the mask, so padding is not supported" if self.counts_mask else ""

    def width(self, rows: int, past: int, new: int) -> int:
        """New tokens per run, for a batch of `rows` with `past` tokens and `new` new tokens."""
        if self.tokens is not None:
            return self.tokens
        return 1 if self.single and rows > 1 and past else new


MAX_GRAPHS = 2  # one graph, or a prefill and a decode graph

PRECISIONS = {
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}


@dataclass
class GraphFile:
    """A checked graph file and its inputs and outputs."""

    path: Path
    name: str  # name in reports: the file name, with the folder's name if two files have the same name
    model: onnx.ModelProto
    binding: Binding
    # its initializers by name, after their audit
    contents: Mapping[str, InitializerContent] = field(default_factory=dict)
    emulates: Path | None = None  # the file of which `path` is a copy that rounds after every node; else None
    quantized_weights: list[MatchedMatrix] = field(default_factory=list)  # its quantized matrices, after their audit
    unreadable: str = ""  # why the quantized matrices cannot be read; else empty

    @property
    def dtype(self) -> str:
        names = {self.binding.port_map.logits, *self.binding.present.values()}
        ports = (port for port in self.model.graph.output if port.name in names or is_present(port.name))
        kinds = {port.type.tensor_type.elem_type for port in ports}
        return next((name for kind, name in PRECISIONS.items() if kind in kinds), "float32")

    @property
    def quantized(self) -> bool:
        return bool(quantized_operators(self.model))

    def open(self, sizes: ModelSizes, settings: SessionSettings) -> ExternalGraph | Check:
        settings = replace(settings, reuse=self.emulates is None)
        try:
            return ExternalGraph(self.path, self.model, self.binding, sizes, settings, self.name)
        except LlmconvError as error:
            return Check("structure", self.name, "", verdict="fail", detail=problem_of(error))


def read_graphs(paths: Sequence[str | Path], input_map: str) -> list[GraphFile]:
    """The one or two checked graph files; `input_map` is the name of an input map, `auto`, or a JSON file.

    Raises UsageProblem: no file or too many, or an unknown map; InputRefused: a graph fits no map, or the guard refuses
    it.
    """
    files = [Path(path) for path in paths]
    if not 0 < len(files) <= MAX_GRAPHS:
        raise UsageProblem(f"{len(files)} graphs were given", hint="give one graph, or a prefill and a decode graph")
    rows = find_port_maps(input_map)
    is_unique = len({path.name for path in files}) == len(files)
    models = [load_guarded(path) for path in files]
    return [
        GraphFile(
            path, path.name if is_unique else f"{path.parent.name}/{path.name}", model, bind(model, path.name, rows)
        )
        for path, model in zip(files, models, strict=True)
    ]
