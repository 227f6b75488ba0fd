"""Layer-by-layer verification of models that do not fit into memory, and graphs on scaled weights.

The calls of all scenarios are known in advance. So each layer is loaded once and computes its part of every call, then
the next layer follows: for the eager model in float64 and in the graph's dtype, and for each graph in pieces
(`runtime.low_memory`). Results are kept in a temporary file until their scenario is compared. onnxruntime folds the
Cast after each half-precision weight when it opens a session, so a whole graph would hold all weights in float32; a
piece is closed after all calls. Fusions of onnxruntime across the borders of pieces are not tested. Scenarios that
edit a cache between two calls, or continue by greedy tokens, are skipped.

Weights are scaled so that constants matter that the real weights hide in the noise: a missing softcap (small attention
scores), a wrong epsilon (large activations). Factors are powers of two, so a product with a scaled matrix equals the
scaled product bit by bit: a Mul follows every MatMul, Gemm and Gather with such a weight, or the weight if it has
other users.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import helper, numpy_helper

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput
from llmconv.files.weight_ranges import Mapped
from llmconv.memory import trim
from llmconv.output.manifest import GraphEntry, PrefixEntry
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.stored_tensors import ScaleFactors
from llmconv.runtime.low_memory.pieced_graph import PIECE_BYTES, DeclaredValue, PiecedGraph
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.low_memory.weights import (
    LOW_MEMORY_HINT,
    MAX_TOKENS,
    CallChain,
    KeyedCache,
    MatrixMemory,
    PrecomputedRunner,
    SpillFile,
)
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.guard import attributes, external_fields, graphs, nodes, refill, values_read_by
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import FixedSizes
from llmconv.runtime.runner import Runner
from llmconv.tensors import Array, LazyTensor, lists_by_key
from llmconv.verify.audit.weights import MAPPED, reference_name
from llmconv.verify.comparison.candidates import Candidate
from llmconv.verify.reference.cost_estimate import largest_layer, suite_seconds
from llmconv.verify.reference.eager import Eager, own_cache_chains
from llmconv.verify.reference.other_roundings import SCALED_SCENARIOS, WeightScaling, edited
from llmconv.verify.scenarios.calls import Call, Chain, ModelFacts, PastEdit
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario

NOTHING_HELD = "`--low-memory` keeps no cache in memory, so none can be edited or replaced"

LEAST_KEPT, LEAST_LOGITS = 1 << 29, 1 << 28
"""Bytes of matrices and of logits that a model of few layers may keep in any case."""

PlannedCalls = Sequence[tuple[Scenario, Sequence[Chain]]]


class StreamedEager(Eager):
    """`Eager` that never holds the whole model; it makes only the calls of the selected scenarios.

    `skipped` are names of layers that are left out. A model of few layers also gets the calls whose cache is edited or
    made up.
    """

    is_layered = True

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        code: Path | None = None,
        selection: Selection,
        factors: ScaleFactors | None = None,
        skipped: Collection[str] = (),
        fixed_inputs: Collection[str] = (),
        weights: Mapping[str, LazyTensor] | None = None,
    ) -> None:
        self._spill_file = SpillFile()
        self._precomputed: list[PrecomputedRunner] = []
        tensors = open_weights(folder) if weights is None else weights
        self._few = FewLayers.of(tensors) if skipped else None
        self._memory = MatrixMemory(self._few.kept if self._few else 0)
        options: dict[str, Any] = {"skipped": skipped, "fixed_inputs": fixed_inputs, "weights": weights}
        super().__init__(folder, dtype, code=code, factors=factors, **options)
        self._selection = selection
        planned = selection.calls(self.facts())
        if selection.budget:
            selection.budget.choose(planned, suite_seconds(tensors, skipped))
        chains = [chain for _, chains in selection.chosen(planned) for chain in chains]
        chains += own_cache_chains(self.facts())
        one = np.zeros((1, 1), dtype=np.int64)
        chains.append([Call(one, one + 1, one, extras={})])  # for `cache_shapes`
        for runner in self._precomputed:
            precompute_chains(runner, runner, chains)
        self.release()

    def _open(self, dtype: str) -> tuple[EagerRunner, Runner]:
        model = StreamedRunner(self.folder, dtype, memory=self._memory, **self._options)
        limit = self._few.tokens(model.vocab_size) if self._few else MAX_TOKENS
        self._precomputed.append(PrecomputedRunner(dtype, model.run_all, self._spill_file, limit))
        return model, self._precomputed[-1]

    def release(self) -> None:
        """Frees matrices that are kept for the next call."""
        self._memory.release()
        trim()

    def facts(self) -> ModelFacts:
        """As `Eager.facts`; calls that edit or replace a cache are left out unless most layers are skipped."""
        facts = super().facts()
        if self._skipped and not facts.keeps_states:
            return replace(facts, parameters=0)  # the smallest limit of synthetic pasts
        return replace(facts, no_edits=NOTHING_HELD, no_synthetic_past=NOTHING_HELD, greedy=None)

    @property
    def _repeating(self) -> Runner:
        """The model itself: results in the file would not be computed again. Each call reads all weights."""
        return self._rounded_model

    def _merged(self, chain: Chain) -> None:
        """None: all calls of a scenario run in each layer anyway."""

    def with_prefix(self, entry: PrefixEntry, start: object) -> Eager:
        """Raises UnsupportedInput: it does not support prefixes."""
        raise UnsupportedInput("a graph with a prefix cannot be verified layer by layer", hint=LOW_MEMORY_HINT)

    def _scaled(self, scaling: WeightScaling) -> Eager:
        """The same model with scaled weights, with all its calls made."""
        selection = replace(self._selection, only=SCALED_SCENARIOS, budget=None)
        options: dict[str, Any] = {"code": self._code, "factors": scaling.factor_of, "skipped": self._skipped}
        options |= {"fixed_inputs": self._fixed_inputs, "weights": self._weights}
        return StreamedEager(self.folder, self.dtype, selection=selection, **options)


@dataclass(frozen=True)
class FewLayers:
    """Bytes of matrices kept between calls, and of logits in memory, so that few layers are read less often."""

    kept: int
    logits: int

    @classmethod
    def of(cls, tensors: Mapping[str, LazyTensor]) -> FewLayers:
        """Memory in proportion to the largest layer."""
        stored, elements = largest_layer(tensors)
        return cls(max(LEAST_KEPT, stored), max(LEAST_LOGITS, elements))

    def tokens(self, vocab_size: int) -> int:
        return max(256, min(MAX_TOKENS, self.logits // (8 * vocab_size)))


def why_not_layered(entries: Sequence[GraphEntry], models: Mapping[str, onnx.ModelProto]) -> str:
    """Why the graphs cannot run in pieces; empty if they can."""
    if any(entry.prefix for entry in entries):
        return "a graph has a prefix"
    for name, model in models.items():
        if fixed_sizes(model):
            return f"`{name}` updates a fixed cache buffer in place"
    return ""


def fixed_sizes(model: onnx.ModelProto) -> FixedSizes | None:
    """The sizes of a graph that updates fixed cache buffers in place; None for one whose cache grows."""
    sides = ([DeclaredValue.of(port) for port in side] for side in (model.graph.input, model.graph.output))
    inputs, outputs = ({port.name: port.shape for port in side} for side in sides)
    single = any(node.op_type == "GroupQueryAttention" for node in nodes(model))
    return FixedSizes.of(inputs, outputs, single)


def open_in_pieces(
    folder: Path, entry: GraphEntry, settings: SessionSettings, piece_bytes: int = PIECE_BYTES
) -> PiecedGraph:
    """A graph of a folder that runs in pieces, whose weights have at most `piece_bytes` in float32."""
    return PiecedGraph(folder / entry.files[0], settings, entry=entry, file=SpillFile(), piece_bytes=piece_bytes)


def precompute(graphs: Sequence[OrtGraph], planned: PlannedCalls) -> None:
    """Runs all calls on graphs in pieces, each alone and prefill then decode; UnsupportedInput if one cannot be cut."""
    pieced = [graph for graph in graphs if isinstance(graph, PiecedGraph)]
    for graph in pieced:
        precompute_chains(graph.precomputed, graph.precomputed, _taken((graph,), planned))
    roles = {graph.entry.role: graph for graph in pieced}
    if {"prefill", "decode"} <= roles.keys():
        first, then = roles["prefill"], roles["decode"]
        chains = [chain for chain in _taken((first, then), planned) if len(chain) > 1]
        precompute_chains(first.precomputed, then.precomputed, chains)


def _taken(graphs: tuple[PiecedGraph, ...], planned: PlannedCalls) -> list[Chain]:
    """The chains that these graphs can run by design."""
    candidate = Candidate("", OrtRunner(graphs[0], graphs[-1]), graphs)
    chains = [chains for _, chains in planned if not any(candidate.refuses(call) for chain in chains for call in chain)]
    return [chain for several in chains for chain in several]


@dataclass(frozen=True)
class _Rest:
    """The calls of a chain that are left, and the cache before them."""

    past: KeyedCache | None
    calls: Chain
    is_begun: bool


def precompute_chains(first: PrecomputedRunner, then: PrecomputedRunner, chains: Sequence[Chain]) -> None:
    """Runs all calls of all chains: `first` the first call of each, `then`, which may be the same, the others.

    Errors of calls are raised when their results are requested. Raises UnsupportedInput: the calls cannot run together.
    """
    rest = [_Rest(None, chain, is_begun=False) for chain in chains]
    while rest:
        parts = [(one, _until_edit(one, together=one.is_begun or first is then)) for one in rest]
        for runner, begun in ((first, False), (then, True)):
            planned: list[CallChain] = [
                (_before(one.past, calls[0]), calls) for one, calls in parts if one.is_begun is begun
            ]
            runner.precompute(planned)
        found = [_after(one, calls, then if one.is_begun else first) for one, calls in parts]
        rest = [one for one in found if one]


def _until_edit(rest: _Rest, *, together: bool) -> Chain:
    """The next calls that continue each other without an edit; one call if they do not run together."""
    stop = 1
    while together and stop < len(rest.calls) and rest.calls[stop].edit == PastEdit():
        stop += 1
    return rest.calls[:stop]


def _after(rest: _Rest, calls: Chain, runner: PrecomputedRunner) -> _Rest | None:
    """What is left after some calls; None if nothing is, or a call failed."""
    left = rest.calls[len(calls) :]
    if not left:
        return None
    past = _before(rest.past, calls[0])
    try:
        for call in calls:
            past = runner.present(past, call)
    except LlmconvError:  # reported by the checks of the scenario
        return None
    return _Rest(past, left, is_begun=True)


def _before(past: KeyedCache | None, call: Call) -> KeyedCache | None:
    """The cache that a call continues, edited or made up."""
    return cast("KeyedCache | None", edited(past, call))


@dataclass(frozen=True)
class Scaler:
    """Opens the graphs of a folder on scaled weights."""

    why_not: str  # why they cannot be scaled; empty if they can
    scaled: Callable[[SessionSettings, WeightScaling], SessionSettings]  # returns settings that scale the weights

    @classmethod
    def of(cls, folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> Scaler:
        """For weights that the files of the folder contain; arguments as in `why_not_scaled`."""
        reason = why_not_scaled(folder, reference, models)
        return cls(reason, lambda settings, scaling: scaled_settings(settings, folder, scaling))


def why_not_scaled(folder: Path, reference: Path, models: Sequence[onnx.ModelProto]) -> str:
    """Why the graphs of a folder cannot run on scaled weights; empty if they can."""
    if "quantization_config" in read_json(reference / "config.json"):
        return "the model's own weights are quantized"
    try:
        tensors = open_weights(folder)
    except InputRefused:
        return "the graphs map no safetensors file"
    shapes = {tensor.shape for tensor in tensors.values() if len(tensor.shape) > 1}
    shapes |= {shape[::-1] for shape in shapes}
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        if tuple(tensor.dims) in shapes and not _is_mapped(tensor) and not reference_name(tensor.name, tensors):
            return f"unknown weight `{tensor.name}`"
    return ""


def _is_mapped(tensor: onnx.TensorProto) -> bool:
    return external_fields(tensor).get("location", "").endswith(MAPPED)


def scaled_settings(
    settings: SessionSettings, folder: Path, scaling: WeightScaling, *, at_weights: bool = False
) -> SessionSettings:
    """Settings that open the graphs of a folder on scaled weights; `at_weights` as for `scale`."""
    tensors = FolderTensors.of(folder)

    def apply(path: Path, model: onnx.ModelProto) -> None:
        if settings.change:
            settings.change(path, model)
        scale(model, tensors.factors(model, scaling), at_weights=at_weights)

    return replace(settings, change=apply)


@dataclass(frozen=True)
class FolderTensors:
    """The tensors of a folder by name, and by file name as (offset, name, tensor), ordered by offset."""

    named: Mapping[str, LazyTensor]
    places: Mapping[str, Sequence[tuple[int, str, Mapped]]]

    @classmethod
    def of(cls, folder: Path) -> FolderTensors:
        named = open_weights(folder)
        stored = ((name, tensor) for name, tensor in named.items() if isinstance(tensor, Mapped))
        places = lists_by_key((tensor.path.name, (tensor.offset, name, tensor)) for name, tensor in stored)
        return cls(named, {file: sorted(found, key=lambda place: place[0]) for file, found in places.items()})

    def factors(self, model: onnx.ModelProto, scaling: WeightScaling) -> dict[str, float]:
        """The factor of every initializer that is one of these tensors or a part of one."""
        found = {tensor.name: self.source(tensor) for tensor in model.graph.initializer}
        return {mine: scaling.factor_of(name, self.named[name].shape) for mine, name in found.items() if name}

    def source(self, tensor: onnx.TensorProto) -> str:
        """Name of the tensor that an initializer maps or is named after; empty if there is none."""
        fields = external_fields(tensor)
        places = self.places.get(fields.get("location", ""), ())
        if not places:
            return reference_name(tensor.name, self.named) if not _is_mapped(tensor) else ""
        offset = int(fields.get("offset", 0))
        at = bisect_right(places, offset, key=lambda place: place[0]) - 1
        first, name, whole = places[max(at, 0)]
        return name if first <= offset < first + whole.nbytes else ""


LAYOUT = {"Identity", "Reshape", "Transpose"}  # operators that change no element
PRODUCTS = {"MatMul", "Gather"}
WITH_ALPHA = {"Gemm", "FusedMatMul"}  # products with a factor as an attribute
SHORT = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
WIDE = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

Product = tuple[onnx.NodeProto, int]  # A node that multiplies a weight, and the element type of its product


def scale(model: onnx.ModelProto, factors: Mapping[str, float | Array], *, at_weights: bool = False) -> None:
    """Scales initializers of a graph in place; arrays among the factors are broadcast to the initializer's shape.

    `at_weights` scales the weights instead of products, so that all inner values are those of the scaled model.
    """
    for graph in graphs(model.graph):
        wanted = [t for t in graph.initializer if t.name in factors and np.any(np.asarray(factors[t.name]) != 1)]
        if wanted:
            _Scaling(graph, at_weights or graph is not model.graph).apply(wanted, factors)


class _Scaling:
    def __init__(self, graph: onnx.GraphProto, at_weights: bool) -> None:
        self._graph, self._at_weights = graph, at_weights
        self._users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        self._hidden = {port.name for port in graph.output}
        for node in graph.node:
            for at, name in enumerate(node.input):
                self._users[name].append((node, at))
            self._hidden |= values_read_by(node) - set(node.input)
        self._before: list[onnx.NodeProto] = []
        self._after: dict[str, list[onnx.NodeProto]] = defaultdict(list)

    def apply(self, tensors: Sequence[onnx.TensorProto], factors: Mapping[str, float | Array]) -> None:
        for tensor in tensors:
            factor = np.asarray(factors[tensor.name])
            places = None if self._at_weights or factor.size > 1 else self._places(tensor.name, tensor.data_type)
            if places is None:
                self._scale_weight(tensor, factor)
            for node, kind in places or ():
                self._scale_product(node, kind, float(factor))
        nodes = [*self._before]
        for node in self._graph.node:
            nodes.append(node)
            for name in node.output:
                nodes += self._after.get(name, [])
        refill(self._graph.node, nodes)

    def _places(self, name: str, kind: int) -> list[Product] | None:
        """The products with a weight; None if it is used in another way."""
        if name in self._hidden:
            return None
        found: list[Product] = []
        for node, at in self._users[name]:
            if node.op_type in {*LAYOUT, "Cast"} and at == 0:
                inner = self._places(node.output[0], _cast_to(node) or kind)
                if inner is None:
                    return None
                found += inner
            elif _is_product(node, at) and list(node.input).count(name) == 1 and kind in WIDE:
                found.append((node, kind))
            elif _is_product(node, at) and node.op_type == "Gather" and (casts := self._widened(node.output[0])):
                found += casts
            else:
                return None
        return found

    def _widened(self, name: str) -> list[Product]:
        """The casts of a half-precision value to wider types; none if it is used in another way."""
        users = [(node, _cast_to(node)) for node, _ in self._users[name]]
        return users if name not in self._hidden and all(to in WIDE for _, to in users) else []

    def _scale_product(self, node: onnx.NodeProto, kind: int, factor: float) -> None:
        if node.op_type in WITH_ALPHA:
            alpha = next((one for one in node.attribute if one.name == "alpha"), None)
            if alpha is None:
                node.attribute.append(helper.make_attribute("alpha", factor))
            else:
                alpha.f *= factor
            return
        self._scale_output(node, kind, np.array(factor))

    def _scale_output(self, node: onnx.NodeProto, kind: int, factor: Array) -> None:
        name = node.output[0]
        node.output[0] = f"{name}:unscaled"
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        self._after[node.output[0]] += self._times(node.output[0], factor.astype(dtype), name)
        self._after[node.output[0]] += self._after.pop(name, [])

    def _scale_weight(self, tensor: onnx.TensorProto, factor: Array) -> None:
        """Renames the initializer and gives its name to the product, in the type that its users read."""
        name, kind = tensor.name, tensor.data_type
        if casts := self._widened(name):
            for node, to in casts:
                self._scale_output(node, to, factor)
            return
        tensor.name = stored = f"{name}:unscaled"
        # before IR version 4 initializers are also inputs
        refill(self._graph.input, [port for port in self._graph.input if port.name != name])
        if kind not in SHORT:
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            self._before += self._times(stored, factor.astype(dtype), name)
            return
        wide, scaled = f"{stored}:wide", f"{name}:wide"  # onnxruntime's CPU provider does not multiply bfloat16
        self._before.append(helper.make_node("Cast", [stored], [wide], name=wide, to=onnx.TensorProto.FLOAT))
        self._before += self._times(wide, factor.astype(np.float32), scaled)
        self._before.append(helper.make_node("Cast", [scaled], [name], name=f"{name}:narrow", to=kind))

    def _times(self, value: str, factor: Array, result: str) -> list[onnx.NodeProto]:
        constant = f"{result}:factor"
        self._graph.initializer.append(numpy_helper.from_array(factor, constant))
        return [helper.make_node("Mul", [value, constant], [result], name=f"{result}:scaled")]


def _is_product(node: onnx.NodeProto, at: int) -> bool:
    """Whether the node's output is proportional to this input."""
    return (node.op_type in PRODUCTS and at == 0) or (node.op_type in {"MatMul", *WITH_ALPHA} and at < 2)


def _cast_to(node: onnx.NodeProto) -> int:
    return attributes(node)["to"] if node.op_type == "Cast" else 0
