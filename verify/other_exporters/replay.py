"""ExternalGraphs: repeats a failed call of a report on a copy of the graph with llmconv's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx

from llmconv.runtime.extra_inputs import past_of
from llmconv.runtime.onnxruntime.guard import load_guarded, rename
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.bisect.replay import ReplayedCall
from llmconv.verify.comparison.candidates import GraphProbe
from llmconv.verify.other_exporters.comparison import ExternalCandidate, external_candidates, scaled_settings
from llmconv.verify.other_exporters.external_graph import ExternalCache, ExternalGraph, GraphFile, ModelSizes
from llmconv.verify.other_exporters.port_map import AXES, Binding
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.other_roundings import edited, run_chain, scaling_of
from llmconv.verify.results import Where
from llmconv.verify.scenarios.calls import Call, Chain, SyntheticPast
from llmconv.verify.scenarios.selection import Selection


@dataclass(frozen=True)
class ExternalGraphs:
    """The graphs to verify: one, or a prefill and a decode graph."""

    files: Sequence[GraphFile]
    sizes: ModelSizes
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    named: str = ""  # suffix of the names of their scenarios; other scenarios belong to other copies of the graphs

    @contextmanager
    def replayed(self, where: Where, eager: Eager) -> Iterator[ReplayedCall | None]:
        """Context with the call of a finding; None if it takes more than one run of one graph."""
        if not where.scenario.endswith(self.named):
            yield None
            return
        name = where.scenario.removesuffix(self.named)
        settings = [self.settings for _ in self.files]
        if change := scaling_of(name):
            eager, name = eager.scaled(change), name.removesuffix(f", {change.name}")
            settings = [
                scaled_settings(self.settings, file, self.tensors, change, at_weights=True) for file in self.files
            ]
        yield self._prepared(where, name, settings, eager)

    def _prepared(
        self, where: Where, scenario: str, settings: Sequence[SessionSettings], eager: Eager
    ) -> ReplayedCall | None:
        opened = [file.open(self.sizes, own) for file, own in zip(self.files, settings, strict=True)]
        found = [graph for graph in opened if isinstance(graph, ExternalGraph)]
        candidate = next((one for one in external_candidates(found) if one.name == where.graph), None)
        located = _locate(candidate, scenario, where.step, eager) if candidate else None
        if candidate is None or located is None:
            return None
        chain, step = located
        graph = candidate.external[-1] if step else candidate.external[0]
        steps = run_chain(candidate.runner, chain[:step])
        feeds = _feeds(graph, chain[step], edited(steps[-1].present if steps else None, chain[step]))
        if feeds is None:
            return None
        at = opened.index(graph)
        file, change = self.files[at], settings[at].change
        model = load_guarded(file.path)
        if change:
            change(file.path, model)
        known = {name: content.whole for name, content in file.contents.items() if content.whole}
        names = free_names(model, port_names(graph.binding) | known)
        feeds = {names.get(name, name): array for name, array in feeds.items()}
        tapped = GraphProbe(renamed(model, names, graph.binding), file.path.parent, self.settings)
        return ReplayedCall(tapped, feeds, chain[step], 0, eager.dtype, chain[:step], eager)


def _locate(candidate: ExternalCandidate, scenario: str, step: int, eager: Eager) -> tuple[Chain, int] | None:
    """The chain and the index in it of a step of a scenario, counted over the calls that the graphs support."""
    built = next((chains for row, chains in Selection("full").calls(eager.facts()) if row.name == scenario), [])
    supported = [chain for chain in built if not any(candidate.refuses(call) for call in chain)]
    calls = [(chain, at) for chain in supported for at in range(len(chain))]
    return calls[step] if step < len(calls) else None


def _feeds(graph: ExternalGraph, call: Call, past: Cache | None) -> dict[str, Array] | None:
    """Every input of a graph for one call; None if the call takes several runs or runs cached tokens again."""
    past = ExternalCache.made_up(past) if isinstance(past, SyntheticPast) else past
    before = past.length if past else 0
    rows, new = call.input_ids.shape
    if graph.limits.rings or (before and not graph.keeps_cache) or graph.limits.width(rows, before, new) < new:
        return None
    given = past.given if isinstance(past, ExternalCache) else {}
    return graph.feeds(call.input_ids, call.attention_mask, call.position_ids, given)


def port_names(binding: Binding) -> dict[str, str]:
    """llmconv's names of inputs and outputs by their names in the graph; not for outputs with another order of axes."""
    row = binding.port_map
    names = {row.tokens: "input_ids", row.mask: "attention_mask", row.positions: "position_ids", row.logits: "logits"}
    names |= {port: past_of(name) for name, port in binding.past.items()}
    return names | ({port: name for name, port in binding.present.items()} if row.axes == AXES else {})


def free_names(model: onnx.ModelProto, names: Mapping[str, str]) -> dict[str, str]:
    """The new names by the old ones, without names that another value has; a graph may contain a tied matrix twice."""
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)} - names.keys()
    free: dict[str, str] = {}
    for old, name in names.items():
        if name not in taken:
            free[old] = name
            taken.add(name)
    return free


def renamed(model: onnx.ModelProto, names: Mapping[str, str], binding: Binding) -> onnx.ModelProto:
    """The graph with new value names by the old ones, and llmconv's order of axes in its cache outputs, in place."""
    rename(model.graph, names)
    order = binding.port_map.axes
    for name, port in binding.present.items() if order != AXES else ():
        perm = [order.index(axis) for axis in AXES]
        model.graph.node.append(onnx.helper.make_node("Transpose", [port], [name], name=f"{name}/axes", perm=perm))
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model
