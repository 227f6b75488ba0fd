"""Records every value that the eager model computes in one call, by module, and finds the modules of graph nodes.

The model runs in float64 and in the graph's dtype, with hooks that track the running module and a dispatch mode that
sees the result of every operator. The model is not changed.

llmconv names nodes `model.layers.7.self_attn.q_proj/Gemm`; torch.onnx, optimum and the ORT-GenAI builder
`/model/layers.7/self_attn/q_proj/MatMul`, the builder with different names for some modules. Other exporters record the
module in the node's metadata.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from llmconv.output.manifest import GraphEntry
from llmconv.runtime.eager.cache import to_numpy
from llmconv.runtime.extra_inputs import is_state, past_of
from llmconv.runtime.library_patches import TorchDispatchMode, without_dispatch_modes
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import TENSOR_DTYPES, GraphTransform, SessionSettings
from llmconv.runtime.runner import Cache, Runner
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import GraphProbe
from llmconv.verify.comparison.layer_by_layer import scaled_settings
from llmconv.verify.reference.eager import Eager, stored_start, trained_start
from llmconv.verify.reference.other_roundings import WeightScaling, edited, run_chain, scaling_of
from llmconv.verify.results import Where
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.selection import Selection

SIZE_LIMIT = 1 << 26  # maximum number of elements of a recorded value
IN, OUT = "input", "output"  # `op` of recorded inputs and outputs of modules
MASK = "attention_mask"  # `op` of recorded attention masks of modules

RecordKey = tuple[str, str, tuple[int, ...], int]  # scope, operator, shape, and number of the value among equal ones

ScopeFilter = Callable[[str], bool]  # returns whether the values of a scope are recorded


@dataclass(frozen=True)
class RecordedValue:
    """One value of the eager model."""

    scope: str  # dotted name of the running module
    op: str  # the operator, or `IN`, `OUT`, `MASK` for inputs and outputs of modules
    exact: Array  # from the float64 run; integers and booleans unchanged
    rounded: Array  # from the run in the graph's dtype
    order: int  # position among the values of the call

    @property
    def is_port(self) -> bool:
        """Whether it is an input or output of a module, not the result of an operator."""
        return self.op in (IN, OUT, MASK)


class Recorder(TorchDispatchMode):
    """Keeps the results of operators by scope; `wanted` selects the scopes."""

    def __init__(self, wanted: ScopeFilter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[RecordKey, Array] = {}
        self._scopes, self._wanted = [""], wanted
        self._counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        scope = self._scopes[-1]
        is_weight_view = bool(args) and isinstance(args[0], torch.nn.Parameter) and func.is_view
        if self._wanted(scope) and not is_weight_view:
            for index, tensor in enumerate(_tensors(result)):
                # casts to float64 have no counterpart in the other run
                if not (func is torch.ops.aten._to_copy.default and tensor.is_floating_point()):
                    self.keep(scope, f"{func}:{index}", tensor)
        return result

    def keep(self, scope: str, op: str, tensor: torch.Tensor) -> None:
        """Records one value, unless it is empty, too large or complex."""
        if 0 < tensor.numel() <= SIZE_LIMIT and not tensor.is_complex():
            key = (scope, op, tuple(tensor.shape))
            self._counts[key] += 1
            with without_dispatch_modes():  # the copy must not be recorded
                self.values[*key, self._counts[key]] = to_numpy(tensor).copy()

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name:
                    handles = (
                        module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                        module.register_forward_hook(partial(self._leave, name)),
                    )
                    for handle in handles:
                        stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def _enter(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._wanted(name):
            first = [*_tensors(args), *_tensors(kwargs.get("hidden_states"))][:1]
            for op, tensors in ((IN, first), (MASK, _tensors(kwargs.get(MASK)))):
                for tensor in tensors:
                    self.keep(name, op, tensor)
        self._scopes.append(name)

    def _leave(self, name: str, module: Any, args: Any, result: Any) -> None:
        self._scopes.pop()
        if self._wanted(name):
            for tensor in _tensors(result)[:1]:
                self.keep(name, OUT, tensor)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for item in result if isinstance(item, torch.Tensor)] if isinstance(result, tuple | list) else []


def rounded_to(record: RecordedValue, dtype: np.dtype[Any]) -> Array:
    """The exact value in a dtype; numbers out of range are clipped to its largest number."""
    if record.exact.dtype.kind != "f":
        return record.exact
    largest = float(np.finfo(dtype).max)
    return np.clip(record.exact, -largest, largest).astype(dtype)


ANYWHERE = "?"  # the scope of a node whose name contains no module
OTHER_NAMES = {  # names of modules in models, by their names in exporters
    "attn": ("self_attn", "self_attention", "attention"),
    "self_attn": ("attn", "self_attention", "attention"),
    "layernorm": ("norm", "ln_f", "final_layer_norm"),
    "final_norm_layernorm": ("norm", "ln_f"),
}

METADATA = ("pkg.torch.onnx.name_scopes", "pkg.onnxscript.name_scopes")
"""Metadata keys of torch's and onnxscript's exporters for the modules of a node, outermost first."""

LAYER = re.compile(r"^(?:.*?\.)??(\d+)(?:\.|$)")  # matches the first number in a dotted name


class ModuleScopes:
    """The modules of a model by dotted name, found by the names of graph nodes."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = set(modules) - {""}
        self._found: dict[str, str] = {}

    def of(self, node: onnx.NodeProto) -> str:
        """The module's dotted name, or `ANYWHERE`."""
        recorded = next((entry.value for entry in node.metadata_props if entry.key in METADATA), "")
        key = f"{recorded}\n{node.name}"
        if key not in self._found:
            # `model.layers.7.mlp` of `model.layers.7.mlp/Mul` and of `/model/layers.7/mlp/Mul`
            dotted = node.name.strip("/").rpartition("/")[0].replace("/", ".")
            self._found[key] = self._resolve(recorded_scope(recorded) if recorded else dotted)
        return self._found[key]

    def _resolve(self, scope: str) -> str:
        """The deepest module in the scope; the model's prefix may be missing or longer."""
        parts = scope.split(".") if scope else []
        for start in range(len(parts)):
            found = self._descend(parts[start:])
            if found:
                return found
        return ANYWHERE

    def _descend(self, parts: list[str]) -> str:
        for prefix in ("", "model.", "transformer.", "model.language_model."):
            found, deeper = "", prefix + parts[0]
            for part in [*parts[1:], ""]:
                match = self._known(deeper)
                if not match:
                    break
                found, deeper = match, f"{match}.{part}"
            if found:
                return found
        return ""

    def _known(self, name: str) -> str:
        if name in self._modules:
            return name
        parent, _, last = name.rpartition(".")
        others = (f"{parent}.{other}" if parent else other for other in OTHER_NAMES.get(last, ()))
        return next((other for other in others if other in self._modules), "")


