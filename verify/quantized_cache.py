"""Compares graphs whose cache contains integer codes: as copies with a cache of floats, and as shipped.

The copies are compared with the eager model like any graph. What is left are the codes, their scales, and what the
rounding costs, which the shipped graphs are run for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from llmconv.errors import LlmconvError, UnsupportedInput, UsageProblem
from llmconv.runtime.calibration_text import CalibrationText
from llmconv.runtime.context_length import context_length
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.guard import external_fields, external_tensors, load_guarded
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import GraphTransform, SessionSettings
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.attention_nodes import AttentionNodes
from llmconv.verify.comparison.cache_codes import NAME, CodedGraph, check_codes
from llmconv.verify.comparison.cache_copies import cache_scales, has_codes, to_floats, to_rounded_floats
from llmconv.verify.comparison.cache_ranges import check_scales, ranges, rotated
from llmconv.verify.comparison.graph_probe import GraphProbe
from llmconv.verify.other_exporters.quantized.accuracy_cost import measure_costs
from llmconv.verify.other_exporters.quantized.accuracy_gates import CACHE, CHECK, GATES, check_gate, check_limits
from llmconv.verify.other_exporters.quantized.activation_ranges import rounds_activations
from llmconv.verify.other_exporters.quantized.token_sample import token_sample
from llmconv.verify.other_exporters.verdicts.quantized import QuantizationOptions
from llmconv.verify.quantized_entries.logits_output import with_logits
from llmconv.verify.recorded_text import recorded_text
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.quantization import Quantization
from llmconv.verify.results.report import Check, Checks, Report
from llmconv.verify.verification import Session

AS_FLOATS = ", cache in float32"
"""Suffix of the scenarios of the copies."""


@dataclass(frozen=True)
class CodedFolder:
    """A folder of graphs with codes in their caches.

    Attributes:
        verified: the graphs.
        text: on which the scales were measured.
        cost: options of the cost of quantization.
        prepack: the weights are quantized, which some kernels support only prepacked.
    """

    verified: VerifiedFolder
    text: CalibrationText
    cost: QuantizationOptions
    prepack: bool

    @classmethod
    def of(
        cls, verified: VerifiedFolder, calibrate: Path | None, cost: QuantizationOptions, *, prepack: bool
    ) -> CodedFolder | None:
        """The folder; None if all caches contain floats.

        Args:
            verified: the graphs.
            calibrate: the text of the export.
            cost: options of the cost of quantization.
            prepack: the weights are quantized.

        Raises:
            UsageProblem: no text, or another one than at the export.
            UnsupportedInput: a graph in stages, or not all graphs have codes.
        """
        coded = [has_codes(verified.models[entry.name]) for entry in verified.entries]
        if not any(coded):
            if calibrate and not any(map(rounds_activations, verified.models.values())):
                raise UsageProblem(
                    "`--calibrate` applies to graphs of `export --kv-cache int8` or `--static-activations`",
                    hint="leave out `--calibrate`",
                )
            return None
        if not all(coded) or any(len(entry.files) > 1 for entry in verified.entries):
            raise UnsupportedInput(
                "only graphs in one file, of which each has integer keys and values, can be compared",
                hint="export them together with `llmconv export --kv-cache int8`",
            )
        return cls(verified, recorded_text(verified.path, calibrate), cost, prepack)

    def structure(self) -> list[Check]:
        """A check of the codes' types and scales for each graph."""
        checks = []
        for entry in self.verified.entries:
            problems = cache_scales(self.verified.models[entry.name])[1]
            verdict = "fail" if problems else "pass"
            checks.append(Check(NAME, entry.name, "", verdict=verdict, detail="; ".join(problems[:3])))
        return checks

    def as_floats(self, stack: ExitStack) -> VerifiedFolder:
        """The copies with a cache of floats, in memory, or in files that `stack` keeps if weights are quantized."""
        copies = self.verified.changed(to_floats, AS_FLOATS)
        if not self.prepack:
            return copies
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="llmconv-cache-")))
        for entry in self.verified.entries:
            model = load_guarded(self.verified.path / entry.files[0])
            to_floats(model)
            for name in {external_fields(tensor)["location"] for tensor in external_tensors(model)}:
                if not (folder / name).exists():
                    shutil.copyfile(self.verified.path / name, folder / name)
            onnx.save(model, folder / entry.files[0])
        return replace(copies, path=folder, settings=self.verified.settings)

    def compare(self, eager: Eager, report: Report, session: Session) -> Checks:
        """Checks of codes and scales of each graph, and of the cost of all together.

        Args:
            eager: the model before any quantization.
            report: receives the cost and notes.
            session: the options of the verification.
        """
        report.notes.append("keys and values are integer codes; the scenarios run copies with a cache of floats")
        texts = self.text.tokens(
            eager.folder, context_length(eager.folder), trust_remote_code=self.cost.code is not None
        )
        model = eager.runners[1]
        wanted = ranges(model, texts)
        turned = rotated(model, texts[0]) if eager.rotary_frequencies() else set[str]()
        known: dict[object, list[Check]] = {}
        shipped = replace(self, verified=with_logits(self.verified))
        for entry in self.verified.entries:
            key = entry.content_key(self.verified.path)
            if key not in known:
                scales = cache_scales(self.verified.models[entry.name])[0]
                known[key] = check_scales(entry.name, scales, wanted, turned) + shipped._codes(
                    entry.name, scales, eager
                )
            yield [replace(check, graph=entry.name) for check in known[key]]
        yield from shipped._measure(eager, report, session)

    def _codes(self, name: str, scales: Mapping[str, Array], eager: Eager) -> list[Check]:
        shipped, rounded, exact = (self._runner(name, change) for change in (None, to_rounded_floats, _to_floats))
        probe = GraphProbe(self.verified.models[name], self.verified.path, self._settings)
        try:
            return check_codes(CodedGraph(name, shipped, rounded, exact, AttentionNodes(probe, scales)), eager.facts())
        except LlmconvError as error:
            return [Check(NAME, name, "logits", verdict="fail", detail=error.message)]

    @property
    def _settings(self) -> SessionSettings:
        return replace(self.verified.settings, prepack=self.prepack, garbage=True)

    def _runner(self, name: str, change: GraphTransform | None) -> OrtRunner:
        changes = [one for one in (self._settings.change, change) if one]
        settings = replace(self._settings, change=partial(_in_turn, changes) if changes else None)
        entry = next(entry for entry in self.verified.entries if entry.name == name)
        graph: OrtGraph = open_graph(self.verified.path, entry, settings)
        return OrtRunner(graph, graph)

    def _measure(self, eager: Eager, report: Report, session: Session) -> Checks:
        """The cost of all quantization, of the graphs as shipped."""
        section = report.quantization = report.quantization or Quantization()
        limits = self.cost.limits
        section.max_divergence, section.min_agreement = limits.divergence, limits.agreement
        trusted = self.cost.code is not None
        sample = token_sample(self.cost.text, eager.folder, eager.facts(), session.selection.suite, trusted)
        name = self.verified.entries[-1].name
        try:
            (costs,) = measure_costs([(name, self._runner(name, None))], eager.runners[0], sample)
        except LlmconvError as error:
            yield [Check(CHECK, name, "", verdict="fail", detail=error.message)]
            return
        section.cost = costs.summary(is_text=sample.is_text)
        gated = sample.is_text and not self.prepack and not limits.given  # the codes of weights cost more
        yield check_gate(CACHE, GATES[CACHE], section.cost, None) if gated else check_limits(section.cost, limits)


def _in_turn(changes: Sequence[GraphTransform], path: Path, model: onnx.ModelProto) -> None:
    for change in changes:
        change(path, model)


def _to_floats(path: Path, model: onnx.ModelProto) -> None:
    to_floats(model)
