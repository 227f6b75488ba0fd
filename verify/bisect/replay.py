"""ReplayedCall: runs a failed call again, on a graph probe and on the eager model with a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx
import torch

from llmconv.runtime.cache_names import is_state, past_of
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.onnxruntime.device import TENSOR_DTYPES
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.runner import OrtRunner, after_prefix
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache, Runner
from llmconv.tensors import Array
from llmconv.verify.bisect.recording import RecordedValue, Recorder, ScopeFilter, paired
from llmconv.verify.comparison.graph_probe import GraphProbe
from llmconv.verify.comparison.scaled_weights import scaled_settings
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.other_roundings import edited, run_chain
from llmconv.verify.reference.prefix import stored_start, trained_start
from llmconv.verify.reference.weight_scaling import WeightScaling, scaling_of
from llmconv.verify.results.report import Where
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.selection import Selection


class Replayable(Protocol):
    """Verified graphs whose calls can be replayed."""

    def replayed(self, where: Where, eager: Eager) -> AbstractContextManager[ReplayedCall | None]:
        """The call that `where` names; None if it is not a single run of one graph."""


@dataclass(frozen=True)
class VerifiedFolder:
    """A folder of graphs that is verified.

    Attributes:
        entries: the graphs in the manifest.
        models: the graphs without weights, by name.
        named: suffix of the names of its scenarios; other scenarios belong to other copies of the graphs.
    """

    path: Path
    entries: Sequence[GraphEntry]
    models: Mapping[str, onnx.ModelProto]
    settings: SessionSettings
    named: str = ""

    def changed(self, change: Callable[[onnx.ModelProto], None], named: str) -> VerifiedFolder:
        """The same folder with graphs that `change` changes in place, in memory, before the change of the settings."""
        models, before = _copies(self.models), self.settings.change
        for model in models.values():
            change(model)

        def both(path: Path, model: onnx.ModelProto) -> None:
            change(model)
            if before:
                before(path, model)

        return replace(self, models=models, settings=replace(self.settings, change=both), named=named)

    @contextmanager
    def replayed(self, where: Where, eager: Eager) -> Iterator[ReplayedCall | None]:
        """See `Replayable`."""
        if not where.scenario.endswith(self.named):
            yield None
            return
        name, folder = where.scenario.removesuffix(self.named).partition(", optimization ")[0], self
        if scaling := scaling_of(name):
            eager, name, folder = eager.scaled(scaling), name.removesuffix(f", {scaling.name}"), self._scaled(scaling)
        yield _prepare(where, name, folder, eager, scaled=bool(scaling))

    def _scaled(self, scaling: WeightScaling) -> VerifiedFolder:
        """The folder on scaled weights, whose inner values are those of the scaled model."""
        settings = scaled_settings(self.settings, self.path, scaling, at_weights=True)
        alone = scaled_settings(replace(self.settings, change=None), self.path, scaling, at_weights=True)
        models = _copies(self.models)
        for name, model in models.items():
            alone.change(self.path / name, model)  # type: ignore[misc]
        return replace(self, settings=settings, models=models)


def _copies(models: Mapping[str, onnx.ModelProto]) -> dict[str, onnx.ModelProto]:
    return {name: onnx.ModelProto.FromString(model.SerializeToString()) for name, model in models.items()}


@dataclass(frozen=True)
class ReplayedCall:
    """One call, ready to run again.

    `virtual` is the number of prefix tokens in the cache, `dtype` the numpy name of the graph's dtype, and `chain` has
    the calls before it.
    """

    probe: GraphProbe
    feeds: Mapping[str, Array]
    call: Call
    virtual: int
    dtype: str
    chain: Chain
    eager: Eager

    @property
    def model(self) -> torch.nn.Module:
        """The eager model in the graph's dtype."""
        return self.eager.models[1]

    def record(self, wanted: ScopeFilter) -> list[RecordedValue]:
        """The values that the eager model computes in the call, in the wanted scopes."""
        sides = zip(self.eager.runners, self.eager.models, strict=True)
        exact, rounded = (self._recorded(runner, model, wanted).values for runner, model in sides)
        return paired(exact, rounded)

    def outputs(self) -> dict[str, RecordedValue]:
        """The eager model's logits and cache after the call, by output name."""
        steps = [run_chain(runner, [*self.chain, self.call])[-1] for runner in self.eager.runners]
        exact, rounded = ({"logits": step.logits, **step.present.arrays()} for step in steps)
        return {name: RecordedValue("", name, array, rounded[name], 0) for name, array in exact.items()}

    def _recorded(self, runner: Runner, model: torch.nn.Module, wanted: ScopeFilter) -> Recorder:
        past = edited(run_chain(runner, self.chain)[-1].present if self.chain else None, self.call)
        recorder, run = Recorder(wanted), runner.decode if self.chain else runner.prefill
        with recorder.watching(model):
            run(*self.call.tokens.arrays, past, self.call.extras)
        return recorder


def _prepare(where: Where, scenario: str, folder: VerifiedFolder, eager: Eager, *, scaled: bool) -> ReplayedCall | None:
    path = folder.path
    entries = [entry for name in where.graph.split("+") for entry in folder.entries if entry.name == name]
    if not entries:
        return None
    prefix = entries[0].prefix
    if prefix:
        stored = stored_start(path, prefix, len(eager.cache_shapes()) // 2)
        eager = eager.with_prefix(prefix, stored if scaled else trained_start(path, prefix))
    eager = eager.with_fixed(entries[0].fixed_inputs)
    built = next((chains for row, chains in Selection("full").calls(eager.facts()) if row.name == scenario), [])
    places = [(chain, step) for chain in built for step in range(len(chain))]
    if where.step >= len(places):
        return None
    chain, step = places[where.step]
    graphs = [open_graph(path, entry, folder.settings) for entry in entries]
    graph = graphs[-1] if step else graphs[0]
    if graph.sizes:
        return None
    steps = run_chain(OrtRunner(graphs[0], graphs[-1]), chain[:step])
    past = edited(steps[-1].present if steps else None, chain[step])
    feeds = feeds_of(graph, chain[step], past)
    probe = GraphProbe(folder.models[graph.name], path, folder.settings)
    virtual = prefix.length if prefix else 0
    return ReplayedCall(probe, feeds, chain[step], virtual, eager.dtype, chain[:step], eager)


def feeds_of(graph: OrtGraph, call: Call, past: Cache | None) -> dict[str, Array]:
    """All inputs of a graph with a growing cache, for one call; a `past` of None is an empty cache."""
    tokens = call.tokens
    if graph.entry.prefix and past:
        tokens = ModelCall(call.input_ids, *after_prefix(call.attention_mask, call.position_ids, graph.entry.prefix))
    given = {**vars(tokens), **graph.embed(call.input_ids), **graph.extra_values(call.extras).of(tokens)}
    if past:
        given |= {past_of(name): array for name, array in past.arrays().items()}
    else:
        given |= {name: _empty(graph, name, len(call.input_ids)) for name in graph.past_names}
    return {name: given[name] for name in graph.inputs if name in given}


def _empty(graph: OrtGraph, name: str, batch: int) -> Array:
    """Empty keys and values, or a state of zeros."""
    shape = [
        axis if isinstance(axis, int) else int(at != 2 or is_state(name)) for at, axis in enumerate(graph.inputs[name])
    ]
    return np.zeros([batch, *shape[1:]], TENSOR_DTYPES.get(graph.types[name], np.float32))
