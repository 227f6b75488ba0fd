"""verify: runs the scenarios on the eager model and on every graph of a folder, and compares all outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx

from llmconv import __version__
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.manifest import MANIFEST
from llmconv.runtime.eager import EagerRunner
from llmconv.runtime.guard import load_guarded
from llmconv.runtime.ort import OrtGraph, OrtRunner, SessionSettings, graph_files
from llmconv.runtime.runner import Cache, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.compare import GATES, Gates, Measure, NoiseFloor, Truth, cache_rows, measure
from llmconv.verify.localise import localise
from llmconv.verify.report import Check, Report
from llmconv.verify.scenarios import Call, Chain, Facts, Scenario, scenarios
from llmconv.verify.structure import cache_names, check_structure
from llmconv.verify.weights import Source, audit_weights

LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")
Truths = list[list[dict[str, Truth]]]
"""By chain, by call, by output."""


@dataclass(frozen=True)
class Candidate:
    """What is compared with the eager model: one graph, or two that hand the cache over.

    Attributes:
        name: the graph's file, or both files with a plus.
        runner: runs it.
        graphs: the one or two graphs.
    """

    name: str
    runner: Runner
    graphs: tuple[OrtGraph, ...]

    @property
    def last_logits(self) -> bool:
        """The graph gives the logits of the last token only."""
        return any(graph.outputs["logits"][1] == 1 for graph in self.graphs if "logits" in graph.outputs)

    def refuses(self, call: Call) -> str:
        """Why a call cannot be run by design; empty when it can."""
        for graph in self.graphs:
            if not call.uniform and not graph.takes_positions:
                return "the graph has no position_ids"
            shape = graph.inputs.get("input_ids", [])
            if any(
                isinstance(axis, int) and axis != size for axis, size in zip(shape, call.input_ids.shape, strict=False)
            ):
                return f"the graph takes input_ids of shape {shape} only"
        return ""


def verify(
    folder: Path,
    *,
    reference: Path | None = None,
    suite: str = "quick",
    settings: SessionSettings | None = None,
    on_checks: Callable[[list[Check]], None] | None = None,
) -> Report:
    """Compares every graph of a folder with the eager model: every output, every scenario.

    Args:
        folder: what `llmconv export` left.
        reference: the Hugging Face folder of the model; as the manifest says, or `folder` itself, when left out.
        suite: `quick` or `full`.
        settings: of onnxruntime.
        on_checks: called with the checks as they come.

    Raises:
        InputRefused: the folder or the reference cannot be used, or a graph refers to what it must not.
        UsageProblem: an unknown suite.
    """
    if suite not in {"quick", "full"}:
        raise UsageProblem(f"suite `{suite}` is unknown", hint="give `quick` or `full`")
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is no folder", hint="give the folder that `llmconv export` wrote to")
    report = Report(folder.name, folder.name, suite, versions=library_versions())
    files = graph_files(folder)
    if not files:
        report.notes.append(f"no graphs in `{folder}`; make them with `llmconv export {folder}`")
        return report
    models = {path.name: load_guarded(path) for path in files.values()}
    truth_folder = reference or recorded_reference(folder)
    report.reference = truth_folder.name

    def add(checks: list[Check]) -> None:
        report.checks += checks
        if on_checks:
            on_checks(checks)

    source = Source.of(folder, truth_folder)
    _audit(models, source, report, add)
    graphs = _open(files.values(), settings, add)
    if graphs:
        _compare(truth_folder, graphs, models, report, add)
    report.where = localise(report.checks)
    return report


def recorded_reference(folder: Path) -> Path:
    """The model folder that the manifest names, or `folder` itself.

    Raises:
        InputRefused: the manifest names a folder that is not there.
    """
    name = read_json(folder / MANIFEST).get("reference") if (folder / MANIFEST).is_file() else None
    path = folder / str(name) if name else folder
    if not (path / "config.json").is_file():
        raise InputRefused(f"the model folder `{path}` has no config.json", hint="give `--reference HF_FOLDER`")
    return path


def library_versions() -> dict[str, str]:
    """Versions of what takes part in the verdict."""
    return {"llmconv": __version__, **{name: version(name) for name in LIBRARIES}}


def _audit(
    models: dict[str, onnx.ModelProto], source: Source, report: Report, add: Callable[[list[Check]], None]
) -> None:
    used: set[str] = set()
    for name, model in models.items():
        check, names = audit_weights(name, model, source)
        used |= names
        add([check])
    unused = sorted(set(source.reference) - used)
    if used and unused:
        report.notes.append(f"{len(unused)} tensors of the model are in no graph, first `{unused[0]}`")


def _open(
    paths: Iterable[Path], settings: SessionSettings | None, add: Callable[[list[Check]], None]
) -> list[OrtGraph]:
    """The graphs that onnxruntime can open; the others are failed checks."""
    graphs = []
    for path in paths:
        try:
            graphs.append(OrtGraph(path, settings))
        except LlmconvError as error:
            add([Check("structure", path.name, "", verdict="fail", detail=error.message)])
    return graphs


def _compare(
    truth_folder: Path,
    graphs: list[OrtGraph],
    models: dict[str, onnx.ModelProto],
    report: Report,
    add: Callable[[list[Check]], None],
) -> None:
    """All scenarios on all graphs."""
    dtype = graphs[0].dtype.name
    eager = Eager(truth_folder, dtype)
    shapes = eager.cache_shapes()
    add([check_structure(graph, models[graph.name], shapes) for graph in graphs])
    pair = Agreement(GATES[dtype])
    for scenario, chains in scenarios(report.suite, eager.facts()):
        truths = eager.truths(chains)
        for candidate in candidates(graphs, chains):
            add(check_scenario(scenario, chains, candidate, truths, GATES[dtype], pair))
    add(pair.checks())


def candidates(graphs: list[OrtGraph], chains: list[Chain]) -> list[Candidate]:
    """Every graph alone; and the prefill graph handing over to the decode graph, where there are steps to hand over."""
    found = [Candidate(graph.name, OrtRunner(graph, graph), (graph,)) for graph in graphs]
    two = {graph.name: graph for graph in graphs if graph.name in {"prefill.onnx", "decode.onnx"}}
    if len(two) == 2 and any(len(chain) > 1 for chain in chains):
        first, then = two["prefill.onnx"], two["decode.onnx"]
        found.append(Candidate(f"{first.name}+{then.name}", OrtRunner(first, then), (first, then)))
    return found


class Eager:
    """The model in float64 and in the graph's dtype, and the noise between the two."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._exact = EagerRunner(folder, "float64")
        self._rounded = EagerRunner(folder, dtype)
        self._floor = NoiseFloor(dtype)

    def facts(self) -> Facts:
        """What the scenarios must know of the model."""
        config = self._exact.config
        window = getattr(config, "sliding_window", None)
        limit = getattr(config, "max_position_embeddings", None)
        return Facts(self._exact.vocab_size, limit, window, self._exact.takes_positions)

    def cache_shapes(self) -> list[tuple[int, int]]:
        """(kv_heads, head_dim) of every layer."""
        one = np.zeros((1, 1), dtype=np.int64)
        present = self._exact.prefill(one, one + 1, one).present
        return [(key.shape[1], key.shape[3]) for key, _ in present.arrays()]

    def truths(self, chains: list[Chain]) -> Truths:
        """Every output of every call."""
        return [self._chain(chain) for chain in chains]

    def _chain(self, chain: Chain) -> list[dict[str, Truth]]:
        runs = zip(run_chain(self._exact, chain), run_chain(self._rounded, chain), strict=True)
        found = []
        for call, (exact, rounded) in zip(chain, runs, strict=True):
            pairs = zip(rows_of(exact).items(), rows_of(rounded).values(), strict=True)
            found.append({name: self._floor.truth(name, a, b, valid_rows(call, name)) for (name, a), b in pairs})
        return found


