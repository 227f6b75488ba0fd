"""Checks of single layers: every layer of a graph by itself, on the hidden state that the eager model makes.

The eager model in float64 runs a few tokens layer by layer; each layer gets the result of the one before, rounded to
the graph's dtype. The same numbers are the input of the same layer in the eager model in that dtype, which gives the
rounding noise, and of the layer that is cut out of the graph. So errors do not add up, and an error belongs to the
layer that it is found in. The weights of one layer are in memory at a time. Three rows run together: tokens after
padding, so that the past is hidden; noise as large as the hidden state; and tokens after a made-up past.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.memory import trim
from llmconv.progress import status
from llmconv.runtime.extra_inputs import (
    BATCH,
    SEQUENCE,
    ExtraInput,
    ExtraValues,
    ModelCall,
    is_past,
    is_present,
    is_state,
    layer_of,
    present_of,
)
from llmconv.runtime.low_memory.pieced_graph import (
    DeclaredValue,
    GraphPiece,
    ValueTypes,
    cut_graph,
    open_piece,
    split_products,
)
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.graph import refusing
from llmconv.runtime.onnxruntime.guard import nodes, values_read_by
from llmconv.runtime.onnxruntime.session_settings import INPUT_DTYPES, SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import BufferedSession, FixedSizes, as_input
from llmconv.runtime.onnxruntime.time_limit import LimitedSession
from llmconv.runtime.runner import Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.induction import LAYERS, PARTS, Induction, with_names
from llmconv.verify.reference.eager import ComputedModel
from llmconv.verify.reference.other_roundings import rows_of, valid_rows
from llmconv.verify.results import Check, Checks, Report, Statement, Where, problem_of
from llmconv.verify.scenarios.calls import Call, SyntheticPast, drawn
from llmconv.verify.sigma import GATES, ExpectedOutput, Measure, NoiseFloor, cache_rows, measure, state_rows

NAME = "layers by themselves"
PART_BYTES = 1 << 28  # maximum size of the weights of a graph in memory, in bytes of float32; a larger product is split
HIDDEN = "hidden state"


@dataclass
class Drift:
    """RMS errors of the layers, relative to hidden states, of the graph and of the eager model in its dtype."""

    graph: list[float]
    eager: list[float]

    def text(self) -> str:
        with np.errstate(over="ignore"):
            graph, eager = (float(np.sqrt(np.sum(np.square(side)))) for side in (self.graph, self.eager))
        return (
            f"over {len(self.graph)} layers, errors of the graph add up to {graph:.1e} of the hidden state, those of "
            f"the eager model to {eager:.1e} (root of the sum of squares; growth from layer to layer is not included)"
        )


@dataclass(frozen=True)
class SingleLayerChecks:
    """Compares the layers of graphs, each by itself; `drift` receives their errors.

    `code` is the reference's folder where its own code is trusted; `named` is a suffix of the names of the checks.
    """

    induction: Induction
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    reference: ComputedModel
    dtype: str
    settings: SessionSettings
    code: Path | None
    named: str
    drift: Drift

    def checks(self) -> Checks:
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone

        numbers = self.induction.run
        names = {number: self.induction.classes.names[number] for number in numbers}
        skipped = self.induction.left_out(numbers)
        runs: dict[int, LayerRuns] = {}  # by the number of past tokens
        extras: Mapping[str, ExtraInput] = {}
        for graph, model in self.distinct().items():
            layers = GraphLayers.of(model, self.induction.tensors)
            sizes = fixed_sizes(model)
            past = 0 if sizes and sizes.refusal(1, PAST, NEW) else PAST
            options: dict[str, Any] = {"code": self.code, "weights": self.reference.weights}
            options |= {"skipped": skipped, "extra_inputs": extra_inputs_of(self.reference.folder)}
            opened: Callable[[str], StreamedRunner] = partial(StreamedRunner, self.reference.folder, **options)
            try:
                if past not in runs:
                    first = opened("float32")
                    extras = {n: one for n, one in first.extra_inputs.items() if n in layers.index.inputs}
                    call = made_up_call(layers, first.vocab_size, extras, past)
                    runs[past] = run_eager(opened, call, list(names.values()), self.dtype)
                runner = PartRunner(graph, model, self.folder, self.settings, PART_BYTES)
                run = GraphRun(layers, runner, runs[past], names, extras)
                if sizes:
                    run = BufferedGraphRun(layers, runner, runs[past], names, extras, sizes)
                yield from self._of_graph(graph, run)
            except UnsupportedInput:
                raise
            except LlmconvError as error:
                yield [Check(f"{NAME}{self.named}", graph, "logits", verdict="fail", detail=problem_of(error))]

    def distinct(self) -> dict[str, onnx.ModelProto]:
        found: dict[bytes, str] = {}
        for name, model in self.models.items():
            if any(is_past(port.name) for port in model.graph.input):
                found.setdefault(model.SerializeToString(deterministic=True), name)
        return {name: self.models[name] for name in found.values()}

    def _of_graph(self, name: str, run: GraphRun) -> Iterator[list[Check]]:
        expected, blank = ExpectedLayers(run.runs, self.dtype), Check(f"{NAME}{self.named}", name, "")
        first = run.names[min(run.names)]
        yield [self._check(blank, HIDDEN, expected.hidden(first, before=True), rows) for rows in run.start().values()]
        for at, (number, layer) in enumerate(run.names.items()):
            status(f"layer {number} by itself, {at + 1} of {len(run.names)}")
            found = run.layer(number)
            yield [self._hidden(blank, number, expected.hidden(layer), found.pop("hidden"), run)] + [
                self._cached(blank, output, expected, array, run.runs) for output, array in found.items()
            ]
        logits, truth = run.end(), expected.cached("logits")
        one = logits.shape[1] == 1 and truth.exact.shape[1] > 1  # whether it may be is a check of structure
        yield [self._check(blank, "logits", truth.last() if one else truth, logits, tokens=True)]

    def _hidden(self, blank: Check, number: int, truth: ExpectedOutput, rows: Array, run: GraphRun) -> Check:
        size = float(np.sqrt(np.mean(np.square(truth.exact[truth.valid])))) or 1.0
        error = np.where(truth.valid[..., None], np.nan_to_num(rows.astype(np.float64) - truth.exact), 0.0)
        with np.errstate(over="ignore"):  # a layer that overflows has an infinite error
            self.drift.graph.append(float(np.sqrt(np.mean(np.square(error)))) / size)
        self.drift.eager.append(truth.total_noise / size)
        return self._check(blank, f"{HIDDEN} after layer {number}", truth, rows)

    def _cached(self, blank: Check, output: str, expected: ExpectedLayers, array: Array, runs: LayerRuns) -> Check:
        """The check of a cache output: the past unchanged, new keys, values and states as the model's."""
        start = runs.call.start
        if start and not start.kept_by({output: array}):
            return replace(blank, output=output, verdict="fail", detail="the past differs from that which was given")
        rows = state_rows(array) if is_state(output) else cache_rows(array[:, :, runs.call.known :])
        return self._check(blank, output, expected.cached(output), rows)

    def _check(self, blank: Check, output: str, truth: ExpectedOutput, rows: Array, *, tokens: bool = False) -> Check:
        found: Measure = measure(truth, rows, tokens=tokens and rows.shape == truth.exact.shape)
        return fold(blank, output, [found], GATES[self.dtype])


