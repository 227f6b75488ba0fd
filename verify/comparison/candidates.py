"""Runs the calls of a scenario on one graph, or on prefill and decode graph in turn, and measures every output.

GraphProbe: reads inner values of a graph, by running it with more outputs, or a piece of it, from memory.

onnxruntime gets the changed graph as bytes and the folder of the weights as an option, so that it maps the same weight
files. Graph optimization is off, because it would remove the values to be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from llmconv.errors import LlmconvError, MalformedInput, first_line
from llmconv.output.manifest import PrefixEntry
from llmconv.runtime.extra_inputs import ExtraValues, is_state
from llmconv.runtime.onnxruntime.graph import OrtGraph
from llmconv.runtime.onnxruntime.guard import refill, values_read_by, weight_bytes
from llmconv.runtime.onnxruntime.packed_cache import WEIGHTS_FOLDER, followed
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.onnxruntime.time_limit import LimitedSession, TimeLimit
from llmconv.runtime.runner import Choices, Runner, Step
from llmconv.tensors import Array
from llmconv.verify.reference.eager import ExpectedOutputs
from llmconv.verify.reference.other_roundings import outputs_of, run_chain
from llmconv.verify.results import Check, problem_of
from llmconv.verify.scenarios.calls import Call, Chain
from llmconv.verify.scenarios.table import Scenario
from llmconv.verify.sigma import Evidence, ExpectedOutput, Gates, Measure, calmest_sigma, measure, rms


@dataclass(frozen=True)
class Candidate:
    """One graph, or two of which the second continues the cache of the first, to be compared with the eager model."""

    name: str  # file name of the graph, or both joined with a plus
    runner: Runner
    graphs: tuple[OrtGraph, ...]
    asks_last: bool = field(default=False, kw_only=True)  # its runner asks for the last logits of a prompt

    @property
    def last_logits(self) -> bool:
        """Whether a graph that takes several tokens returns the results of the last only."""
        if self.asks_last:
            return True
        shapes = [
            (next(iter(graph.inputs.values()), None), graph.outputs[graph.result_names[0]]) for graph in self.graphs
        ]
        return any(given[1] == 1 and (ids is None or ids[1] != 1) for ids, given in shapes)

    @property
    def role(self) -> str:
        """`prefill`, `decode` or `unified` for a single graph; empty for two."""
        return self.graphs[0].entry.role if len(self.graphs) == 1 else ""

    @property
    def prefix(self) -> PrefixEntry | None:
        return self.graphs[0].entry.prefix

    def refuses(self, call: Call, *, whole: bool = False) -> str:
        """Why the graph cannot run a call by design; empty if it can.

        `whole`: some of its tokens attend to later ones, whatever its extra inputs are.
        """
        for graph in self.graphs:
            if not call.uniform and not graph.takes_positions:
                return "the graph has no position_ids"
            if graph.sizes:
                rows, new = call.input_ids.shape
                past = call.attention_mask.shape[1] - new
                joined = whole or ExtraValues(graph.extra_inputs, call.extras or {}).both_ways
                if reason := graph.sizes.refusal(rows, past, new):
                    return reason
                if joined and (most := graph.sizes.width(rows, past, new)) < new:
                    return f"the graph reads {most} tokens at a time, and some attend to later ones"
                continue
            shape = graph.inputs.get("input_ids", [])
            if any(
                isinstance(axis, int) and axis != size for axis, size in zip(shape, call.input_ids.shape, strict=False)
            ):
                return f"the graph takes input_ids of shape {shape} only"
        return ""


def candidates(graphs: list[OrtGraph], chains: list[Chain]) -> list[Candidate]:
    """Every graph alone, and prefill followed by decode where a chain has several calls."""
    found = [Candidate(graph.name, OrtRunner(graph, graph), (graph,)) for graph in graphs]
    two = {graph.entry.role: graph for graph in graphs}
    if {"prefill", "decode"} <= two.keys() and any(len(chain) > 1 for chain in chains):
        first, then = two["prefill"], two["decode"]
        found.append(Candidate(f"{first.name}+{then.name}", OrtRunner(first, then), (first, then)))
    return found


def check_scenario(  # noqa: PLR0913 - what runs, what is right, and what receives the results
    scenario: Scenario,
    chains: list[Chain],
    candidate: Candidate,
    truths: ExpectedOutputs,
    gates: Gates,
    pair: PrefillDecodeAgreement,  # receives the outputs, to compare prefill and decode graph
    evidence: Evidence | None = None,  # receives the data of the report's figures
    repeat: int = 1,  # number of runs of each call; all must give the same bits
    runs: Sequence[list[Step]] = (),  # the steps of each chain, if they were made already
) -> list[Check]:
    """One check per output, over all chains and calls of a scenario."""
    evidence = evidence or Evidence()
    blank = Check(scenario.name, candidate.name, "")
    reasons = [next(filter(None, map(candidate.refuses, chain)), "") for chain in chains]
    measures: dict[str, list[Measure]] = defaultdict(list)
    for at, (chain, truth) in enumerate(zip(chains, truths, strict=True)):
        if reasons[at]:
            continue
        steps = runs[at] if runs else steps_of(candidate, chain, repeat, blank)
        if isinstance(steps, Check):
            return [steps]
        if (past := chain[0].start) and not past.kept_by(steps[-1].present.arrays()):
            detail = "keys or values of the past differ from those that the graph was given"
            return [replace(blank, output="present", verdict="fail", detail=detail)]
        for number, (call, step, expected) in enumerate(zip(chain, steps, truth, strict=True)):
            rows = outputs_of(step, call.known)
            found = _results(candidate, expected["logits"], step, gates)
            found |= {one: measured_rows(expected[one], rows.get(one), gates) for one in expected if one != "logits"}
            for name, measured in found.items():
                measures[name].append(measured)
                evidence.see_rows(name, measured, call.past_mask.shape[1] if name == "logits" else call.known)
            evidence.see_logits(scenario.name, call, expected["logits"], step.logits)
            pair.see(candidate, (scenario.name, at, number), expected, rows)
    return [*(fold(blank, name, found, gates) for name, found in measures.items()), *_refused(blank, reasons)]


def _refused(blank: Check, reasons: Sequence[str]) -> list[Check]:
    """A skipped check for the chains that the graph cannot run by design."""
    refused = list(filter(None, reasons))
    if not refused:
        return []
    part = "logits" if len(refused) == len(reasons) else f"{len(refused)} of {len(reasons)} sequences"
    return [replace(blank, output=part, verdict="skip", detail=refused[0])]


def steps_of(candidate: Candidate, chain: Chain, repeat: int, blank: Check) -> list[Step] | Check:
    """The steps of a chain of calls; a failed check where the graph fails, or repeated runs give other bits."""
    try:
        steps, *others = (run_chain(candidate.runner, chain) for _ in range(repeat))
    except LlmconvError as error:
        return replace(blank, output="logits", verdict="fail", detail=problem_of(error))
    if all(_equal(steps, other) for other in others):
        return steps
    return replace(blank, output="logits", verdict="fail", detail="two runs of the graph differ")


def _equal(steps: list[Step], others: list[Step]) -> bool:
    pairs = [(outputs_of(a), outputs_of(b)) for a, b in zip(steps, others, strict=True)]
    return all(np.array_equal(a[name], b[name], equal_nan=True) for a, b in pairs for name in a)


def _results(candidate: Candidate, truth: ExpectedOutput, step: Step, gates: Gates) -> dict[str, Measure]:
    """The measured logits, or the measured tokens and scores of a graph that chooses tokens."""
    truth = truth.last() if candidate.last_logits else truth
    if step.choices is None:
        return {"logits": with_checked_noise(truth, lambda truth: measure(truth, step.logits, tokens=True), gates)}
    count = int(candidate.graphs[-1].entry.postprocess.partition(":")[2] or 1)
    return measure_choices(truth, step.choices, count)


def measured_rows(truth: ExpectedOutput, rows: Array | None, gates: Gates) -> Measure:
    """The error of an output as rows, None for one that is missing; the noise is measured again near the gates."""
    if rows is None:
        return Measure(problem="missing output")
    return with_checked_noise(truth, lambda truth: measure(truth, rows), gates)


CLEAR = 0.7
"""Share of the gates up to which one run's noise is enough; a correct graph is not reported just below a limit."""


