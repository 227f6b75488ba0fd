"""Method: whether a verification runs a whole model, one layer of each class by induction, or compares no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from llmconv.errors import UsageProblem
from llmconv.runtime.onnxruntime.session_settings import CPU, provider_name
from llmconv.verify.audit.weights import WeightSource
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.layer_by_layer import why_not_layered
from llmconv.verify.comparison.run import takes_embeddings
from llmconv.verify.layers.graph_index import NotLayered
from llmconv.verify.layers.induction import Induction, LayerChoice
from llmconv.verify.reference.cost_estimate import SECONDS, CostEstimate, distinct_files
from llmconv.verify.results.report import WHOLE
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.verification import Session

AUTO, INDUCTION, STRUCTURE = "auto", "induction", "structure"
METHODS = (AUTO, WHOLE, INDUCTION, STRUCTURE)

WORTH_WAITING = 60.0
"""Estimated seconds up to which `auto` runs the whole model."""

IN_MEMORY = 1 << 30
"""Bytes of the whole model up to which an induction holds its few layers in memory."""


@dataclass(frozen=True)
class Method:
    """The method that was asked for, one of `METHODS`, and which layers an induction runs by themselves.

    Raises:
        UsageProblem: the method is unknown, or layers are chosen for a method that runs none by themselves.
    """

    name: str = AUTO
    layers: LayerChoice = field(default_factory=LayerChoice)

    @classmethod
    def of(cls, name: str, layers: str | None) -> Method:
        """The method by the options of the command; `layers` is None for the default, and else means an induction."""
        if name not in METHODS:
            raise UsageProblem(f"unknown method `{name[:40]}`", hint="give `" + "`, `".join(METHODS) + "`")
        if layers is not None and name in (WHOLE, STRUCTURE):
            raise UsageProblem(f"`--layers` does not apply to `--method {name}`", hint="give `--method induction`")
        return cls(name) if layers is None else cls(INDUCTION, LayerChoice(layers))

    def require_runs(self, session: Session, *, low_memory: bool | None) -> None:
        """Raises UsageProblem for options of runs where no graph is run."""
        selection = session.selection
        given = {
            "--scenario": bool(selection.only),
            "--suite": selection.suite != Selection.suite,
            "--budget": selection.budget is not None,
            "--repeat": selection.repeat > 1,
            "--bisect": session.bisect,
            "--minimize": session.minimized is not None,
            "--low-memory": bool(low_memory),
        }
        if self.name == STRUCTURE and (option := next((name for name, is_given in given.items() if is_given), "")):
            raise UsageProblem(
                f"`--method {STRUCTURE}` runs no graph, so it excludes `{option}`", hint=f"leave out `{option}`"
            )

    @property
    def is_forced(self) -> bool:
        """Whether an induction or the structure was asked for."""
        return self.name in (INDUCTION, STRUCTURE)


@dataclass(frozen=True)
class Plan:
    """The method that a verification uses: `whole`, `induction` or `structure`.

    `induction` is None where the whole model runs, or no layers were found; `note` says why this method, empty where it
    was asked for.
    """

    method: str
    induction: Induction | None = None
    note: str = ""


def planned(
    method: Method,
    verified: VerifiedFolder,
    reference: Path,
    session: Session,
    low_memory: bool | None,
    code: Path | None,
) -> Plan:
    """The method for a folder of graphs of floats; with `auto`, a choice of `low_memory` means the whole model."""
    if method.name == WHOLE or (method.name == AUTO and low_memory is not None):
        return Plan(WHOLE)
    estimate = CostEstimate.of(reference, 1)
    seconds = estimate.elements * SECONDS
    if method.name == AUTO and seconds <= WORTH_WAITING:
        return Plan(WHOLE)
    if why_not := _why_not(verified, session, method.name):
        return _without(method.name, why_not)
    source = WeightSource.of(verified.path, reference)
    try:
        induction = Induction.of(_layered(verified.models), source, reference, code, method.layers)
    except NotLayered as odd:
        return _without(method.name, str(odd))
    if induction.is_whole and method.name != STRUCTURE:
        return _without(method.name, "no two of its layers are alike")
    time = f"the whole model would take {estimate.minutes}"
    note = f"by induction over layers: {time}; `--method whole` runs it"
    return Plan(STRUCTURE if method.name == STRUCTURE else INDUCTION, induction, note if method.name == AUTO else "")


def _without(method: str, why_not: str) -> Plan:
    if method == STRUCTURE:
        return Plan(STRUCTURE, None, f"not shown: {why_not}")
    return Plan(WHOLE, None, f"the whole model is run, without induction: {why_not}")


def _layered(models: Mapping[str, onnx.ModelProto]) -> dict[str, onnx.ModelProto]:
    return {name: model for name, model in models.items() if len(model.graph.output) > 1}


def _why_not(verified: VerifiedFolder, session: Session, method: str) -> str:
    """Why layers cannot be cut out; empty if they can."""
    if any(len(entry.files) > 1 for entry in verified.entries) and method != STRUCTURE:
        return "the graphs are in stages"
    if any(entry.prefix for entry in verified.entries):
        return "a graph has a prefix"
    if method == STRUCTURE:
        return ""
    if any(entry.postprocess for entry in verified.entries):
        return "a graph chooses tokens"
    if fixed := why_not_layered(verified.entries, verified.models):
        return fixed
    if session.bisect or session.minimized or session.selection.repeat > 1:
        return "`--repeat`, `--bisect` and `--minimize` run the whole model"
    if provider_name(session.settings.provider) != CPU:
        return "`--provider` runs the whole model"
    return "the graphs take embeddings" if takes_embeddings(verified.models.values()) else ""


def holds_one_layer(verified: VerifiedFolder, reference: Path) -> bool:
    """Whether an induction holds the weights of one layer at a time, because the model is not small."""
    files = [path for entry in verified.entries for path in entry.paths(verified.path)]
    small = CostEstimate.of(reference, distinct_files(files)).whole <= IN_MEMORY
    return not small and not why_not_layered(verified.entries, verified.models)