def statements(induction: Induction, report: Report, drift: Drift | None) -> list[Statement]:
    """The parts of the proof, shown or not by the report's checks; `drift` is None if no numbers were compared."""
    count = len(induction.classes.names)
    classes = f"{len(induction.kept)} class{'es' * (len(induction.kept) > 1)}"
    found = [
        _shown(report, "structure", LAYERS, f"{count} layers of {classes}, alike node by node"),
        _shown(report, "weights", "weights", "each initializer is the tensor of the model in its place"),
        _shown(report, "composition", PARTS, "the parts are the file, and values cross only at the cuts"),
    ]
    if drift is not None:
        found += [_base(induction, report), _step(induction, report, drift, count)]
    shown = induction.classes.graphs.keys() <= {check.graph for check in report.checks if check.name == LAYERS}
    return found if shown else [Statement(one.name, False, one.text) for one in found]


def _shown(report: Report, name: str, check: str, text: str) -> Statement:
    return _of(name, [one for one in report.checks if one.name == check and one.graph.endswith(".onnx")], text)


def _of(name: str, checks: Sequence[Check], text: str) -> Statement:
    shown = any(check.verdict == "pass" for check in checks) and all(check.verdict != "fail" for check in checks)
    return Statement(name, shown, text)


def _base(induction: Induction, report: Report) -> Statement:
    kept = induction.kept
    shown = ", ".join(map(str, kept[:6])) + (f" and {len(kept) - 6} more" if len(kept) > 6 else "")
    checks = [check for check in report.checks if check.is_measured and not check.name.startswith(NAME)]
    scenarios, compared = {one.name for one in checks}, {name for one in checks for name in one.graph.split("+")}
    which = f"layer{'s' * (len(kept) > 1)} {shown} (one of each class), with the parts before and after"
    found = _of("base", checks, f"{which}, in {len(scenarios)} scenarios")
    return found if induction.classes.graphs.keys() <= compared else Statement(found.name, False, found.text)