def recorded_scope(names: str) -> str:
    """`model.layers.1.mlp` of `['', 'model', 'model.layers.1', 'mlp']`; a part may include its parents."""
    scope = ""
    for name in re.findall(r"'([^']*)'", names):
        scope = name if not scope or name.startswith(f"{scope}.") else f"{scope}.{name}"
    return scope


def layer_of_scope(scope: str) -> int | None:
    """7 of `model.layers.7.mlp`; None outside the layers."""
    match = LAYER.match(scope)
    return int(match[1]) if match else None


def inside(scope: str, module: str) -> bool:
    """Whether a scope is that module or lies within it."""
    return module == "" or scope == module or scope.startswith(f"{module}.")


class Replayable(Protocol):
    """Verified graphs whose calls can be replayed."""

    def replayed(self, where: Where, eager: Eager) -> AbstractContextManager[ReplayedCall | None]:
        """The call that `where` names; None if it is not a single run of one graph."""


@dataclass(frozen=True)
class _Changes:
    """Changes of a graph in memory, in order, and then that of the session's settings."""

    made: tuple[GraphTransform, ...]
    last: GraphTransform | None

    @classmethod
    def of(cls, settings: SessionSettings) -> _Changes:
        return settings.change if isinstance(settings.change, cls) else cls((), settings.change)

    def __call__(self, path: Path, model: onnx.ModelProto) -> None:
        for change in (*self.made, *([self.last] if self.last else [])):
            change(path, model)


