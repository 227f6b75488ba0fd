"""Verifies a folder whose graphs have weights of floats: audits, then the scenarios by one of the methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmconv.checkpoint import INDEX, SINGLE
from llmconv.errors import UsageProblem
from llmconv.runtime.onnxruntime.float32_graph import half_precision
from llmconv.runtime.onnxruntime.session_settings import CPU, provider_name
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.layer_by_layer import why_not_layered
from llmconv.verify.folder_audits import audit_folder, read_all, read_none
from llmconv.verify.folder_comparison import Compared, compare_half_precision
from llmconv.verify.layers.induction import Induction
from llmconv.verify.layers.statements import statements, unseen_of
from llmconv.verify.layers.whole_graph import why_not_opened
from llmconv.verify.method import STRUCTURE, Method, Plan, holds_one_layer, planned
from llmconv.verify.reference.cost_estimate import CostEstimate, choose, distinct_files
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results.report import Check, Report
from llmconv.verify.verification import Checking, Session

WITHOUT_NUMBERS = ("wrong numbers (`--method induction` compares them)", "weights that were changed since the export")


@dataclass(frozen=True)
class FloatFolder:
    """A folder of graphs with weights of floats, and how it is verified.

    Attributes:
        verified: the graphs.
        reference: the model's folder.
        report: receives evidence and notes.
        session: the options of the run.
        code: the reference's folder where its own code is trusted.
        allow_changed: a graph that was changed after its export is a note instead of a failure.
    """

    verified: VerifiedFolder
    reference: Path
    report: Report
    session: Session
    code: Path | None
    allow_changed: bool

    def checks(self, method: Method, eager: Eager | None, low_memory: bool | None) -> Checking:
        """All checks.

        Args:
            method: which method was asked for.
            eager: an open reference of this model; used where the whole model runs.
            low_memory: hold one layer at a time; None to decide by free memory.
        """
        verified, report = self.verified, self.report
        plan = planned(method, verified, self.reference, self.session, low_memory, self.code)
        report.method = plan.method
        report.notes += [plan.note] if plan.note else []
        if plan.method == STRUCTURE:
            yield from self._structure(plan)
            return eager, verified
        if plan.induction:
            return (yield from self._by_induction(plan.induction, low_memory))
        layered = bool(low_memory) if eager else self._is_layered(low_memory)
        yield from audit_folder(verified, self.reference, report, allow_changed=self.allow_changed)
        return (yield from self._compared(self._comparison(layered), eager))

    def rounded_model(self) -> Path:
        """The model with weights rounded like those of the graphs.

        That is the folder of the graphs if it holds a model: the audit has compared its weights with the reference's.
        """
        own = self.verified.path
        holds_one = (own / "config.json").is_file() and any((own / name).is_file() for name in (SINGLE, INDEX))
        return own if holds_one else self.reference

    def _structure(self, plan: Plan) -> Checking:
        """The checks that compare no numbers."""
        if plan.induction:
            self.report.odd_layers = plan.induction.odd_layers()
            yield plan.induction.checks(alone=True)
        yield self._opened()
        files = self.verified, self.reference, self.report
        yield from audit_folder(*files, allow_changed=self.allow_changed, reads=read_none)
        self.report.statements = statements(plan.induction, self.report, None) if plan.induction else []
        self.report.unseen += WITHOUT_NUMBERS
        return None, self.verified

    def _by_induction(self, induction: Induction, low_memory: bool | None) -> Checking:
        """One layer of each class in all scenarios, and single layers."""
        report = self.report
        report.odd_layers = induction.odd_layers()
        report.notes += [f"{text}; it is a class of its own" for text in report.odd_layers.values()]
        yield induction.checks(alone=False)
        yield self._opened()
        reads = read_all if induction.runs_all else induction.runs_weight
        yield from audit_folder(self.verified, self.reference, report, allow_changed=self.allow_changed, reads=reads)
        layered = holds_one_layer(self.verified, self.reference) if low_memory is None else low_memory
        comparison = self._comparison(layered, induction)
        found = yield from self._compared(comparison, None)
        report.unseen += unseen_of(induction)
        report.statements = statements(induction, report, comparison.drift)
        return found

    def _opened(self) -> list[Check]:
        """A failed check for each graph that onnxruntime does not open; no cut hides what is wrong with the whole."""
        models, settings = self.verified.models, self.session.settings
        problems = {name: why_not_opened(model, settings) for name, model in models.items()}
        return [Check("structure", name, "", verdict="fail", detail=text) for name, text in problems.items() if text]

    def _comparison(self, layered: bool, induction: Induction | None = None) -> Compared:
        options = self.report, self.session.selection, self.code
        return Compared(self.verified, self.reference, *options, layered=layered, induction=induction)

    def _compared(self, comparison: Compared, eager: Eager | None) -> Checking:
        if half := half_precision(next(iter(self.verified.models.values()))):
            rounded = comparison if eager else replace(comparison, reference=self.rounded_model())
            return (yield from compare_half_precision(rounded, half, eager))
        return (yield from comparison.run(eager))

    def _is_layered(self, wanted: bool | None) -> bool:
        """Whether to go layer by layer because the whole model does not fit; a note in the report states it."""
        session, entries = self.session, self.verified.entries
        paths: Sequence[Path] = [path for entry in entries for path in entry.paths(self.verified.path)]
        why_not = why_not_layered(entries, self.verified.models)
        if provider_name(session.settings.provider) != CPU:
            why_not = "`--provider` holds the whole model"
            if wanted:
                raise UsageProblem("`--low-memory` runs on the CPU", hint="leave out `--low-memory` or `--provider`")
        if session.bisect or session.minimized or session.selection.repeat > 1:
            why_not = "`--repeat`, `--bisect` and `--minimize` hold the whole model"
        layered, note = choose(CostEstimate.of(self.reference, distinct_files(paths)), wanted, why_not)
        self.report.notes += [note] if note else []
        return layered
