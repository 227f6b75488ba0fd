"""The foreign graphs' side of a comparison: which of them run alone or together, and what they leave out by design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmconv.errors import LlmconvError, OutOfMemory, UsageProblem
from llmconv.runtime.runner import Step
from llmconv.verify.comparison.candidates import Candidate, PrefillDecodeAgreement, check_scenario, steady, unsteady
from llmconv.verify.other_exporters.graph_cache import ForeignCache
from llmconv.verify.other_exporters.position_counts import counts_slots, slot_chains, with_slots
from llmconv.verify.other_exporters.runners import ForeignRunner, Replay
from llmconv.verify.other_exporters.session import ForeignGraph
from llmconv.verify.reference.eager import Eager, ExpectedOutputs, run_chain
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.measure import ExpectedOutput, Gates, rms
from llmconv.verify.results.report import Check
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.table import Scenario


@dataclass(frozen=True)
class ForeignCandidate(Candidate):
    """One foreign graph, or the graph of the prompt that hands its cache to the graph of the steps.

    Attributes:
        foreign: the one or two graphs.
        last_only: it gives the logits of the last token only.
    """

    foreign: tuple[ForeignGraph, ...] = ()
    last_only: bool = False

    @property
    def last_logits(self) -> bool:
        """See `Candidate`."""
        return self.last_only

    @property
    def role(self) -> str:
        """Two foreign graphs are not compared with each other: both are compared with the model."""
        return ""

    def refuses(self, call: Call) -> str:
        """Why a call cannot be run by design; empty when it can."""
        return next((reason for graph in self.foreign if (reason := graph.limits.refusal(call))), "")


def foreign_candidates(graphs: Sequence[ForeignGraph]) -> list[ForeignCandidate]:
    """Every graph that can begin a sequence alone, and two that hand the cache over.

    Raises:
        UsageProblem: a graph takes one token after a past, and there is none for the prompt.
    """
    ordered = sorted(graphs, key=lambda graph: (graph.keeps_cache, graph.limits.tokens is not None))
    beginning = [graph for graph in ordered if not (graph.keeps_cache and graph.limits.tokens is not None)]
    if not beginning:
        raise UsageProblem(
            f"`{ordered[0].name}` takes one token after a past and cannot begin",
            hint="give the graph of the prompt too: `--graph prefill.onnx --graph decode.onnx`",
        )
    found = [ForeignCandidate(graph.name, ForeignRunner(graph, graph), (), (graph,)) for graph in beginning]
    if len(ordered) == 2 and ordered[1].keeps_cache:
        first, then = ordered
        found.append(ForeignCandidate(f"{first.name}+{then.name}", ForeignRunner(first, then), (), (first, then)))
    return found


def check_foreign(
    scenario: Scenario,
    chains: list[Chain],
    candidate: ForeignCandidate,
    truths: ExpectedOutputs,
    eager: Eager,
    gates: Gates,
    evidence: Evidence | None = None,
    repeat: int = 1,
) -> list[Check]:
    """`check_scenario`, over those chains, outputs and rows that the graphs can give by design."""
    refusals = [next(filter(None, map(candidate.refuses, chain)), "") for chain in chains]
    if all(refusals):
        return check_scenario(scenario, chains, candidate, truths, gates, PrefillDecodeAgreement(gates))
    able = [at for at, reason in enumerate(refusals) if not reason]
    chains = [chains[at] for at in able]
    try:
        runs = [run_chain(candidate.runner, chain) for chain in chains]
        if not all(steady(candidate.runner, *pair, repeat) for pair in zip(chains, runs, strict=True)):
            return [unsteady(Check(scenario.name, candidate.name, ""))]
    except OutOfMemory:
        raise
    except LlmconvError as error:
        return [Check(scenario.name, candidate.name, "logits", verdict="fail", detail=error.message)]
    checks = _compare(scenario, chains, candidate, runs, [truths[at] for at in able], gates, evidence)
    if any(check.verdict == "fail" for check in checks) and counts_slots(candidate.foreign, chains):
        other = replace(scenario, name=f"{scenario.name}, positions count padding")
        slots = slot_chains(chains)
        counted = _compare(scenario, slots, candidate, runs, eager.expected_outputs(other, slots), gates)
        checks = with_slots(checks, counted, chains)
    left_out = len(refusals) - len(able)
    why = f"{left_out} of {len(refusals)} sequences left out: {next(filter(None, refusals))}" if left_out else ""
    return [replace(check, detail="; ".join(filter(None, (check.detail, why)))) for check in checks]


def _compare(
    scenario: Scenario,
    chains: list[Chain],
    candidate: ForeignCandidate,
    runs: list[list[Step]],
    truths: ExpectedOutputs,
    gates: Gates,
    evidence: Evidence | None = None,
) -> list[Check]:
    """The checks of calls that were run."""
    pairs = [pair for chain, steps in zip(chains, runs, strict=True) for pair in zip(chain, steps, strict=True)]
    last_only = any(step.logits.shape[1] == 1 < call.input_ids.shape[1] for call, step in pairs)
    given = [
        [_given(truth, step) for truth, step in zip(wanted, steps, strict=True)]
        for wanted, steps in zip(truths, runs, strict=True)
    ]
    replay = replace(candidate, runner=Replay(step for steps in runs for step in steps), last_only=last_only)
    return check_scenario(scenario, chains, replay, given, gates, PrefillDecodeAgreement(gates), evidence)


def _given(truth: dict[str, ExpectedOutput], step: Step) -> dict[str, ExpectedOutput]:
    """The truth of what a step gives: no keys and values where it keeps none, of a window the last ones."""
    kept = step.present.kept if isinstance(step.present, ForeignCache) else {}
    return {
        name: expected if name == "logits" else _last_rows(expected, kept[name].shape[2])
        for name, expected in truth.items()
        if name == "logits" or name in kept
    }


def _last_rows(truth: ExpectedOutput, count: int) -> ExpectedOutput:
    """The truth of the last `count` tokens; the rows in front of them are not compared."""
    forgotten = truth.valid.shape[1] - count
    if forgotten <= 0:
        return truth
    valid = truth.valid & (np.arange(truth.valid.shape[1]) >= forgotten)
    return replace(truth, valid=valid, total_noise=max(rms(truth.noise[valid]), 1e-300))
