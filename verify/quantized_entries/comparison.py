"""Compares quantized entries of a folder: codes, scenarios on a model of the same codes, and the cost as shipped."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from llmconv.checkpoint import open_weights, read_json
from llmconv.errors import UnsupportedInput
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.onnxruntime.float32_graph import HALF_PRECISION
from llmconv.runtime.onnxruntime.graph import open_graph
from llmconv.runtime.onnxruntime.graph_entry import PrefixEntry
from llmconv.verify.audit.decisions.audit import audit_foreign_decisions, read_config
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.run import FolderComparison, open_graphs
from llmconv.verify.other_exporters.external_graph import ModelSizes
from llmconv.verify.other_exporters.quantized.constants import Constants
from llmconv.verify.other_exporters.quantized.dequantized_reference import dequantized_reference, tied_head
from llmconv.verify.other_exporters.quantized.stacked_matrices import unstacked
from llmconv.verify.other_exporters.quantized.unrounded_copies import remove_rounding
from llmconv.verify.other_exporters.replay import ExternalGraphs
from llmconv.verify.other_exporters.run import audit_graph_weights, open_reference
from llmconv.verify.other_exporters.verdicts.quantized import QuantizationOptions, measure_cost, quantization_notes
from llmconv.verify.quantized_entries.audited_files import audited_files, scaler_of
from llmconv.verify.quantized_entries.shipped_runner import plainly_rounded_runner, shipped_runner
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.prefix import PrefixStart, Start, trained_start
from llmconv.verify.results.report import Check, Checks, Report
from llmconv.verify.verification import Checking, Session


def compare_entries(
    verified: VerifiedFolder,
    folder: Path,
    report: Report,
    session: Session,
    known: Eager | None,
    options: QuantizationOptions,
    stack: ExitStack,
) -> Checking:
    """Yields all checks: audits of the graphs, the cost, then all scenarios.

    Args:
        verified: the graphs.
        folder: of the model, with plain weights.
        report: receives evidence, figures and notes.
        session: the options of the verification.
        known: an open reference of the model.
        options: of quantized graphs.
        stack: keeps temporary copies.
    """
    tensors = unstacked(open_weights(folder))
    if wrong := options.smoothing.check(verified.entries[0].name, tensors):
        yield wrong
        return known, verified
    tensors = options.smoothing.applied(tensors)
    graphs = ExternalGraphs(audited_files(verified), ModelSizes({}), verified.settings, tensors)
    config = read_json(folder / "config.json")
    yield from audit_graph_weights(graphs.files, tensors, config, report, options.codes)
    yield from _decisions(verified, folder, report)
    half = next((file.dtype for file in graphs.files if file.dtype in HALF_PRECISION), "")
    eager = open_reference(graphs, known or folder, half, options.code, stack)
    compared = QuantizedEntries(verified, graphs, eager, report, session, options)
    if not (yield from compared.opened()):
        return eager, verified
    yield from compared.cost()
    return (yield from compared.scenarios(stack, is_half=bool(half)))


def _decisions(verified: VerifiedFolder, folder: Path, report: Report) -> Checks:
    """Shapes behind quantized products are not inferred, so this audit has fewer failures than that of floats."""
    config = read_config(folder)
    lengths = {entry.name: entry.prefix.length if entry.prefix else 0 for entry in verified.entries}
    for name, model in verified.models.items():
        checks, notes = audit_foreign_decisions(name, model, config, prefix=lengths.get(name, 0))
        yield checks
        report.notes += notes


@dataclass(frozen=True)
class QuantizedEntries:
    """Audited graphs that are compared with their model.

    Attributes:
        verified: the graphs.
        graphs: the same as audited files, and the tensors of the model.
        eager: the model before it was quantized.
        report: receives evidence, figures and notes.
        session: the options of the verification.
        options: of quantized graphs.
    """

    verified: VerifiedFolder
    graphs: ExternalGraphs
    eager: Eager
    report: Report
    session: Session
    options: QuantizationOptions

    def opened(self) -> Generator[list[Check], None, bool]:
        """Yields a failed check for each graph that onnxruntime cannot open; returns whether it opens all."""
        verified = self.verified
        opened = yield from open_graphs(open_graph, verified.path, verified.entries, verified.settings)
        return len(opened) == len(verified.entries)

    def cost(self) -> Checks:
        """The loss of accuracy of the graphs as shipped, after their prefix."""
        name, runner = shipped_runner(self.verified)
        prefix = next((entry.prefix for entry in self.verified.entries if entry.prefix), None)
        eager = self.eager.with_prefix(prefix, trained_start(self.verified.path, prefix)) if prefix else self.eager
        plain = partial(plainly_rounded_runner, self.verified, self.graphs, self.options.smoothing)
        suite = self.session.selection.suite
        if any(entry.postprocess for entry in self.verified.entries):
            self.report.notes.append("the cost is that of the logits from which the graphs choose tokens")
        yield from measure_cost((name, runner), plain, eager, self.options, self.report, suite, runner.cache_capacity)

    def scenarios(self, stack: ExitStack, *, is_half: bool) -> Checking:
        """All scenarios, against the model with the values of the codes.

        Args:
            stack: keeps the model.
            is_half: the graphs compute in half precision: original weights and settings only.
        """
        section, files, eager = self.report.quantization, self.graphs.files, self.eager
        assert section is not None
        rounded: set[str] = set()
        try:
            without = partial(_without_rounding, self.verified.path, rounded, self.options)
            verified = self.verified.changed(without, "")
        except UnsupportedInput as error:
            yield [Check("structure", files[0].name, "", verdict="skip", detail=error.message)]
            return eager, self.verified
        section.rounded = sorted(rounded)
        self.report.notes += quantization_notes(section)
        found = [one for file in files for one in file.quantized_weights]
        tie, tensors = tied_head(eager.models[0], self.graphs.tensors), self.graphs.tensors
        folder = stack.enter_context(dequantized_reference(eager.folder, tensors, found, tie, self.options.smoothing))
        fixed = self.verified.entries[0].fixed_inputs
        dequantized = Eager(folder, eager.dtype, code=self.options.code, fixed_inputs=fixed)
        verified = replace(verified, settings=replace(verified.settings, float_activations=True))
        yield from self._comparison(verified, dequantized, is_half=is_half)
        return dequantized, verified

    def _comparison(self, verified: VerifiedFolder, dequantized: Eager, *, is_half: bool) -> Checks:
        graphs = yield from open_graphs(open_graph, verified.path, verified.entries, verified.settings)
        comparison = FolderComparison(
            dequantized,
            verified.path,
            verified.models,
            verified.settings,
            self.session.selection,
            self.report,
            open_graph,
            varied=not is_half,
            scaler=scaler_of(verified, self.graphs),
            start=self._start,
        )
        yield from comparison.checks(graphs)

    def _start(self, folder: Path, prefix: PrefixEntry) -> Start:
        """The prefix by the model before it was quantized, from which an export computes it."""
        start = trained_start(folder, prefix)
        runners = [one for one in self.eager.runners if isinstance(one, EagerRunner)]

        def of(runner: EagerRunner) -> PrefixStart:
            return start(next(one for one in runners if one.model.dtype == runner.model.dtype))

        return of


def _without_rounding(folder: Path, rounded: set[str], options: QuantizationOptions, model: onnx.ModelProto) -> None:
    """Removes the rounding of activations in place, and adds the operators that did it."""
    constants = Constants(model, folder)
    rounded.update(remove_rounding(model, constants, options.removable(model, constants)))
