"""Runs the scenarios on external graphs and the eager model, with original and scaled weights.

Graphs without an input for positions may count padding as tokens, while transformers' `generate` computes positions
from the mask. Such a graph may still be correct: padding on the left shifts all positions of a row alike, which
relative positions show in the rotated keys only, not in the logits.

To scale weights (see `llmconv.verify.comparison.layer_by_layer`), initializers are scaled like the model's tensors. A
graph can be scaled if the audit found every matrix of the model in it; of quantized matrices, the scales are scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from llmconv.errors import UsageProblem
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Runner, Step, refuse_placed
from llmconv.tensors import Array, LazyTensor
from llmconv.verify.audit.weights import initializer_values
from llmconv.verify.comparison.candidates import Candidate, PrefillDecodeAgreement, check_scenario, steps_of
from llmconv.verify.comparison.layer_by_layer import scale
from llmconv.verify.comparison.run import compare_scaled, not_run, skipped
from llmconv.verify.other_exporters.external_graph import ExternalCache, ExternalGraph, GraphFile, ModelSizes
from llmconv.verify.other_exporters.quantized.tensor_matching import InitializerContent, MatchedMatrix, TensorMatch
from llmconv.verify.reference.eager import Eager, ExpectedOutputs
from llmconv.verify.reference.other_roundings import SCALED_SCENARIOS, SCALINGS, WeightScaling
from llmconv.verify.results import Check, Checks, Report
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.scenarios.table import Scenario
from llmconv.verify.sigma import GATES, Evidence, ExpectedOutput, Gates, rms


@dataclass(frozen=True)
class ExternalComparison:
    """The settings of a comparison; its methods yield checks."""

    sizes: ModelSizes
    settings: SessionSettings
    tensors: Mapping[str, LazyTensor]
    selection: Selection
    report: Report

    def run(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """Compares all scenarios on the graphs or copies of them (`named`), then a few with scaled weights."""
        eager.begin()
        if graphs := (yield from self.opened(files)):
            yield from self.compare(eager, graphs, named=named)
            yield from self.compare_scaled(eager, files, named)

    def opened(
        self, files: Sequence[GraphFile], change: WeightScaling | None = None
    ) -> Generator[list[Check], None, list[ExternalGraph]]:
        """Opens all graphs, with scaled weights if given; if one fails, yields failed checks and returns none."""
        settings = [scaled_settings(self.settings, f, self.tensors, change) if change else self.settings for f in files]
        opened = [file.open(self.sizes, own) for file, own in zip(files, settings, strict=True)]
        yield [graph for graph in opened if isinstance(graph, Check)]
        graphs = [graph for graph in opened if isinstance(graph, ExternalGraph)]
        return graphs if len(graphs) == len(opened) else []

    def compare(
        self,
        eager: Eager,
        graphs: Sequence[ExternalGraph],
        change: WeightScaling | None = None,
        named: str = "",
        few: bool = False,
    ) -> Checks:
        """Compares all scenarios on every graph that can start a sequence, and on the pair of two graphs.

        `change` scales model and graphs, and `named` is a suffix of the scenarios' names. `few` runs only the scenarios
        that are also run with scaled weights.
        """
        found = external_candidates(graphs)
        evidence, repeat = self.report.evidence, self.selection.repeat
        if not (change or few or named):
            yield skipped(self.selection, eager, [candidate.name for candidate in found])
        planned = self.selection.calls(eager.facts())
        if change or few:
            planned = [one for one in planned if one[0].name in SCALED_SCENARIOS]
        rows = (self.selection if not change else replace(self.selection, budget=None)).paced(planned)
        for scenario, chains in rows:
            row = change.scenario(scenario) if change else scenario
            truths = eager.expected_outputs(row, chains)
            row = replace(row, name=f"{row.name}{named}")
            for candidate in found:
                if len(candidate.external) == 1 or any(len(chain) > 1 for chain in chains):
                    seen = Evidence() if change else evidence.setdefault(f"{candidate.name}{named}", Evidence())
                    yield check_external(row, chains, candidate, truths, eager, GATES[eager.dtype], seen, repeat)
        left = [replace(row, name=f"{row.name}{named}") for row in rows.left]
        yield from not_run(left, self.selection.budget, [candidate.name for candidate in found])

    def compare_scaled(self, eager: Eager, files: Sequence[GraphFile], named: str = "") -> Checks:
        """Compares a few scenarios with scaled weights; yields skipped checks if that is not possible."""
        reasons = [why_not_scalable(file.contents, file.quantized_weights, self.tensors) for file in files]

        def compare(change: WeightScaling) -> Checks:
            if graphs := (yield from self.opened(files, change)):
                scaled = eager.scaled(change)
                yield from self.compare(scaled, graphs, change, named)
                scaled.release()

        names, why_not = [file.name for file in files], next(filter(None, reasons), "")
        yield from compare_scaled(eager, self.selection, self.report, names, why_not, compare, named)


@dataclass(frozen=True)
class ExternalCandidate(Candidate):
    """One external graph, or a pair of prefill and decode graph; `last_only` if it returns only the last logits."""

    external: tuple[ExternalGraph, ...] = ()
    last_only: bool = False

    @property
    def last_logits(self) -> bool:
        return self.last_only

    @property
    def role(self) -> str:
        """Empty: external graphs are compared with the model only, not with each other."""
        return ""

    def refuses(self, call: Call, *, whole: bool = False) -> str:
        """The reason why the graphs do not support a call; else empty; arguments as in `Candidate.refuses`."""
        return next((reason for graph in self.external if (reason := graph.limits.refusal(call))), "")


def external_candidates(graphs: Sequence[ExternalGraph]) -> list[ExternalCandidate]:
    """Every graph that can start a sequence alone, and the pair of two; UsageProblem for a decode graph alone."""
    ordered = sorted(graphs, key=lambda graph: (graph.keeps_cache, graph.limits.tokens is not None))
    starting = [graph for graph in ordered if not (graph.keeps_cache and graph.limits.tokens is not None)]
    if not starting:
        raise UsageProblem(
            f"`{ordered[0].name}` takes one token after a past, so it cannot run a prompt",
            hint="give the prefill graph, too: `--graph prefill.onnx --graph decode.onnx`",
        )
    found = [ExternalCandidate(graph.name, ExternalRunner(graph, graph), (), (graph,)) for graph in starting]
    if len(ordered) == 2 and ordered[1].keeps_cache:
        first, then = ordered
        found.append(ExternalCandidate(f"{first.name}+{then.name}", ExternalRunner(first, then), (), (first, then)))
    return found


def check_external(
    scenario: Scenario,
    chains: list[Chain],
    candidate: ExternalCandidate,
    truths: ExpectedOutputs,
    eager: Eager,
    gates: Gates,
    evidence: Evidence | None = None,
    repeat: int = 1,
) -> list[Check]:
    """The checks of a scenario over what the graphs support; `eager` gives exact outputs with other positions."""
    refusals = [next(filter(None, map(candidate.refuses, chain)), "") for chain in chains]
    if all(refusals):
        return check_scenario(scenario, chains, candidate, truths, gates, PrefillDecodeAgreement(gates))
    supported = [at for at, reason in enumerate(refusals) if not reason]
    chains = [chains[at] for at in supported]
    blank, runs = Check(scenario.name, candidate.name, ""), list[list[Step]]()
    for chain in chains:
        steps = steps_of(candidate, chain, repeat, blank)
        if isinstance(steps, Check):
            return [steps]
        runs.append(steps)
    checks = _compare(scenario, chains, candidate, runs, [truths[at] for at in supported], gates, evidence)
    if any(check.verdict == "fail" for check in checks) and may_count_padding(candidate.external, chains):
        other = replace(scenario, name=f"{scenario.name}, positions count padding")
        counting = [[replace(call, position_ids=_all_positions(call)) for call in chain] for chain in chains]
        counted = _compare(scenario, counting, candidate, runs, eager.expected_outputs(other, counting), gates)
        checks = checks_with_padding_counted(checks, counted, chains)
    skipped = len(refusals) - len(supported)
    why = f"{skipped} of {len(refusals)} sequences skipped: {next(filter(None, refusals))}" if skipped else ""
    return [replace(check, detail="; ".join(filter(None, (check.detail, why)))) for check in checks]


def _compare(
    scenario: Scenario,
    chains: list[Chain],
    candidate: ExternalCandidate,
    runs: list[list[Step]],
    truths: ExpectedOutputs,
    gates: Gates,
    evidence: Evidence | None = None,
) -> list[Check]:
    """Compares the outputs of calls with their truths; other arguments as in `check_external`."""
    pairs = [pair for chain, steps in zip(chains, runs, strict=True) for pair in zip(chain, steps, strict=True)]
    last_only = any(step.logits.shape[1] == 1 < call.input_ids.shape[1] for call, step in pairs)
    expected = [
        [_comparable(truth, step) for truth, step in zip(wanted, steps, strict=True)]
        for wanted, steps in zip(truths, runs, strict=True)
    ]
    judged, pair = replace(candidate, last_only=last_only), PrefillDecodeAgreement(gates)
    return check_scenario(scenario, chains, judged, expected, gates, pair, evidence, runs=runs)


def _comparable(truth: dict[str, ExpectedOutput], step: Step) -> dict[str, ExpectedOutput]:
    """The truth of the outputs that a step returned: without a missing cache, and with the tokens of a window only."""
    kept = step.present.kept if isinstance(step.present, ExternalCache) else {}
    return {
        name: exact if name == "logits" else _last_tokens(exact, kept[name].shape[2])
        for name, exact in truth.items()
        if name == "logits" or name in kept
    }


def _last_tokens(truth: ExpectedOutput, count: int) -> ExpectedOutput:
    """The truth of the last `count` tokens; earlier tokens are not compared."""
    forgotten = truth.valid.shape[1] - count
    if forgotten <= 0:
        return truth
    valid = truth.valid & (np.arange(truth.valid.shape[1]) >= forgotten)
    return replace(truth, valid=valid, total_noise=max(rms(truth.noise[valid]), 1e-300))


class ExternalRunner(Runner):
    """A prefill and a decode graph; one graph may serve as both."""

    def __init__(self, prefill: ExternalGraph, decode: ExternalGraph) -> None:
        self._prefill, self._decode = prefill, decode

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        refuse_placed(placed)
        return self._prefill.run(call, past, extras)

    def _run_step(self, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        return self._decode.run(call, past, extras)


def may_count_padding(graphs: Sequence[ExternalGraph], chains: list[Chain]) -> bool:
    """Whether positions may differ from those of `generate`."""
    padded = any(not chain[-1].attention_mask.all() for chain in chains)
    return padded and any(not graph.limits.takes_positions for graph in graphs)


def _all_positions(call: Call) -> Array:
    total, (rows, new) = call.attention_mask.shape[1], call.input_ids.shape
    return np.tile(np.arange(total - new, total), (rows, 1))


def checks_with_padding_counted(checks: list[Check], counted: list[Check], chains: list[Chain]) -> list[Check]:
    """The checks against a model that counts padding (`counted`), except for logits after padding on the left.

    Clients use those logits in padded batches, so they must equal those of `generate` (`checks`).
    """
    if any(check.verdict == "fail" for check in counted if check.output != "logits"):
        return checks
    left = all((np.diff(chain[-1].attention_mask, axis=1) >= 0).all() for chain in chains)
    kept = {check.output: check for check in checks if left and check.output == "logits"}
    detail = "positions count padding, as the graph has no input for them"
    return [kept.get(check.output, replace(check, detail=check.detail or detail)) for check in counted]


def why_not_scalable(
    contents: Mapping[str, InitializerContent], quantized: Sequence[MatchedMatrix], reference: Mapping[str, LazyTensor]
) -> str:
    """The reason why a graph cannot be scaled; else empty.

    A matrix of unknown content is assumed to be a table of the graph if no tensor of the model has its shape.
    `contents` are the initializers by name, from `match_contents`.
    """
    matrices = {name: tensor.shape for name, tensor in reference.items() if len(tensor.shape) > 1}
    found = {name for content in contents.values() if content.matched for name in content.names}
    found |= {name for one in quantized for name in one.names}
    missing = sorted(matrices.keys() - found)
    if missing:
        return f"`{missing[0]}` was not found in the graph"
    shapes = {*matrices.values(), *(shape[::-1] for shape in matrices.values())}
    odd = [name for name, content in contents.items() if not content.matched and content.shape in shapes]
    odd += [one.stored.name for one in quantized if not one.whole]
    return f"the content of `{odd[0]}` is unknown" if odd else _why_scales_are_not_scalable(quantized)


def _why_scales_are_not_scalable(quantized: Sequence[MatchedMatrix]) -> str:
    uses = Counter(name for name, _ in {(one.stored.scales, one.stored.name) for one in quantized})
    shared = next((name for name, count in uses.items() if count > 1), "")
    if shared:
        return f"several matrices share the scales `{shared}`"
    for one in quantized:
        if not all(_window(one, match) for match in one.matches):
            return f"the tensors in `{one.stored.name}` share scales"
        if any(not _is_exact(one.stored.scale, change.factor) for change in SCALINGS):
            return f"the scales of `{one.stored.name}` are too small to be made smaller"
    return ""


def _is_exact(scales: Array, factor: float) -> bool:
    with np.errstate(over="ignore"):
        scaled = scales * scales.dtype.type(factor)
    return bool(np.array_equal(scaled.astype(np.float64), scales.astype(np.float64) * factor))


def _window(one: MatchedMatrix, match: TensorMatch) -> tuple[slice, slice] | None:
    """The window of a match in the grid of scales; None if its neighbors share scales with it."""
    slices = []
    for part, repeat, size in zip((match.rows, match.columns), one.stored.repeat, one.stored.shape, strict=True):
        if part.start % repeat or (part.stop % repeat and part.stop != size):
            return None
        slices.append(slice(part.start // repeat, -(-part.stop // repeat)))
    return slices[0], slices[1]


def scaled_settings(
    settings: SessionSettings,
    file: GraphFile,
    reference: Mapping[str, LazyTensor],
    change: WeightScaling,
    *,
    at_weights: bool = False,
) -> SessionSettings:
    """Session settings that scale the weights when a graph is opened; `at_weights` as for `scale`."""
    scales = {one.stored.scales: one for one in file.quantized_weights}
    offsets = {name: one for one in file.quantized_weights for name in one.stored.offsets}

    def apply(path: Path, model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name in offsets:
                match = next(match for match in offsets[tensor.name].matches if tensor.name.startswith(match.name))
                factor = change.factor_of(match.name, reference[match.name].shape)
                values = np.array(initializer_values(tensor, path.parent))
                tensor.CopyFrom(numpy_helper.from_array(values * values.dtype.type(factor), tensor.name))
            if tensor.name in scales:
                values, one = np.array(initializer_values(tensor, path.parent)), scales[tensor.name]
                grid = values.reshape(one.stored.scale.shape)
                for match in one.matches:
                    factor = change.factor_of(match.name, reference[match.name].shape)
                    grid[_window(one, match)] *= values.dtype.type(factor)
                tensor.CopyFrom(numpy_helper.from_array(grid.reshape(values.shape), tensor.name))
        factors = {name: _factor(content, reference, change) for name, content in file.contents.items()}
        scale(model, factors, at_weights=at_weights)

    return replace(settings, change=apply)


def _factor(content: InitializerContent, reference: Mapping[str, LazyTensor], change: WeightScaling) -> float | Array:
    """The factor of an initializer; per row or column if it contains several tensors."""
    if content.whole:
        return change.factor_of(content.whole, reference[content.whole].shape)
    if not content.parts:
        return 1.0
    transposed = not content.covered(transposed=False)
    found = np.ones(content.shape[-1 if transposed else 0])
    done: set[int] = set()
    for part in content.parts:
        rows = [row for row in part.rows if row not in done] if part.transposed is transposed else []
        done |= set(rows)
        found[rows] = change.factor_of(part.name, reference[part.name].shape)
    return found if transposed else found.reshape(-1, *[1] * (len(content.shape) - 1))