def with_checked_noise(truth: ExpectedOutput, measured: Callable[[ExpectedOutput], Measure], gates: Gates) -> Measure:
    """The errors from `measured`; near the gates they are measured again, with noise from more runs."""
    found = measured(truth)
    if found.passes(gates, CLEAR) or found.problem or not truth.is_doubtful(found, gates):
        return found
    return measured(truth.again())


CALMEST_PASS = "the calmest rows: half precision chose other experts for the others"
FEW_ROUTED = "few rows, or a state of all tokens, for which half precision may choose other experts"


def fold(blank: Check, output: str, measures: list[Measure], gates: Gates) -> Check:
    """The check of one output over all its calls, named as `blank`: of the first failing call, else of the worst."""
    failing, passed = [index for index, found in enumerate(measures) if not found.passes(gates)], ""
    if gates.calmest and failing and not any(found.problem for found in measures):
        calmest = None if is_state(output) else calmest_sigma(measures)
        if calmest is None:
            return replace(blank, output=output, verdict="skip", detail=FEW_ROUTED)
        if calmest <= gates.aggregate:
            failing, passed = [], CALMEST_PASS
    step = failing[0] if failing else max(range(len(measures)), key=lambda index: measures[index].sigma)
    at = measures[step]
    detail = passed or at.problem or (f"{at.flips} likeliest tokens differ" if at.flips else "")
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
        divergence=max(found.divergence for found in measures),
        agreement=min(found.agreement for found in measures),
    )