def _step(induction: Induction, report: Report, drift: Drift, count: int) -> Statement:
    numbers = induction.run
    which = f"all {count} layers" if len(numbers) == count else f"{len(numbers)} of {count} layers"
    checks = [check for check in report.checks if check.name.startswith(NAME)]
    return _of("step", checks, f"{which}, each by itself; {drift.text()}")


def unseen_of(induction: Induction) -> list[str]:
    left = len(induction.classes.names) - len(induction.run)
    found = ["rounding errors that grow from layer to layer"]
    return found + (
        [f"wrong numbers of {left} layer{'s' * (left > 1)}, whose weights alone were audited"] if left else []
    )


AFTER = re.compile(rf"^{HIDDEN} after layer (\d+)$")


def narrowed(where: Where | None, report: Report) -> Where | None:
    """The location of a failure with its layer, by the report's checks and odd layers; None if nothing failed."""
    if where is None:
        return None
    failed = [check for check in report.checks if check.verdict == "fail"]
    if layers := _of_weights(failed):
        return replace(where, layer=layers[0])
    if report.odd_layers:
        number, text = next(iter(report.odd_layers.items()))
        return replace(where, layer=number, text=f"{text}; {where.text}" if text not in where.text else where.text)
    found = {_number(check) for check in failed}
    numbers = sorted(at for at in found if at is not None)
    if not numbers:
        return where
    more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
    return replace(where, layer=numbers[0], text=f"layer {numbers[0]}{more} by itself; {where.text}")


def _of_weights(failed: Sequence[Check]) -> list[int]:
    names = [name for check in failed if check.name == "weights" for name in re.findall(r"`([^`]+)`", check.detail)]
    found = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    return [int(match[1]) for match in found if match]


def _number(check: Check) -> int | None:
    if not check.name.startswith(NAME):
        return None
    match = AFTER.match(check.output)
    return int(match[1]) if match else layer_of(check.output)


NEW, PAST = 4, 3  # tokens of the call, and of its past
PADDED, NOISE = 0, 1  # rows of the call; the third has neither padding nor noise
SEED = 22


@dataclass
class HiddenStates:
    """The hidden states of one run of the eager model."""

    # the input of each layer, by its name, float64 [rows, tokens, features]; numbers of the graph's dtype
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # the hidden state that the model itself made there
    after: dict[str, torch.Tensor] = field(default_factory=dict)  # what each layer computed


@dataclass(frozen=True)
class LayerRuns:
    """The eager model's runs of single layers."""

    call: Call  # tokens, mask, positions and past
    exact: HiddenStates  # hidden states in float64
    rounded: HiddenStates  # in the graph's dtype, from the same inputs
    steps: tuple[Step, Step]
    last: torch.Tensor  # the input of the part after the layers, float64


