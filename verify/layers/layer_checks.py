"""Checks of single layers: what each layer of a graph computes by itself, against the eager model's layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import LlmconvError, OutOfMemory, UnsupportedInput
from llmconv.progress import status
from llmconv.runtime.cache_names import is_past, is_state
from llmconv.runtime.extra_inputs import ExtraInput
from llmconv.runtime.low_memory.runner import StreamedRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.layers.graph_layers import GraphLayers
from llmconv.verify.layers.induction import Induction
from llmconv.verify.layers.part_runner import PartRunner
from llmconv.verify.layers.single_layers import ExpectedLayers, GraphRun, LayerRuns, made_up_call, run_eager
from llmconv.verify.results.report import Check, Checks
from llmconv.verify.results.sigma import GATES, ExpectedOutput, Measure, cache_rows, measure, state_rows

NAME = "layers by themselves"
PART_BYTES = 1 << 28
"""Maximum size of the weights of a graph in memory, in bytes of float32; a larger product is split."""

HIDDEN = "hidden state"


@dataclass
class Drift:
    """How rounding errors of the layers add up over the depth.

    Attributes:
        graph: RMS error of each layer of the graph, relative to its hidden state.
        eager: the same of the eager model in the graph's dtype.
    """

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
    """Compares the layers of graphs, each by itself.

    Attributes:
        induction: the classes of layers, and which layers run.
        folder: the folder of the graphs.
        models: the graphs without their weights.
        reference: the model's folder.
        dtype: of the graphs.
        settings: of onnxruntime.
        code: the reference's folder where its own code is trusted.
        named: suffix of the names of the checks.
        drift: receives the errors of the layers.
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
