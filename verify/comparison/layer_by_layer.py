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
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.stored_tensors import ScaleFactors
from llmconv.runtime.low_memory.matrix_memory import MatrixMemory
from llmconv.runtime.low_memory.pass_scheduler import LOW_MEMORY_HINT
from llmconv.runtime.low_memory.pieced_graph import PIECE_BYTES, DeclaredValue, PiecedGraph
from llmconv.runtime.low_memory.precomputed import MAX_TOKENS, CallChain, PrecomputedRunner, SpilledCache, SpillFile
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, PrefixEntry
from llmconv.runtime.onnxruntime.runner import OrtGraph, OrtRunner, SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import FixedSizes
from llmconv.runtime.runner import Runner
from llmconv.verify.comparison.candidates import Candidate
from llmconv.verify.reference.cost_estimate import suite_seconds
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.weight_scaling import SCALED_SCENARIOS, WeightScaling
from llmconv.verify.results.sigma import ExpectedOutput
from llmconv.verify.scenarios.calls import CacheEdit, Call, Chain, ModelFacts
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario

NOTHING_HELD = "with `--low-memory` no cache is held that could be edited or replaced"

LOGITS = 1 << 25
"""Logits in memory at a time, where calls run in several groups; 8 bytes each."""

KEPT = 1 << 29
"""Bytes of matrices of a model of few layers that stay in memory between calls."""

PlannedCalls = Sequence[tuple[Scenario, Sequence[Chain]]]


class StreamedEager(Eager):
    """`Eager` that never holds the whole model.

    Args:
        folder: the model's folder.
        dtype: numpy name of the graphs' dtype.
        code: as for `Eager`.
        selection: the scenarios whose calls will be made.
        factors: scale the weights.
        skipped: names of layers that are left out. A model of few layers also gets the calls whose cache is edited or
            made up: each reads the weights again.
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
    ) -> None:
        self._spill_file = SpillFile()
        self._precomputed: list[PrecomputedRunner] = []
        self._memory = MatrixMemory(KEPT if skipped else 0)
        super().__init__(folder, dtype, code=code, factors=factors, skipped=skipped)
        self._selection = selection
        planned = selection.calls(self.facts())
        if selection.budget:
            selection.budget.choose(planned, suite_seconds(folder, skipped))
        chains = [chain for _, chains in selection.chosen(planned) for chain in chains]
        one = np.zeros((1, 1), dtype=np.int64)
        chains.append([Call(one, one + 1, one)])  # for `cache_shapes`
        for runner in self._precomputed:
            runner.precompute([(None, planned_part(chain)) for chain in chains])

    def _open(self, dtype: str) -> tuple[EagerRunner, Runner]:
        options: dict[str, Any] = {"code": self._code, "factors": self._factors, "skipped": self._skipped}
        model = StreamedRunner(self.folder, dtype, memory=self._memory, **options)
        limit = few_tokens(model.vocab_size) if self._skipped else MAX_TOKENS
        self._precomputed.append(PrecomputedRunner(dtype, model.run_all, self._spill_file, limit))
        return model, self._precomputed[-1]

    def release(self) -> None:
        """Frees matrices that are kept for the next call."""
        self._memory.release()

    def facts(self) -> ModelFacts:
        """As `Eager.facts`; of a model of many layers no cache is held, so there are no calls that need one."""
        facts = super().facts()
        if self._skipped and not facts.keeps_states:
            return replace(facts, parameters=0)  # the smallest limit of synthetic pasts
        return replace(facts, no_edits=NOTHING_HELD, no_synthetic_past=NOTHING_HELD, greedy=None)

    def _with_others(self, truths: dict[str, ExpectedOutput], calls: Sequence[Call]) -> dict[str, ExpectedOutput]:
        """Unchanged: an additional call would read all weights again."""
        return truths

    def _merged(self, chain: Chain) -> None:
        """None: all calls of a scenario run in each layer anyway."""

    def with_prefix(self, entry: PrefixEntry, start: object) -> Eager:
        """Not supported with a prefix.

        Raises:
            UnsupportedInput: always.
        """
        raise UnsupportedInput("a graph with a prefix cannot be verified layer by layer", hint=LOW_MEMORY_HINT)

    def _scaled(self, scaling: WeightScaling) -> Eager:
        """The same model with scaled weights, with all its calls made."""
        selection = replace(self._selection, only=SCALED_SCENARIOS, budget=None)
        options: dict[str, Any] = {"code": self._code, "factors": scaling.factor_of, "skipped": self._skipped}
        return StreamedEager(self.folder, self.dtype, selection=selection, **options)


def few_tokens(vocab_size: int) -> int:
    """Tokens of calls that run together if reading the weights again costs less than holding more logits."""
    return max(256, min(MAX_TOKENS, LOGITS // vocab_size))


def planned_part(chain: Sequence[Call]) -> list[Call]:
    """The calls of a chain before the first whose cache is edited or made up."""
    return list(takewhile(lambda call: call.start is None and call.edit == CacheEdit(), chain))


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
    """A graph of a folder that runs in pieces.

    Args:
        folder: the folder of the graph.
        entry: the graph in the manifest.
        settings: of onnxruntime.
        piece_bytes: maximum size of the weights of a piece, in bytes of float32.
    """
    return PiecedGraph(folder / entry.files[0], settings, entry=entry, file=SpillFile(), piece_bytes=piece_bytes)


def precompute(graphs: Sequence[OrtGraph], planned: PlannedCalls) -> None:
    """Runs the calls of all scenarios on graphs in pieces, each alone and prefill followed by decode.

    Raises:
        UnsupportedInput: a graph cannot be cut into pieces.
    """
    pieced = [graph for graph in graphs if isinstance(graph, PiecedGraph)]
    for graph in pieced:
        graph.precomputed.precompute([(None, chain) for chain in _taken((graph,), planned)])
    roles = {graph.entry.role: graph for graph in pieced}
    if {"prefill", "decode"} <= roles.keys():
        first, then = roles["prefill"], roles["decode"]
        chains = [chain for chain in _taken((first, then), planned) if len(chain) > 1]
        lines = [_handed_over(first, chain) for chain in chains]
        then.precomputed.precompute([line for line in lines if line])


def _taken(graphs: tuple[PiecedGraph, ...], planned: PlannedCalls) -> list[Chain]:
    """The chains that these graphs can run by design."""
    candidate = Candidate("", OrtRunner(graphs[0], graphs[-1]), graphs)
    chains = [chains for _, chains in planned if not any(candidate.refuses(call) for chain in chains for call in chain)]
    parts = [planned_part(chain) for several in chains for chain in several]
    return [part for part in parts if part]


def _handed_over(first: PiecedGraph, chain: Chain) -> CallChain | None:
    """The cache after the first call, and the calls that follow; None if the first call failed."""
    call = chain[0]
    try:
        past = first.run(call.input_ids, call.attention_mask, call.position_ids).present
    except LlmconvError:  # reported by its own checks
        return None
    return (past, chain[1:]) if isinstance(past, SpilledCache) else None
