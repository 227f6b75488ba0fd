"""ExternalCandidate: one or two graphs of another exporter in a comparison, and the calls that they do not support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmconv.errors import LlmconvError, OutOfMemory, UsageProblem
from llmconv.runtime.runner import Step
from llmconv.verify.comparison.candidates import Candidate, PrefillDecodeAgreement, check_scenario, steady, unsteady
from llmconv.verify.other_exporters.external_graph import ExternalGraph
from llmconv.verify.other_exporters.graph_cache import ExternalCache
from llmconv.verify.other_exporters.position_counts import (
    checks_with_padding_counted,
    may_count_padding,
    with_padding_counted,
)
from llmconv.verify.other_exporters.runners import ExternalRunner, RecordedSteps
from llmconv.verify.reference.chain_runs import run_chain
from llmconv.verify.reference.eager import Eager, ExpectedOutputs
from llmconv.verify.results.evidence import Evidence
from llmconv.verify.results.report import Check
from llmconv.verify.results.sigma import ExpectedOutput, Gates, rms
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.table import Scenario


@dataclass(frozen=True)
class ExternalCandidate(Candidate):
    """One external graph, or a prefill graph whose cache a decode graph continues.

    Attributes:
        external: the one or two graphs.
        last_only: whether it returns the logits of the last token only.
    """

    external: tuple[ExternalGraph, ...] = ()
    last_only: bool = False

    @property
    def last_logits(self) -> bool:
        """See `Candidate`."""
        return self.last_only

    @property
    def role(self) -> str:
        """Empty: external graphs are compared with the model only, not with each other."""
        return ""

    def refuses(self, call: Call, *, whole: bool = False) -> str:
        """The reason why the graphs do not support a call; else empty; arguments as in `Candidate.refuses`."""
        return next((reason for graph in self.external if (reason := graph.limits.refusal(call))), "")


def external_candidates(graphs: Sequence[ExternalGraph]) -> list[ExternalCandidate]:
    """Every graph that can start a sequence alone, and the pair of prefill and decode graph.

    Raises:
        UsageProblem: the only graph is a decode graph.
    """
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
    """The checks of a scenario, over the chains, outputs and tokens that the graphs support.

    Args:
        scenario: the scenario.
        chains: its chains of calls.
        candidate: the graphs.
        truths: the exact outputs, per chain and call.
        eager: the model, for exact outputs with other positions.
        gates: limits of the dtype.
        evidence: collects figures for the report.
        repeat: how often each chain runs.
    """
    refusals = [next(filter(None, map(candidate.refuses, chain)), "") for chain in chains]
    if all(refusals):
        return check_scenario(scenario, chains, candidate, truths, gates, PrefillDecodeAgreement(gates))
    supported = [at for at, reason in enumerate(refusals) if not reason]
    chains = [chains[at] for at in supported]
    try:
        runs = [run_chain(candidate.runner, chain) for chain in chains]
        if not all(steady(candidate.runner, *pair, repeat) for pair in zip(chains, runs, strict=True)):
            return [unsteady(Check(scenario.name, candidate.name, ""))]
    except OutOfMemory:
        raise
    except LlmconvError as error:
        return [Check(scenario.name, candidate.name, "logits", verdict="fail", detail=error.message)]
    checks = _compare(scenario, chains, candidate, runs, [truths[at] for at in supported], gates, evidence)
    if any(check.verdict == "fail" for check in checks) and may_count_padding(candidate.external, chains):
        other = replace(scenario, name=f"{scenario.name}, positions count padding")
        counting = with_padding_counted(chains)
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
    recorded = replace(candidate, runner=RecordedSteps(step for steps in runs for step in steps), last_only=last_only)
    return check_scenario(scenario, chains, recorded, expected, gates, PrefillDecodeAgreement(gates), evidence)


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