CallKey = tuple[str, int, int]  # scenario, index of the chain, index of the call in the chain


class PrefillDecodeAgreement:
    """Compares outputs of prefill and decode graph, with doubled gates of the comparison with the eager model."""

    def __init__(self, gates: Gates) -> None:
        # two correct graphs may deviate in opposite directions
        self._gates = replace(gates, aggregate=2 * gates.aggregate, row=2 * gates.row)
        self._prefill: dict[CallKey, dict[str, Array]] = {}
        self._measures: dict[str, list[Measure]] = defaultdict(list)
        self._names: dict[str, str] = {}

    def see(
        self, candidate: Candidate, place: CallKey, truth: dict[str, ExpectedOutput], rows: dict[str, Array]
    ) -> None:
        """Records the outputs of a call, as rows by name; the prefill graph runs each call before the decode graph."""
        if self._prefill and next(iter(self._prefill))[0] != place[0]:
            self._prefill = {}
        self._names[candidate.role] = candidate.name
        if candidate.role == "prefill":
            self._prefill[place] = rows
        elif candidate.role == "decode" and place in self._prefill:
            other = self._prefill.pop(place)
            for name in rows.keys() & other.keys() & truth.keys():
                wanted = replace(truth[name], exact=other[name].astype(np.float64))
                if rows[name].shape == other[name].shape == truth[name].exact.shape:
                    self._measures[name].append(measure(wanted, rows[name]))

    def checks(self) -> list[Check]:
        blank = Check("prefill and decode agree", f"{self._names.get('prefill')}+{self._names.get('decode')}", "")
        return [fold(blank, name, found, self._gates) for name, found in sorted(self._measures.items())]


ULP = 2.0**-23  # unit in the last place of float32 scores, which are large even where all logits are tiny


