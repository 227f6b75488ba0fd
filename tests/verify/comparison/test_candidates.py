"""What a graph is asked, beyond its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.comparison.candidates import Candidate, PrefillDecodeAgreement, check_scenario
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check
from llmconv.verify.scenarios.selection import Selection
from llmconv.verify.sigma import GATES, Evidence

GATE = GATES["float32"]


@dataclass
class Unsteady(Runner):
    """A graph whose logits are one unit in the last place higher in every other run of a prompt."""

    runner: OrtRunner
    runs: count[int]

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
        *,
        last_only: bool = False,
    ) -> Step:
        """Runs it."""
        step = self.runner.prefill(input_ids, attention_mask, position_ids, past, extras, placed)
        if next(self.runs) % 2:
            step = replace(step, logits=np.nextafter(step.logits, np.float32(np.inf)))
        return step

    decode = prefill


def checks(exported: Path, eager: Eager, repeat: int) -> list[Check]:
    """Of an unsteady graph."""
    graph = OrtGraph(exported / "decode.onnx")
    candidate = Candidate(graph.name, Unsteady(OrtRunner(graph, graph), count()), (graph,))
    ((scenario, chains),) = Selection("quick", ["prefill, 33 tokens"]).calls(eager.facts())
    truths = eager.expected_outputs(scenario, chains)
    return check_scenario(scenario, chains, candidate, truths, GATE, PrefillDecodeAgreement(GATE), Evidence(), repeat)


def test_a_graph_whose_runs_differ_by_a_bit_fails_when_repeated(
    exported: Callable[[str], Path], eager: Callable[[str], Eager]
) -> None:
    assert {check.verdict for check in checks(exported("llama"), eager("llama"), 1)} == {"pass"}
    (failed,) = checks(exported("llama"), eager("llama"), 2)
    assert (failed.verdict, failed.detail) == ("fail", "two runs of the graph differ")