def run_chain(runner: Runner, chain: Chain) -> list[Step]:
    """Runs the calls one after another, each on the cache of the one before; the first one as prefill."""
    steps: list[Step] = []
    past: Cache | None = None
    for index, call in enumerate(chain):
        run = runner.decode if index else runner.prefill
        steps.append(run(call.input_ids, call.attention_mask, call.position_ids, past))
        past = steps[-1].present
    return steps


def rows_of(step: Step) -> dict[str, Array]:
    """Every output as rows [batch, tokens, features], by name."""
    arrays = [array for pair in step.present.arrays() for array in pair]
    names = cache_names("present", len(arrays) // 2)
    return {"logits": step.logits, **{name: cache_rows(a) for name, a in zip(names, arrays, strict=True)}}


def valid_rows(call: Call, output: str) -> Array:
    """The rows of an output that are not padding."""
    return call.valid if output == "logits" else call.attention_mask == 1


def check_scenario(
    scenario: Scenario, chains: list[Chain], candidate: Candidate, truths: Truths, gates: Gates, pair: Agreement
) -> list[Check]:
    """One check per output, over all chains and calls."""
    blank = Check(scenario.name, candidate.name, "")
    reason = next((candidate.refuses(call) for chain in chains for call in chain if candidate.refuses(call)), "")
    if reason:
        return [replace(blank, output="logits", verdict="skip", detail=reason)]
    measures: dict[str, list[Measure]] = defaultdict(list)
    for chain, truth in zip(chains, truths, strict=True):
        try:
            steps = run_chain(candidate.runner, chain)
        except LlmconvError as error:
            return [replace(blank, output="logits", verdict="fail", detail=error.message)]
        for call, step, expected in zip(chain, steps, truth, strict=True):
            rows = rows_of(step)
            for name, wanted in expected.items():
                wanted = wanted.last() if candidate.last_logits and name == "logits" else wanted
                measures[name].append(_measure(wanted, rows.get(name), name))
            pair.see(candidate, scenario, expected, rows)
    return [fold(blank, name, found, gates) for name, found in measures.items()]


def _measure(truth: Truth, rows: Array | None, name: str) -> Measure:
    if rows is None:
        return Measure(problem="the graph lacks this output")
    return measure(truth, rows, tokens=name == "logits")


def fold(blank: Check, output: str, measures: list[Measure], gates: Gates) -> Check:
    """The check of one output over all its calls: the first that fails, else the worst."""
    failing = [index for index, found in enumerate(measures) if not found.passes(gates)]
    step = failing[0] if failing else max(range(len(measures)), key=lambda index: measures[index].sigma)
    at = measures[step]
    detail = at.problem or (f"{at.flips} likeliest tokens differ" if at.flips else "")
    return replace(
        blank,
        output=output,
        sigma=round(max(found.sigma for found in measures), 4),
        row_sigma=round(max(found.row_sigma for found in measures), 4),
        max_abs=max(found.max_abs for found in measures),
        verdict="fail" if failing else "pass",
        step=step,
        steps=len(measures),
        row=at.row,
        detail=detail,
    )


class Agreement:
    """Whether the prefill and the decode graph say the same, apart from what the eager model says."""

    def __init__(self, gates: Gates) -> None:
        # Two correct graphs may each be off by the gate, in opposite directions.
        self._gates = Gates(2 * gates.aggregate, 2 * gates.row)
        self._prefill: list[dict[str, Array]] = []
        self._scenario = ""
        self._measures: dict[str, list[Measure]] = defaultdict(list)

    def see(self, candidate: Candidate, scenario: Scenario, truth: dict[str, Truth], rows: dict[str, Array]) -> None:
        """Notes what a candidate gave; the decode graph's calls come after the same calls of the prefill graph."""
        if scenario.name != self._scenario:
            self._scenario, self._prefill = scenario.name, []
        if candidate.name == "prefill.onnx":
            self._prefill.append(rows)
        elif candidate.name == "decode.onnx" and self._prefill:
            other = self._prefill.pop(0)
            for name in rows.keys() & other.keys() & truth.keys():
                wanted = replace(truth[name], exact=other[name].astype(np.float64))
                if rows[name].shape == other[name].shape == truth[name].exact.shape:
                    self._measures[name].append(measure(wanted, rows[name]))

    def checks(self) -> list[Check]:
        """One check per output."""
        blank = Check("prefill and decode agree", "prefill.onnx+decode.onnx", "")
        return [fold(blank, name, found, self._gates) for name, found in sorted(self._measures.items())]
