"""Verification of what does not fit in memory: model and graphs run layer by layer, and every weight is read few times.

The calls of all scenarios are known beforehand: tokens are given, none is chosen. So each layer is fetched once and
makes its part of every call, and the next layer follows: the eager model (`runtime.streamed`) in float64 and again in
the graph's dtype, and each graph in pieces (`runtime.pieces`). What was computed waits in a temporary file until its
scenario is compared.

Why pieces: onnxruntime folds the Cast behind each half-precision weight when it opens a session, so that a whole graph
holds all weights in float32. Without that (`ORT_DISABLE_ALL`) every Cast is made again in every call, and all mapped
weights stay resident. A piece is opened as usual, its weights are folded, and it is dropped after all calls. The
verdict is on the same nodes with the same weights; but what onnxruntime would fuse across the borders of pieces is
not seen. A graph that is smaller than one piece runs whole.

Scenarios that change a cache between two calls, or continue by the model's own tokens, are skipped; weights are
audited as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.scale_factors import Factors
from llmconv.runtime.low_memory.lockstep import HINT
from llmconv.runtime.low_memory.pieced_graph import PiecedGraph, Port
from llmconv.runtime.low_memory.precomputed import Drawer, Foreseen, KnownCache, Line
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, PrefixEntry
from llmconv.runtime.onnxruntime.runner import OrtGraph, OrtRunner, SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import FixedSizes
from llmconv.runtime.runner import Runner
from llmconv.verify.comparison.candidates import Candidate
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import SCALED_SCENARIOS, WeightScaling
from llmconv.verify.results.measure import ExpectedOutput
from llmconv.verify.scenarios.calls import Call, Chain, ModelFacts
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario

NOTHING_HELD = "with `--low-memory` no cache is held that could be changed or made up"

PlannedCalls = Sequence[tuple[Scenario, Sequence[Chain]]]


class StreamedEager(Eager):
    """`Eager` that never holds the model.

    Args:
        folder: the model's folder.
        dtype: numpy name of the graphs' dtype.
        code: as for `Eager`.
        selection: the scenarios whose calls will be made.
        factors: scale the weights.
    """

    is_layered = True

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        code: Path | None = None,
        selection: Selection,
        factors: Factors | None = None,
    ) -> None:
        self._drawer = Drawer()
        self._foreseen: list[Foreseen] = []
        super().__init__(folder, dtype, code=code, factors=factors)
        self._selection = selection
        chains = [chain for _, chains in selection.calls(self.facts()) for chain in chains]
        one = np.zeros((1, 1), dtype=np.int64)
        chains.append([Call(one, one + 1, one)])  # of which the cache's shapes are read
        for foreseen in self._foreseen:
            foreseen.foresee([(None, chain) for chain in chains])

    def _open(self, dtype: str) -> tuple[EagerRunner, Runner]:
        model = StreamedRunner(self.folder, dtype, code=self._code, factors=self._factors)
        self._foreseen.append(Foreseen(dtype, model.run_all, self._drawer))
        return model, self._foreseen[-1]

    def facts(self) -> ModelFacts:
        """As the model has them; a cache that nobody holds can be neither edited nor continued by its own tokens."""
        return replace(super().facts(), no_edits=NOTHING_HELD, no_synthetic_past=NOTHING_HELD, greedy=None)

    def _with_others(self, truths: dict[str, ExpectedOutput], calls: Sequence[Call]) -> dict[str, ExpectedOutput]:
        """As they are: a call that was not foreseen would read all weights again."""
        return truths

    def _merged(self, chain: Chain) -> None:
        """Not at all: all calls of a scenario are made with each layer."""

    def with_prefix(self, entry: PrefixEntry, start: object) -> Eager:
        """Not with a prefix.

        Raises:
            UnsupportedInput: always.
        """
        raise UnsupportedInput("a graph with a prefix cannot be verified layer by layer", hint=HINT)

    def _scaled(self, change: WeightScaling) -> Eager:
        """The same model with scaled weights, already run."""
        selection = replace(self._selection, only=SCALED_SCENARIOS)
        return StreamedEager(self.folder, self.dtype, code=self._code, selection=selection, factors=change.factor_of)


def why_not_layered(entries: Sequence[GraphEntry], models: Mapping[str, onnx.ModelProto]) -> str:
    """Why graphs cannot run in pieces; empty when they can."""
    if any(entry.prefix for entry in entries):
        return "a graph begins with a prefix"
    for name, model in models.items():
        sides = ([Port.of(port) for port in side] for side in (model.graph.input, model.graph.output))
        inputs, outputs = ({port.name: port.shape for port in side} for side in sides)
        if FixedSizes.of(inputs, outputs):
            return f"`{name}` fills buffers in place"
    return ""


def open_in_pieces(folder: Path, entry: GraphEntry, settings: SessionSettings) -> OrtGraph:
    """As `open_graph`: a graph of a folder, to be run in pieces."""
    return PiecedGraph(folder / entry.files[0], settings, entry=entry, drawer=Drawer())


def precompute(graphs: Sequence[OrtGraph], planned: PlannedCalls) -> None:
    """Makes the calls of all scenarios on graphs that run in pieces, alone and handing over to each other.

    Raises:
        UnsupportedInput: a graph cannot be cut as the calls need it.
    """
    pieced = [graph for graph in graphs if isinstance(graph, PiecedGraph)]
    for graph in pieced:
        graph.foreseen.foresee([(None, chain) for chain in _taken((graph,), planned)])
    roles = {graph.entry.role: graph for graph in pieced}
    if {"prefill", "decode"} <= roles.keys():
        first, then = roles["prefill"], roles["decode"]
        chains = [chain for chain in _taken((first, then), planned) if len(chain) > 1]
        lines = [_handed_over(first, chain) for chain in chains]
        then.foreseen.foresee([line for line in lines if line])


def _taken(graphs: tuple[PiecedGraph, ...], planned: PlannedCalls) -> list[Chain]:
    """The chains that these graphs do not refuse by design."""
    candidate = Candidate("", OrtRunner(graphs[0], graphs[-1]), graphs)
    chains = [chains for _, chains in planned if not any(candidate.refuses(call) for chain in chains for call in chain)]
    return [chain for several in chains for chain in several]


def _handed_over(first: PiecedGraph, chain: Chain) -> Line | None:
    """What comes after the first call, and the cache that it left; None where it failed."""
    call = chain[0]
    try:
        past = first.run(call.input_ids, call.attention_mask, call.position_ids).present
    except LlmconvError:  # told when its own checks are made
        return None
    return (past, chain[1:]) if isinstance(past, KnownCache) else None
