"""Checks of single layers: what each layer of a graph computes by itself, against the eager model's layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import LlmconvError, OutOfMemory, UnsupportedInput
from llmconv.progress import status
from llmconv.runtime.cache_names import is_past, is_state, layer_of
from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.induction import LAYERS, PARTS, Induction
from llmconv.verify.layers.single_layers import ExpectedLayers, GraphRun, LayerRuns, PartRunner, made_up_call, run_eager
from llmconv.verify.results.report import Check, Checks, Report, Statement, Where
from llmconv.verify.results.sigma import GATES, ExpectedOutput, Measure, cache_rows, measure, state_rows

NAME = "layers by themselves"
PART_BYTES = 1 << 28
"""Maximum size of the weights of a graph in memory, in bytes of float32; a larger product is split."""

HIDDEN = "hidden state"


@dataclass
class Drift:
    """RMS errors of the layers, relative to hidden states, of the graph and of the eager model in its dtype."""

    graph: list[float]
    eager: list[float]

    def text(self) -> str:
        """The sums over the layers that ran, in words."""
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
    reference: Path
    dtype: str
    settings: SessionSettings
    code: Path | None
    named: str
    drift: Drift

    def checks(self) -> Checks:
        """The checks of every distinct graph."""
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone

        numbers = self.induction.run
        names = {number: self.induction.classes.names[number] for number in numbers}
        skipped = self.induction.left_out(numbers)
        runs: LayerRuns | None = None
        extras: Mapping[str, ExtraInput] = {}
        for graph, model in self.distinct().items():
            layers = GraphLayers.of(model, self.induction.tensors)
            rest = extra_inputs_of(self.reference)
            opened = partial(StreamedRunner, self.reference, code=self.code, skipped=skipped, extra_inputs=rest)
            try:
                if runs is None:
                    first = opened("float32")
                    extras = {n: one for n, one in first.extra_inputs.items() if n in layers.index.inputs}
                    call = made_up_call(layers, first.vocab_size, extras)
                    runs = run_eager(opened, call, list(names.values()), self.dtype)
                runner = PartRunner(model, self.folder, self.settings, PART_BYTES)
                yield from self._of_graph(graph, GraphRun(layers, runner, runs, names, extras))
            except (OutOfMemory, UnsupportedInput):
                raise
            except LlmconvError as error:
                yield [Check(f"{NAME}{self.named}", graph, "logits", verdict="fail", detail=error.message)]

    def distinct(self) -> dict[str, onnx.ModelProto]:
        """The graphs with a cache, those of equal content once."""
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


AUDITS = ("graph file", "weights", "decisions", "structure", LAYERS, PARTS)


def statements(induction: Induction, report: Report, drift: Drift | None) -> list[Statement]:
    """The parts of the proof, shown or not by the report's checks; `drift` is None if no numbers were compared."""
    graphs, count = len(induction.classes.graphs), len(induction.classes.names)
    found = [
        _shown(report, "structure", LAYERS, f"{count} layers of {_classes(len(induction.kept))}, alike node by node"),
        _shown(report, "weights", "weights", "each initializer is the tensor of the model in its place"),
        _shown(report, "composition", PARTS, "the parts are the file, and values cross only at the cuts"),
    ]
    if drift is not None:
        found += [_base(induction, report), _step(induction, report, drift, count)]
    per_graph = {check.graph for check in report.checks if check.name == LAYERS}
    return found if len(per_graph) == graphs else [Statement(one.name, False, one.text) for one in found]


def _shown(report: Report, name: str, check: str, text: str) -> Statement:
    return _of(report, name, lambda one: one.name == check and one.graph.endswith(".onnx"), text)


def _of(report: Report, name: str, belongs: Callable[[Check], bool], text: str) -> Statement:
    checks = [check for check in report.checks if belongs(check)]
    shown = any(check.verdict == "pass" for check in checks) and all(check.verdict != "fail" for check in checks)
    return Statement(name, shown, text)


def _base(induction: Induction, report: Report) -> Statement:
    kept = _numbers(induction.kept)
    scenarios = {check.name for check in report.checks if check.is_measured and not check.name.startswith(NAME)}
    text = f"{kept} (one of each class), with the parts before and after, in {len(scenarios)} scenarios"
    found = _of(report, "base", _is_scenario, text)
    compared = {name for one in report.checks if _is_scenario(one) for name in one.graph.split("+")}
    return found if induction.classes.graphs.keys() <= compared else Statement(found.name, False, found.text)


def _is_scenario(check: Check) -> bool:
    """Whether it compares outputs of a shortened graph."""
    return check.is_measured and not check.name.startswith(NAME)


def _step(induction: Induction, report: Report, drift: Drift, count: int) -> Statement:
    numbers = induction.run
    which = f"all {count} layers" if len(numbers) == count else f"{len(numbers)} of {count} layers"
    return _of(report, "step", lambda one: one.name.startswith(NAME), f"{which}, each by itself; {drift.text()}")


def _classes(count: int) -> str:
    return f"{count} class{'es' * (count > 1)}"


def _numbers(kept: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, kept[:6])) + (f" and {len(kept) - 6} more" if len(kept) > 6 else "")
    return f"layer{'s' * (len(kept) > 1)} {shown}"


def unseen_of(induction: Induction) -> list[str]:
    """What an induction cannot show."""
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
    """Layers of the tensors that the audit of weights names."""
    names = [name for check in failed if check.name == "weights" for name in re.findall(r"`([^`]+)`", check.detail)]
    found = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    return [int(match[1]) for match in found if match]


def _number(check: Check) -> int | None:
    """The layer of a failed check of a single layer."""
    if not check.name.startswith(NAME):
        return None
    match = AFTER.match(check.output)
    return int(match[1]) if match else layer_of(check.output)
