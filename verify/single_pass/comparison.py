"""Compares the graphs without a cache of a folder with the eager model: declarations, weights, every output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.errors import LlmconvError, OutOfMemory
from llmconv.runtime.extra_inputs import POSITIONS
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry
from llmconv.runtime.onnxruntime.single_pass import SinglePassGraph
from llmconv.tensors import Array
from llmconv.verify.audit.decisions.audit import audit_decisions, read_config
from llmconv.verify.audit.file_checksums import audit_graph_files
from llmconv.verify.audit.structure import dead_inputs
from llmconv.verify.audit.weights import WeightSource, audit_files, audit_weights, span_of
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.reference.weight_scaling import SCALINGS, hidden_faults
from llmconv.verify.results.report import Check, Checks, Report
from llmconv.verify.results.sigma import GATES, ExpectedOutput, Measure, measure
from llmconv.verify.single_pass.reference import TaskReference, as_rows
from llmconv.verify.single_pass.sentence_head import Modules
from llmconv.verify.single_pass.texts import Texts, batches
from llmconv.verify.verification import Session

DTYPE = "float32"
INPUTS = {"input_ids", "attention_mask"}

POOLED = {"embed", "classify", "rerank"}
"""Roles whose graphs join the tokens of a text."""


@dataclass(frozen=True)
class SinglePassFolder:
    """The graphs without a cache of a folder.

    Attributes:
        verified: the folder with these graphs alone.
        reference: the model's folder.
        report: receives notes.
        session: the options of the run.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
    """

    verified: VerifiedFolder
    reference: Path
    report: Report
    session: Session
    allow_changed: bool

    def checks(self, *, alone: bool) -> Checks:
        """All checks.

        Args:
            alone: the folder has no other graphs, whose audit checks the weight files.
        """
        folder, models = self.verified.path, self.verified.models
        checks, notes = audit_graph_files(folder, self.verified.entries, models, allow_changed=self.allow_changed)
        self.report.notes += notes
        yield [check for check in checks if alone or check.verdict != "skip"]
        if alone:
            yield audit_files(folder)
        source = self._weights()
        yield [audit_weights(name, model, source)[0] for name, model in models.items()]
        config = read_config(self.reference)
        pooled = {entry.name: entry.role in POOLED for entry in self.verified.entries}
        yield [audit_decisions(name, model, config, pools=pooled[name]) for name, model in models.items()]
        self.report.unseen += hidden_faults(SCALINGS, self.reference)
        for entry in self.verified.entries:
            yield from self._graph(entry)

    def _weights(self) -> WeightSource:
        """The weights that graphs may map, with those of the modules after the model."""
        source = WeightSource.of(self.verified.path, self.reference)
        own, theirs = (Modules(folder).tensors() for folder in (self.verified.path, self.reference))
        return replace(
            source,
            spans={**source.spans, **{span_of(tensor): name for name, tensor in own.items()}},
            reference={**source.reference, **theirs},
            stored={**source.stored, **own},
        )

    def _graph(self, entry: GraphEntry) -> Checks:
        """One graph on all texts."""
        blank = Check("structure", entry.name, "")
        try:
            graph = SinglePassGraph(self.verified.path / entry.files[0], self.verified.settings)
        except OutOfMemory:
            raise
        except LlmconvError as error:
            yield [replace(blank, verdict="fail", detail=error.message)]
            return
        reference = TaskReference(self.reference, entry.role)
        takes_positions = POSITIONS in graph.inputs
        suite, pools = self.session.selection.suite, entry.role in POOLED
        texts, left = batches(reference.limits, suite, pools=pools, takes_positions=takes_positions)
        self.report.unseen += left
        wanted = reference.expected(texts[0])
        problem = _declared(graph, entry.role, set(wanted)) or "; ".join(dead_inputs(self.verified.models[entry.name]))
        if problem:
            yield [replace(blank, verdict="fail", detail=problem)]
            return
        yield [replace(blank, detail=f"inputs and outputs of `{entry.role}`")]
        for batch in texts:
            known = wanted if batch is texts[0] else reference.expected(batch)
            yield list(_batch(graph, entry, batch, known))


def _declared(graph: SinglePassGraph, role: str, outputs: set[str]) -> str:
    """What is wrong with the names of inputs and outputs; empty if nothing is."""
    optional = {POSITIONS} if role == "scoring" else set()
    if set(graph.inputs) - optional != INPUTS:
        return f"inputs are {', '.join(graph.inputs)}, expected {', '.join(sorted(INPUTS))}"
    if set(graph.outputs) != outputs:
        return f"outputs are {', '.join(graph.outputs)}, expected {', '.join(sorted(outputs))}"
    return ""


def _batch(
    graph: SinglePassGraph, entry: GraphEntry, texts: Texts, wanted: dict[str, ExpectedOutput]
) -> Iterator[Check]:
    """A check for each output on one batch."""
    blank = Check(texts.name, entry.name, "")
    try:
        found = graph.run(texts.input_ids, texts.attention_mask, texts.position_ids)
    except OutOfMemory:
        raise
    except LlmconvError as error:
        yield from (fold(blank, name, [Measure(problem=error.message)], GATES[DTYPE]) for name in wanted)
        return
    for name, truth in wanted.items():
        rows = as_rows(entry.role, name, found[name]) if found[name].ndim else found[name]
        yield fold(blank, name, [_measured(truth, rows, tokens=name == "logits")], GATES[DTYPE])


def _measured(truth: ExpectedOutput, rows: Array, *, tokens: bool) -> Measure:
    """The error of an output; where it fails by little, the noise is measured again."""
    measured = measure(truth, rows, tokens=tokens)
    if not measured.passes(GATES[DTYPE]) and truth.is_doubtful(measured, GATES[DTYPE]):
        measured = measure(truth.again(), rows, tokens=tokens)
    return measured