def measure_choices(logits: ExpectedOutput, choices: Choices, count: int) -> dict[str, Measure]:
    """Compares `tokens` and `scores` [batch, tokens, K] with logits of the eager model [batch, tokens, vocabulary].

    The token of rank k must have the k-th largest logit, up to near-ties; a score is compared with the log-probability
    of the chosen token. `count` is K as recorded in the manifest.
    """
    tokens, shape = choices.tokens, (*logits.exact.shape[:2], count)
    if tokens.shape != shape or choices.scores.shape != shape:
        return _both(f"shape mismatch: expected {list(shape)}, got {list(tokens.shape)} (batch, tokens, choices)")
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= logits.exact.shape[-1]:
        return _both("a token is outside the vocabulary")
    ordered = np.sort(tokens, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return _both("a token is chosen twice")
    chosen = np.take_along_axis(logits.exact, tokens, -1)
    largest = -np.sort(-logits.exact, axis=-1)[..., :count]
    misplaced = (np.abs(largest - chosen) > logits.near_tie[..., None]).any(axis=-1) & logits.valid
    return {
        "tokens": Measure(flips=int(misplaced.sum())),
        "scores": measure(_expected_scores(logits, chosen), choices.scores),
    }


def _both(problem: str) -> dict[str, Measure]:
    return {name: Measure(problem=problem) for name in ("tokens", "scores")}


def _expected_scores(logits: ExpectedOutput, chosen: Array) -> ExpectedOutput:
    """Expected scores: logit minus log-sum-exp; both have the noise of the logits, and the sum its own rounding.

    A score is one logit of its row, whose error may be the largest of the row.
    """
    top = logits.exact.max(axis=-1, keepdims=True)
    total = top + np.log(np.exp(logits.exact - top).sum(axis=-1, keepdims=True))
    rounding = ULP * np.abs(total[..., 0])
    one = np.maximum(2**0.5 * np.maximum(logits.noise, logits.total_noise), logits.max_noise)
    noise = np.hypot(one, rounding)
    return replace(logits, exact=chosen - total, noise=noise, total_noise=rms(noise[logits.valid]) or 1e-300)


AT_ONCE = 64  # values that are read in one run


@dataclass(frozen=True)
class GraphProbe:
    """A graph whose inner values can be read without optimization; the guard has checked its files in `folder`."""

    model: onnx.ModelProto
    folder: Path
    settings: SessionSettings

    def read(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """The values of these names, except those that are not tensors; MalformedInput if the graph cannot run."""
        found: dict[str, Array] = {}
        names = [name for name in names if name]  # a node may omit an output
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            found |= _run(self._with_outputs(some), self.folder, self.settings, feeds)
        return {name: found[name] for name in names if name in found}

    def _with_outputs(self, names: Sequence[str]) -> onnx.ModelProto:
        """A copy of the graph that computes these values alone."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        declared = {port.name: port for port in self.model.graph.output}
        refill(model.graph.output, (declared.get(name) or onnx.ValueInfoProto(name=name) for name in names))
        needed, kept = set(names), []
        for node in reversed(model.graph.node):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(values_read_by(node))
        refill(model.graph.node, reversed(kept))
        for ports in (model.graph.initializer, model.graph.input):
            refill(ports, [port for port in ports if port.name in needed])
        return model

    def piece(self, nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], output: str) -> onnx.ModelProto:
        """A graph of these sorted nodes and one output; `feeds` become inputs, other values stay constants."""
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in values_read_by(node) if name} - made
        piece = onnx.ModelProto(
            ir_version=self.model.ir_version,
            opset_import=self.model.opset_import,
            functions=self.model.functions,
            producer_name=self.model.producer_name,
        )
        piece.graph.name = "piece"
        piece.graph.node.extend(nodes)
        piece.graph.initializer.extend(tensor for tensor in self.model.graph.initializer if tensor.name in read)
        piece.graph.input.extend(port_of(name, array) for name, array in feeds.items() if name in read)
        piece.graph.output.append(onnx.ValueInfoProto(name=output))
        return piece

    def run_piece(self, nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Array], output: str) -> Array | None:
        """The output of `piece`; None if it cannot be run. Arguments as in `piece`."""
        try:
            found = _run(self.piece(nodes, feeds, output), self.folder, self.settings, feeds)
        except MalformedInput:
            return None
        return found.get(output)


def _run(
    model: onnx.ModelProto, folder: Path, settings: SessionSettings, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    options = replace(settings, optimization="disable").options()
    model, folder = followed(model, folder.resolve())
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    try:
        limit = TimeLimit(weight_bytes(model), settings.timeout)
        session = LimitedSession(model.SerializeToString(), options, ["CPUExecutionProvider"], limit)
        names = [port.name for port in session.get_outputs()]
        taken = {port.name: np.ascontiguousarray(feeds[port.name]) for port in session.get_inputs()}
        arrays = session.run(names, taken)
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise MalformedInput(
            f"onnxruntime cannot run the graph with additional outputs: {first_line(error)}",
            hint="run without `--bisect`",
        ) from error
    return {name: array for name, array in zip(names, arrays, strict=True) if isinstance(array, np.ndarray)}


def port_of(name: str, array: Array) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, list(array.shape))
