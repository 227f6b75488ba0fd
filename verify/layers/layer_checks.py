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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from llmconv.errors import LlmconvError, UnsupportedInput
from llmconv.memory import trim
from llmconv.progress import status
from llmconv.runtime.extra_inputs import (
    BATCH,
    INPUTS_EMBEDS,
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
from llmconv.runtime.onnxruntime.guard import values_read_by
from llmconv.runtime.onnxruntime.session_settings import INPUT_DTYPES, SessionSettings
from llmconv.runtime.onnxruntime.shared_buffers import BufferedSession, FixedSizes, as_input
from llmconv.runtime.runner import ArrayCache, Step, default_positions
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.comparison.layer_by_layer import fixed_sizes
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.induction import LAYERS, PARTS, Induction, with_names
from llmconv.verify.reference.eager import ComputedModel
from llmconv.verify.reference.other_roundings import outputs_of, valid_rows
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
    """Compares the layers of graphs, each by itself."""

    induction: Induction
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    reference: ComputedModel
    dtype: str
    settings: SessionSettings
    code: Path | None  # the reference's folder where its own code is trusted
    named: str  # suffix of the names of the checks
    drift: Drift  # receives the errors of the layers

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
                opened_by = layers, self.folder, self.settings
                yield from self._of_graph(graph, GraphRun(graph, *opened_by, runs[past], names, extras))
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
        ran = len(induction.run)
        which = f"all {count} layers" if ran == count else f"{ran} of {count} layers"
        checks = [check for check in report.checks if check.name.startswith(NAME)]
        step = _of("step", checks, f"{which}, each by itself; {drift.text()}")
        found += [_base(induction, report), step]
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
    steps: tuple[Step, ...]
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
        self._cached = [outputs_of(step, runs.call.known) for step in runs.steps]

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
    return given


class GraphRun:
    """The parts of a graph, each run on the call, with the hidden states of the eager runs as inputs of the layers.

    At most `PART_BYTES` of weights are in memory; of a graph with fixed cache buffers those of a layer.
    """

    def __init__(
        self,
        name: str,
        graph: GraphLayers,
        folder: Path,
        settings: SessionSettings,
        runs: LayerRuns,
        names: Mapping[int, str],
        extras: Mapping[str, ExtraInput],
    ) -> None:
        self.runs, self.names = runs, names
        self._name, self._graph, self._folder, self._extras = name, graph, folder, extras
        self._settings, self._sizes = replace(settings, arena=False), fixed_sizes(graph.index.model)
        declared = [DeclaredValue.of(port) for port in graph.index.inputs.values()]
        self._types: ValueTypes = {port.name: (port.type, port.shape) for port in declared}
        self._hidden = ""  # the type of hidden states, once the part before the layers has run

    def start(self) -> dict[str, Array]:
        """Runs the part before the layers; returns the hidden state that it makes, unless that is an input."""
        first = self._graph.layers[0].entry
        if first in self._types:
            self._hidden = self._types[first][0]
            return {}
        return self.run(self._graph.prologue, first)

    def layer(self, number: int) -> dict[str, Array]:
        """Runs one layer; returns the hidden state after it as `hidden`, and its cache outputs."""
        layer = self._graph.layers[number]
        found = self.run(layer.nodes, layer.exit, layer.entry, self.runs.exact.given[self.names[number]].numpy())
        return {"hidden": found.pop(layer.exit), **found}

    def end(self) -> Array:
        """Runs the part after the layers; returns the logits."""
        return self.run(self._graph.epilogue, "logits", self._graph.layers[-1].exit, self.runs.last.numpy())["logits"]

    def run(
        self, numbers: Collection[int], result: str, entry: str = "", hidden: Array | None = None
    ) -> dict[str, Array]:
        """The value `result` of some nodes, and their caches; `hidden` [rows, tokens, features] replaces `entry`."""
        part, types = self._part(numbers, result, entry), dict(self._types)
        extras, given = dict(self._extras), dict(self.runs.call.extras or {})
        if hidden is not None:
            tokens = next(types[name][1] for name in ("input_ids", INPUTS_EMBEDS) if name in types)
            types[ENTRY] = self._hidden, [*tokens[:2], hidden.shape[-1]]
            extras[ENTRY] = ExtraInput(ENTRY, (BATCH, SEQUENCE, hidden.shape[-1]), "float32", values=1.0)
            with np.errstate(over="ignore"):  # after a layer that overflows, the hidden state is infinite
                given[ENTRY] = hidden.astype(np.float32)
        with refusing(self._name, "run `llmconv verify --method whole`"), np.errstate(over="ignore"):
            if self._sizes:
                found = self._run_buffered(self._sizes, part, types, extras, given)
            else:
                found = self._run_growing(part, types, extras, given)
        trim()
        self._hidden = self._hidden or types[result][0]
        return found

    def _run_growing(
        self, part: GraphPiece, types: ValueTypes, extras: Mapping[str, ExtraInput], given: Mapping[str, Array]
    ) -> dict[str, Array]:
        feeds = feeds_of(replace(self.runs.call, extras=given), self._graph, extras)
        values = {name: as_input(feeds[name], INPUT_DTYPES.get(types[name][0])) for name in part.inputs}
        model = part.build(types)
        split_products(model, PART_BYTES)
        pieces = cut_graph(model, PART_BYTES)
        for at, piece in enumerate(pieces):
            session = open_piece(piece, types, self._folder, self._settings, PART_BYTES)
            types |= {arg.name: (arg.type, arg.shape) for arg in session.get_outputs()}
            read = {name: values[name] for name in piece.inputs}
            values |= zip(piece.outputs, session.run_with_ort_values(piece.outputs, read), strict=True)
            del session
            later = {*part.outputs}.union(*(one.inputs for one in pieces[at + 1 :]))
            values = {name: value for name, value in values.items() if name in later}
            trim()
        return {name: values[name].numpy() for name in part.outputs}

    def _run_buffered(
        self,
        sizes: FixedSizes,
        part: GraphPiece,
        types: ValueTypes,
        extras: Mapping[str, ExtraInput],
        given: Mapping[str, Array],
    ) -> dict[str, Array]:
        """As the graph's runner runs the whole: in calls of its sizes, with the cache in buffers."""
        call, result = self.runs.call, part.outputs[0]
        session = open_piece(part, types, self._folder, self._settings, PART_BYTES)
        types |= {arg.name: (arg.type, arg.shape) for arg in session.get_outputs()}
        run = BufferedSession(session, sizes, [result], lambda ids, placed: {"input_ids": ids}, garbage=True)
        past = call.start.arrays() if call.start else {}
        mine = {present_of(name): past[present_of(name)] for name in part.inputs if is_past(name) and past}
        # `GroupQueryAttention` reads several tokens after a past in a batch of one only
        rows = 1 if sizes.single else sizes.rows or len(call.input_ids)
        found: list[dict[str, Array]] = []
        for first in range(0, len(call.input_ids), rows):
            at = slice(first, first + rows)
            tokens = ModelCall(call.input_ids[at], call.attention_mask[at], call.position_ids[at])
            cut = {name: _rows_of(extras[name], array, at) for name, array in given.items()}
            start = ArrayCache({name: array[at] for name, array in mine.items()}, call.known) if past else None
            results, cache = run.run(tokens, ExtraValues(extras, cut), start)
            found.append({result: results[0], **(cache.arrays() if part.outputs[1:] else {})})
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    def _part(self, numbers: Collection[int], result: str, entry: str) -> GraphPiece:
        """Nodes with what they read of other parts but the hidden state `entry`, which is the input `ENTRY`.

        The first output is `result`, the others are caches.
        """
        index = self._graph.index
        known, left = set(numbers), list(numbers)
        while left:
            read = {index.producers[name] for name in index.reads[left.pop()] - {entry} if name in index.producers}
            left += read - known
            known |= read
        chosen = [with_names(index.nodes[at], {entry: ENTRY} if entry else {}) for at in sorted(known)]
        values = {name for node in chosen for name in values_read_by(node)}
        made = {name for node in chosen for name in node.output}
        defaults = {tensor.name for tensor in index.model.graph.initializer}
        inputs = [name for name in (*self._types, ENTRY) if name in values - defaults and name != entry]
        outputs = [result, *(name for name in index.outputs if is_present(name) and name in made)]
        return GraphPiece(index.model, tuple(chosen), tuple(inputs), tuple(outputs), 0, frozenset())


ENTRY = "entering_hidden_state"  # the name of the hidden state that a part of a graph reads


def _rows_of(extra: ExtraInput, array: Array, at: slice) -> Array:
    axis = extra.axes.index(BATCH) if BATCH in extra.axes else None
    return array if axis is None else array[(slice(None),) * axis + (at,)]


def too_small(model: onnx.ModelProto) -> str:
    """Why a graph has no room for the call of single layers; empty if it has."""
    sizes = fixed_sizes(model)
    return sizes.refusal(1, 0, NEW) if sizes else ""