def made_up_call(graph: GraphLayers, vocab_size: int, extras: Mapping[str, ExtraInput], length: int = PAST) -> Call:
    """The call that all layers run, after a past of `length`; models with states get no past, and so no padding."""
    ports = {name: port for name, port in graph.index.inputs.items() if is_past(name)}
    shapes = {present_of(name): _sizes(port) for name, port in ports.items()}
    length = 0 if any(is_state(name) for name in shapes) else length
    mask = np.ones((3, NEW + length), dtype=np.int64)
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, vocab_size, (3, NEW))
    past = None
    if length:
        mask[PADDED, :length] = 0
        past = SyntheticPast(shapes, 3, length, (0, 1), SEED)
    call = Call(ids, mask, default_positions(mask, NEW), start=past, known=length)
    return drawn([call], extras, rng, both_ways=True)[0]


def _sizes(port: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(axis.dim_value or 1 for axis in port.type.tensor_type.shape.dim)


def run_eager(open_model: Callable[[str], StreamedRunner], call: Call, names: Collection[str], dtype: str) -> LayerRuns:
    """Runs the layers of the eager model in float64 and in the graph's dtype.

    `open_model` opens it in a dtype, without the layers that are not run; `names` are the modules of those that are, in
    order.
    """
    exact, kind = HiddenStates(), getattr(torch, dtype)
    steps = [_run(open_model("float64"), call, names, exact, partial(_with_noise, exact, kind))]
    gc.collect()  # modules refer to each other
    last = exact.after[list(names)[-1]].to(kind).double()
    rounded = HiddenStates(given=exact.given)
    steps.append(_run(open_model(dtype), call, names, rounded, lambda name, hidden: exact.given[name], last))
    return LayerRuns(call, exact, rounded, (steps[0], steps[1]), last)


Enter = Callable[[str, torch.Tensor], torch.Tensor]


def _run(
    model: StreamedRunner,
    call: Call,
    names: Collection[str],
    states: HiddenStates,
    enter: Enter,
    last: torch.Tensor | None = None,
) -> Step:
    """One run, noted in `states`; every layer reads what `enter` returns, and the part after the layers `last`."""
    for name in names:
        layer = model.model.get_submodule(name)
        end = name == list(names)[-1]
        layer.forward = partial(_watched, layer.forward, name, enter, states, last if end else None, end)
    return model.prefill(*call.tokens.arrays, call.start, call.extras)


def _watched(
    forward: Callable[..., Any],
    name: str,
    enter: Enter,
    states: HiddenStates,
    last: torch.Tensor | None,
    end: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    states.before[name] = hidden.detach().double()
    given = enter(name, hidden).to(hidden.dtype)
    result = forward(given, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": given})
    after = result[0] if isinstance(result, tuple) else result
    states.after[name] = after.detach().double()
    if not end:
        return result
    shown = last if last is not None else enter(AFTER_NORM, after)
    shown = shown.to(after.dtype)
    return (shown, *result[1:]) if isinstance(result, tuple) else shown


AFTER_NORM = "after the layers"


def _with_noise(states: HiddenStates, dtype: torch.dtype, name: str, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden state as numbers of a dtype, with noise of its size in one row."""
    given = hidden.detach().double()
    if name != AFTER_NORM:
        given = given.clone()
        others = torch.cat([given[:NOISE], given[NOISE + 1 :]])
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.randn(given[NOISE].shape, generator=generator, dtype=torch.float64)
        given[NOISE] = noise * (others.square().mean().sqrt() or 1.0)
    given = given.to(dtype).double()
    states.given[name] = given
    return given


class ExpectedLayers:
    """What each layer must compute, from the eager runs; `dtype` is that of the graph."""

    def __init__(self, runs: LayerRuns, dtype: str) -> None:
        self._runs, self._floor = runs, NoiseFloor(dtype, runs.last.shape[-1])
        self._cached = [rows_of(step, runs.call.known) for step in runs.steps]

    def hidden(self, name: str, *, before: bool = False) -> ExpectedOutput:
        sides = [states.before if before else states.after for states in (self._runs.exact, self._runs.rounded)]
        exact, rounded = (side[name].numpy() for side in sides)
        return self._floor.truth("hidden state", exact, rounded, self._runs.call.valid)

    def cached(self, output: str) -> ExpectedOutput:
        """A cache output, or the logits."""
        exact, rounded = (side[output] for side in self._cached)
        name = output if output == "logits" else output.rpartition(".")[2]
        return self._floor.truth(name, exact, rounded, valid_rows(self._runs.call, output))


def feeds_of(call: Call, graph: GraphLayers, extras: Mapping[str, ExtraInput]) -> dict[str, Array]:
    given: dict[str, Array] = {
        "input_ids": call.input_ids,
        "attention_mask": call.attention_mask,
        "position_ids": call.position_ids,
        **ExtraValues(extras, call.extras or {}).of(call.tokens),
    }
    past: Mapping[str, Array] = call.start.arrays() if call.start else {}
    for name, port in graph.index.inputs.items():
        if is_past(name):
            empty = [len(call.input_ids), *_sizes(port)[1:]]
            if not is_state(name):
                empty[2] = 0
            given[name] = past.get(present_of(name), np.zeros(empty, np.float32))
    return {name: array for name, array in given.items() if name in graph.index.inputs}


@dataclass(frozen=True)
class GraphRun:
    """The parts of a graph, run on the call, with the hidden states of the eager runs as inputs of the layers."""

    graph: GraphLayers
    runner: PartRunner
    runs: LayerRuns
    names: Mapping[int, str]
    extras: Mapping[str, ExtraInput]

    def start(self) -> dict[str, Array]:
        """Runs the part before the layers; returns the hidden state that it makes, unless that is an input."""
        graph, call = self.graph, self.runs.call
        first = graph.layers[0].entry
        wanted = {name for layer in graph.layers if layer.number in self.names for name in self._read(layer.nodes)}
        wanted |= self._read(graph.epilogue) | {first}
        made = {name for node in graph.nodes_of(graph.prologue) for name in node.output}
        self.runner.feed(feeds_of(call, graph, self.extras))
        found = self.runner.run(graph.prologue, sorted(wanted & made))
        return {name: array for name, array in found.items() if name == first}

    def layer(self, number: int) -> dict[str, Array]:
        """Runs one layer; returns the hidden state after it as `hidden`, and its cache outputs."""
        layer = self.graph.layers[number]
        given = {layer.entry: self.runs.exact.given[self.names[number]].numpy()}
        self.runner.feed(given, like=self.graph.layers[0].exit)  # the layer before may not have run
        cached = [name for name in self.graph.index.outputs if is_present(name) and layer_of(name) == number]
        found = self.runner.run(layer.nodes, [layer.exit, *cached])
        return {"hidden": found[layer.exit], **{name: found[name] for name in cached}}

    def end(self) -> Array:
        """Runs the part after the layers; returns the logits."""
        last = {self.graph.layers[-1].exit: self.runs.last.numpy()}
        self.runner.feed(last, like=self.graph.layers[0].exit)
        return self.runner.run(self.graph.epilogue, ["logits"])["logits"]

    def _read(self, nodes: Collection[int]) -> set[str]:
        return {name for at in nodes for name in self.graph.index.reads[at]}


def too_small(model: onnx.ModelProto) -> str:
    """Why a graph has no room for the call of single layers; empty if it has."""
    sizes = fixed_sizes(model)
    return sizes.refusal(1, 0, NEW) if sizes else ""


def fixed_sizes(model: onnx.ModelProto) -> FixedSizes | None:
    """The sizes of a graph that updates fixed cache buffers in place; None for one whose cache grows."""
    sides = ([DeclaredValue.of(port) for port in side] for side in (model.graph.input, model.graph.output))
    inputs, outputs = ({port.name: port.shape for port in side} for side in sides)
    single = any(node.op_type == "GroupQueryAttention" for node in nodes(model))
    return FixedSizes.of(inputs, outputs, single)


@dataclass(frozen=True)
class RowsOfPast:
    """Some rows of a past of one layer."""

    given: Mapping[str, Array]
    length: int

    def arrays(self) -> dict[str, Array]:
        return dict(self.given)


@dataclass(frozen=True)
class BufferedGraphRun(GraphRun):
    """The parts of a graph with fixed cache buffers, run as its runner runs the whole: in calls of its sizes."""

    sizes: FixedSizes

    def start(self) -> dict[str, Array]:
        first = self.graph.layers[0].entry
        if first in self.graph.index.inputs:
            return {}
        return {first: self._run(self.graph.prologue, first)[first]}

    def layer(self, number: int) -> dict[str, Array]:
        layer = self.graph.layers[number]
        hidden = self.runs.exact.given[self.names[number]].numpy()
        found = self._run(layer.nodes, layer.exit, layer.entry, hidden)
        return {"hidden": found.pop(layer.exit), **found}

    def end(self) -> Array:
        exit_, last = self.graph.layers[-1].exit, self.runs.last.numpy()
        return self._run(self.graph.epilogue, "logits", exit_, last)["logits"]

    def _run(
        self, numbers: Collection[int], result: str, entry: str = "", hidden: Array | None = None
    ) -> dict[str, Array]:
        """The result of a part [rows, tokens, features], and its caches of past and new tokens, by name."""
        part = self.runner.part_of(numbers, result, entry)
        call = self.runs.call
        extras, given = dict(self.extras), dict(call.extras or {})
        if hidden is not None:
            extras[ENTRY] = ExtraInput(ENTRY, (BATCH, SEQUENCE, hidden.shape[-1]), "float32", values=1.0)
            with np.errstate(over="ignore"):  # after a layer that overflows, the hidden state is infinite
                given[ENTRY] = hidden.astype(np.float32)
        session = self.runner.open(part, {ENTRY: hidden.shape[-1]} if hidden is not None else {})
        run = BufferedSession(session, self.sizes, [result], lambda ids, placed: {"input_ids": ids}, garbage=True)
        names = [present_of(name) for name in part.inputs if is_past(name)]
        past = call.start.arrays() if call.start else {}
        # `GroupQueryAttention` reads several tokens after a past in a batch of one only
        rows = 1 if self.sizes.single else self.sizes.rows or len(call.input_ids)
        found: list[dict[str, Array]] = []
        for first in range(0, len(call.input_ids), rows):
            at = slice(first, first + rows)
            tokens = ModelCall(call.input_ids[at], call.attention_mask[at], call.position_ids[at])
            cut = {name: _rows_of(extras[name], array, at) for name, array in given.items()}
            start = RowsOfPast({name: past[name][at] for name in names}, call.known) if past else None
            with self.runner.refusing():
                results, cache = run.run(tokens, ExtraValues(extras, cut), start)
            found.append({result: results[0], **(cache.arrays() if names else {})})
        trim()
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


ENTRY = "entering_hidden_state"  # the name of the hidden state that a part of a graph reads


def _rows_of(extra: ExtraInput, array: Array, at: slice) -> Array:
    axis = extra.axes.index(BATCH) if BATCH in extra.axes else None
    return array if axis is None else array[(slice(None),) * axis + (at,)]


class PartRunner:
    """Runs parts of a graph on values that are given or that other parts computed.

    `limit` is the maximum size of the weights in memory, in bytes of float32; a single larger matrix is allowed.
    """

    def __init__(self, name: str, model: onnx.ModelProto, folder: Path, settings: SessionSettings, limit: int) -> None:
        self._name = name  # of the graph in messages
        self._model, self._folder, self._limit = model, folder, limit
        self._settings = replace(settings, arena=False)
        self._nodes = list(model.graph.node)
        self._constants = {node.output[0]: node for node in self._nodes if node.op_type == "Constant"}
        declared = [DeclaredValue.of(port) for port in model.graph.input]
        self._types: ValueTypes = {port.name: (port.type, port.shape) for port in declared}
        self._hidden = "tensor(float)"  # the type of hidden states, after the part before the layers has run
        self._values: dict[str, ort.OrtValue] = {}

    def feed(self, given: Mapping[str, Array], like: str = "") -> None:
        """Sets values by name, cast to the dtype of the value, or of `like` where no part has computed it."""
        for name, array in given.items():
            if name not in self._types and like in self._types:
                self._types = {**self._types, name: self._types[like]}
            kind = self._types[name][0] if name in self._types else ""
            dtype = INPUT_DTYPES.get(kind, array.dtype)
            with np.errstate(over="ignore"):  # after a layer that overflows, the hidden state is infinite
                self._values[name] = as_input(array, dtype)

    def run(self, nodes: Collection[int], outputs: Sequence[str]) -> dict[str, Array]:
        """Runs the part of these node indices, whose outputs others can read; MalformedInput if that fails."""
        part = self._part(nodes, outputs)
        split_products(part, self._limit)
        for piece in cut_graph(part, self._limit):
            with self.refusing():
                session = open_piece(piece, self._types, self._folder, self._settings, self._limit)
                self._types |= {arg.name: (arg.type, arg.shape) for arg in session.get_outputs()}
                feeds = {name: self._values[name] for name in piece.inputs}
                self._values |= zip(piece.outputs, session.run_with_ort_values(piece.outputs, feeds), strict=True)
                del session
            trim()
        return {name: self._values[name].numpy() for name in outputs}

    def refusing(self) -> AbstractContextManager[None]:
        """Turns errors of onnxruntime into MalformedInput."""
        return refusing(self._name, "run `llmconv verify --method whole`")

    def part_of(self, numbers: Collection[int], result: str, entry: str) -> GraphPiece:
        """A part with what it reads of other parts but the hidden state `entry`, which is its input `ENTRY`.

        Its outputs are `result` and its caches.
        """
        producers = {name: at for at, node in enumerate(self._nodes) for name in node.output if name and name != entry}
        known, open_numbers = set(numbers), list(numbers)
        while open_numbers:
            read = {producers[name] for name in values_read_by(self._nodes[open_numbers.pop()]) if name in producers}
            open_numbers += read - known
            known |= read
        chosen = [with_names(self._nodes[at], {entry: ENTRY} if entry else {}) for at in sorted(known)]
        values = {name for node in chosen for name in values_read_by(node)}
        made = {name for node in chosen for name in node.output}
        inputs = [port.name for port in self._model.graph.input if port.name in values and port.name != entry]
        outputs = [result, *(port.name for port in self._model.graph.output if is_present(port.name))]
        return GraphPiece(
            self._model,
            tuple(chosen),
            (*inputs, *([ENTRY] if ENTRY in values else [])),
            tuple(name for name in outputs if name in made),
            weight_bytes=0,
            shapes_only=frozenset(),
        )

    def open(self, part: GraphPiece, features: Mapping[str, int]) -> LimitedSession:
        """A session of a part; `features` is the size of the hidden state by name. MalformedInput if that fails."""
        tokens = next(shape for name, (_, shape) in self._types.items() if name in ("input_ids", "inputs_embeds"))
        hidden = {name: (self._hidden, [*tokens[:2], size]) for name, size in features.items()}
        with self.refusing():
            session = open_piece(part, {**self._types, **hidden}, self._folder, self._settings, self._limit)
        if not features:
            self._hidden = session.get_outputs()[0].type
        return session

    def _part(self, nodes: Collection[int], outputs: Sequence[str]) -> onnx.ModelProto:
        """The nodes as a graph of their own, which reads the values that other nodes computed."""
        model = onnx.ModelProto(ir_version=self._model.ir_version, opset_import=self._model.opset_import)
        model.functions.extend(self._model.functions)
        chosen = [self._nodes[at] for at in sorted(nodes)]
        read = {name for node in chosen for name in values_read_by(node)}
        own = {node.output[0] for node in chosen}  # constants that stand elsewhere are part of it: no value crosses
        model.graph.node.extend(self._constants[name] for name in sorted(self._constants.keys() & read - own))
        model.graph.node.extend(chosen)
        model.graph.initializer.extend(tensor for tensor in self._model.graph.initializer if tensor.name in read)
        model.graph.input.extend(port for port in self._model.graph.input if port.name in read)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return model