@dataclass(frozen=True)
class JoinedStages(GraphEntry):
    """A graph in `stages` (files) that is opened as one graph, under the name and the first file of its stages."""

    stages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return GraphEntry(self.role, self.stages).name

    def content_key(self, folder: Path) -> object:
        return GraphEntry(self.role, self.stages, self.last_logits, self.postprocess).content_key(folder)


@dataclass(frozen=True)
class VerifiedFolder:
    """A folder of graphs that is verified."""

    path: Path
    entries: Sequence[GraphEntry]  # the graphs in the manifest
    models: Mapping[str, onnx.ModelProto]  # the graphs without weights, by name
    settings: SessionSettings
    named: str = ""  # suffix of the names of its scenarios; other scenarios belong to other copies of the graphs

    def changed(self, change: Callable[[onnx.ModelProto], None], named: str) -> VerifiedFolder:
        """The same folder with graphs that `change` changes in place, in memory, before the change of the settings."""
        models, before = _copies(self.models), _Changes.of(self.settings)
        for model in models.values():
            change(model)
        changes = replace(before, made=(*before.made, lambda path, model: change(model)))
        return replace(self, models=models, settings=replace(self.settings, change=changes), named=named)

    def joined(self, join: Callable[[onnx.ModelProto, Collection[str]], None]) -> VerifiedFolder:
        """The same folder with the stages of each graph as one graph, in memory.

        `join` changes it in place, given the names of values that one stage gives another. Only for a folder that is as
        it was read; without stages it is this one.
        """
        whole = {entry.files[0]: entry.name for entry in self.entries if len(entry.files) > 1}
        if not whole:
            return self
        models = _copies(self.models)
        for entry in self.entries:
            if entry.files[0] in whole:
                stages = [load_guarded(path).graph for path in entry.paths(self.path)]
                made = {port.name for stage in stages for port in stage.output}
                join(models[entry.name], {port.name for stage in stages for port in stage.input} & made)

        def replaced(path: Path, model: onnx.ModelProto) -> None:
            if path.name in whole:
                model.CopyFrom(models[whole[path.name]])

        entries = [
            JoinedStages(**{**vars(one), "files": one.files[:1]}, stages=one.files) if len(one.files) > 1 else one
            for one in self.entries
        ]
        settings = replace(self.settings, change=_Changes((replaced,), self.settings.change))
        return replace(self, entries=entries, models=models, settings=settings)

    @contextmanager
    def replayed(self, where: Where, eager: Eager) -> Iterator[ReplayedCall | None]:
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
    """One call, ready to run again."""

    probe: GraphProbe
    feeds: Mapping[str, Array]
    call: Call
    virtual: int  # number of prefix tokens in the cache
    dtype: str  # numpy name of the graph's dtype
    chain: Chain  # the calls before it
    eager: Eager

    @property
    def model(self) -> torch.nn.Module:
        return self.eager.models[1]

    def record(self, wanted: ScopeFilter) -> list[RecordedValue]:
        """The values that the eager model computes in both dtypes, in the wanted scopes, in the order of float64."""
        sides = zip(self.eager.runners, self.eager.models, strict=True)
        exact, rounded = (self._recorded(runner, model, wanted).values for runner, model in sides)
        return [
            RecordedValue(key[0], key[1], array, rounded[key], order)
            for order, (key, array) in enumerate(exact.items())
            if key in rounded
        ]

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
        tokens = tokens.after(graph.entry.prefix.length, graph.entry.prefix.first_position)
    given = {**tokens.named, **graph.embed(call.input_ids), **graph.extra_values(call.extras).of(tokens)}
    if past:
        given |= {past_of(name): array for name, array in past.arrays().items()}
    else:
        given |= {name: _empty(graph, name, len(call.input_ids)) for name in graph.past_names}
    return {name: given[name] for name in graph.inputs if name in given}


def _empty(graph: OrtGraph, name: str, batch: int) -> Array:
    shape = [
        axis if isinstance(axis, int) else int(at != 2 or is_state(name)) for at, axis in enumerate(graph.inputs[name])
    ]
    return np.zeros([batch, *shape[1:]], TENSOR_DTYPES.get(graph.types[name], np.float32))
