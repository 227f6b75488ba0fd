"""Layer-by-layer verification of models that do not fit into memory: every weight is read only a few times.

The calls of all scenarios are known in advance. So each layer is loaded once and computes its part of every call, then
the next layer follows: for the eager model in float64 and in the graph's dtype (`runtime.low_memory.runner`), and for
each graph in pieces (`runtime.low_memory.pieced_graph`). Results are kept in a temporary file until their scenario is
compared.

Why pieces: onnxruntime folds the Cast after each half-precision weight when it opens a session, so that a whole graph
holds all weights in float32. Without folding (`ORT_DISABLE_ALL`) every Cast is repeated in every call, and all mapped
weights stay resident. A piece is opened as usual, its weights are folded, and it is closed after all calls. The
verdict is about the same nodes with the same weights, but fusions of onnxruntime across the borders of pieces are not
tested. A graph smaller than one piece runs whole.

Scenarios that edit a cache between two calls, or continue by greedy tokens, are skipped; the weight audit is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx

from llmconv.checkpoint import open_weights
from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.stored_tensors import ScaleFactors
from llmconv.runtime.low_memory.pass_scheduler import LOW_MEMORY_HINT
from llmconv.runtime.low_memory.pieced_graph import PIECE_BYTES, DeclaredValue, PiecedGraph
from llmconv.runtime.low_memory.precomputed import MAX_TOKENS, CallChain, KeyedCache, PrecomputedRunner, SpillFile
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.low_memory.weights import MatrixMemory
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, PrefixEntry
from llmconv.runtime.onnxruntime.process_heap import trim
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import FixedSizes
from llmconv.runtime.runner import Runner
from llmconv.verify.comparison.candidates import Candidate
from llmconv.verify.reference.cost_estimate import largest_layer, suite_seconds
from llmconv.verify.reference.eager import Eager, own_cache_chains
from llmconv.verify.reference.other_roundings import edited
from llmconv.verify.reference.weight_scaling import SCALED_SCENARIOS, WeightScaling
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain, ModelFacts
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
    ) -> None:
        self._spill_file = SpillFile()
        self._precomputed: list[PrecomputedRunner] = []
        self._few = FewLayers.of(folder) if skipped else None
        self._memory = MatrixMemory(self._few.kept if self._few else 0)
        super().__init__(folder, dtype, code=code, factors=factors, skipped=skipped, fixed_inputs=fixed_inputs)
        self._selection = selection
        planned = selection.calls(self.facts())
        if selection.budget:
            selection.budget.choose(planned, suite_seconds(folder, skipped))
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
        options["fixed_inputs"] = self._fixed_inputs
        return StreamedEager(self.folder, self.dtype, selection=selection, **options)


@dataclass(frozen=True)
class FewLayers:
    """Bytes of matrices kept between calls, and of logits in memory, so that few layers are read less often."""

    kept: int
    logits: int

    @classmethod
    def of(cls, folder: Path) -> FewLayers:
        """Memory in proportion to the largest layer of a model folder."""
        stored, elements = largest_layer(open_weights(folder))
        return cls(max(LEAST_KEPT, stored), max(LEAST_LOGITS, elements))

    def tokens(self, vocab_size: int) -> int:
        """Number of tokens of calls that run together."""
        return max(256, min(MAX_TOKENS, self.logits // (8 * vocab_size)))


def why_not_layered(entries: Sequence[GraphEntry], models: Mapping[str, onnx.ModelProto]) -> str:
    """Why the graphs cannot run in pieces; empty if they can."""
    if any(entry.prefix for entry in entries):
        return "a graph has a prefix"
    for name, model in models.items():
        sides = ([DeclaredValue.of(port) for port in side] for side in (model.graph.input, model.graph.output))
        inputs, outputs = ({port.name: port.shape for port in side} for side in sides)
        if FixedSizes.of(inputs, outputs):
            return f"`{name}` updates a fixed cache buffer in place"
    return ""


def open_in_pieces(
    folder: Path, entry: GraphEntry, settings: SessionSettings, piece_bytes: int = PIECE_BYTES
) -> OrtGraph:
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

    Errors of calls are raised when their results are requested.

    Raises:
        UnsupportedInput: the calls cannot run together.
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
    while together and stop < len(rest.calls) and rest.calls[stop].edit == CacheEdit():
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
