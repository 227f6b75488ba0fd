"""Compares graphs whose cache contains integer codes: as copies with a cache of floats, and as shipped.

The copies are compared with the eager model like any graph. The shipped graphs are run for the codes, their scales, and
the cost of the rounding.

- Codes: a number near the middle of two codes may become either, and later layers read the result: after some layers
  two correct graphs have different codes. So every `GroupQueryAttention` is compared alone, given its inputs in the
  graph, with its formula (onnxruntime docs/ContribOperators.md), and logits only have to be about as near to those of
  the copy that rounds with standard operators as the rounding allows.

      code = clip(round(key / scale), -128, 127)
      softmax(softcap(query @ (code * scale) * factor) + bias) @ (code * scale)

- Scales are compared with the range of the eager model's keys and values on a text: a scale is 1.1 * the largest
  magnitude of its channel / 127. Channels of keys that a rotary embedding mixes share the larger magnitude of both.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from llmconv.causal_lm import context_length
from llmconv.errors import LlmconvError, UnsupportedInput, UsageProblem
from llmconv.output.manifest import read_manifest
from llmconv.runtime.extra_inputs import past_of
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.onnxruntime.guard import attribute_values, external_fields, external_tensors, load_guarded
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.onnxruntime.session_settings import GraphTransform, SessionSettings
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.runtime.tokenizer import CalibrationText
from llmconv.tensors import Array
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.cache_copies import (
    LARGEST,
    LEAST,
    NEW,
    PAST,
    attention_nodes,
    cache_scales,
    has_codes,
    to_floats,
    to_rounded_floats,
)
from llmconv.verify.comparison.candidates import GraphProbe
from llmconv.verify.float_folder import with_logits
from llmconv.verify.other_exporters.quantized.accuracy import (
    CACHE,
    CHECK,
    GATES,
    check_gate,
    check_limits,
    measure_costs,
    rounds_activations,
    token_sample,
)
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions
from llmconv.verify.reference.eager import Eager
from llmconv.verify.reference.other_roundings import run_chain
from llmconv.verify.results import Check, Checks, Quantization, Report, audited, problem_of
from llmconv.verify.scenarios.calls import Call, ModelFacts, pieces
from llmconv.verify.verification import Session

AS_FLOATS = ", cache in float32"  # suffix of the scenarios of the copies


@dataclass(frozen=True)
class CodedFolder:
    """A folder of graphs with codes in their caches."""

    verified: VerifiedFolder
    text: CalibrationText  # on which the scales were measured
    cost: QuantizationOptions
    prepack: bool  # the weights are quantized, which some kernels support only prepacked

    @classmethod
    def of(
        cls, verified: VerifiedFolder, calibrate: Path | None, cost: QuantizationOptions, *, prepack: bool
    ) -> CodedFolder | None:
        """The folder; None if all caches contain floats. `calibrate` is the text of the export.

        Raises UsageProblem: no text, or another one than at the export; UnsupportedInput: a graph in stages, or not all
        graphs have codes.
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
        names = [entry.name for entry in self.verified.entries]
        return [audited(CODES_NAME, name, cache_scales(self.verified.models[name])[1]) for name in names]

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
        """Checks of codes and scales of each graph, and of the cost of all; `eager` is the unquantized model."""
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
        shipped, rounded, exact = (
            self._runner(name, change) for change in (None, to_rounded_floats, lambda path, model: to_floats(model))
        )
        probe = GraphProbe(self.verified.models[name], self.verified.path, self._settings)
        try:
            return check_codes(CodedGraph(name, shipped, rounded, exact, AttentionNodes(probe, scales)), eager.facts())
        except LlmconvError as error:
            return [Check(CODES_NAME, name, "logits", verdict="fail", detail=problem_of(error))]

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
        section = report.quantization = report.quantization or Quantization()
        limits = self.cost.limits
        section.max_divergence, section.min_agreement = limits.divergence, limits.agreement
        trusted = self.cost.code is not None
        sample = token_sample(self.cost.text, eager.folder, eager.facts(), session.selection.suite, trusted)
        name = self.verified.entries[-1].name
        try:
            (costs,) = measure_costs([(name, self._runner(name, None))], eager.runners[0], sample)
        except LlmconvError as error:
            yield [Check(CHECK, name, "", verdict="fail", detail=problem_of(error))]
            return
        section.cost = costs.summary(is_text=sample.is_text)
        gated = sample.is_text and not self.prepack and not limits.given  # the codes of weights cost more
        yield check_gate(CACHE, GATES[CACHE], section.cost, None) if gated else check_limits(section.cost, limits)


def _in_turn(changes: Sequence[GraphTransform], path: Path, model: onnx.ModelProto) -> None:
    for change in changes:
        change(path, model)


CODES_NAME = "cache codes"  # name of the checks in reports
SEED = 20251
PROMPT, STEPS, PADDING = 96, 3, 7
OBSERVED = ((0, 4), (1,))
"""Calls of each chain in which attention nodes are compared: a prompt and a second turn; a step after padding."""
LIMIT, FLOOR = 4.0, 1e-5
"""Largest difference of logits as a multiple of what the rounding changes, plus a share of the logits themselves."""
ROOM, LARGEST_CODE = 8, 127


@dataclass(frozen=True)
class CodedGraph:
    """A graph with a cache of codes, and its copies; all run prompts and steps."""

    name: str
    shipped: Runner
    rounded: Runner  # the copy that rounds with standard operators
    exact: Runner  # the copy that rounds nothing
    nodes: AttentionNodes  # its attention nodes


def check_codes(graph: CodedGraph, facts: ModelFacts) -> list[Check]:
    problems: list[str] = []
    ratios = [0.0]
    for chain, observed in zip(chains(facts), OBSERVED, strict=True):
        shipped, rounded, exact = (run_chain(runner, chain) for runner in (graph.shipped, graph.rounded, graph.exact))
        for at, call in enumerate(chain):
            past = dict(shipped[at - 1].present.arrays()) if at else {}
            now = shipped[at].present.arrays()
            problems += [
                f"`{name}` has other codes for earlier tokens"
                for name, codes in past.items()
                if not np.array_equal(codes, now[name][:, :, : codes.shape[2]])
            ]
            if at in observed:
                problems += graph.nodes.problems(_feeds(graph.nodes, call, past), call)
            error, effect = _rms(call, shipped[at], rounded[at]), _rms(call, exact[at], rounded[at])
            limit = LIMIT * effect + FLOOR * _rms(call, rounded[at], None)
            ratios.append(error / limit if limit else inf if error else 0.0)
    worst = float(np.max(ratios))
    passed = f"{len(graph.nodes.attention)} attention nodes write and read code * scale"
    logits = f"difference from rounding with standard operators: {worst:.2g} of the limit"
    return [
        replace(audited(CODES_NAME, graph.name, problems, passed), output="present"),
        Check(CODES_NAME, graph.name, "logits", verdict="pass" if worst <= 1 else "fail", detail=logits),
    ]


def chains(facts: ModelFacts) -> list[list[Call]]:
    """A prompt with steps and a second turn, and a batch of two with padding on the left."""
    rng = np.random.default_rng(SEED)
    prompt = min(PROMPT, (facts.max_positions or 2 * PROMPT) // 2)
    return [
        _chain(rng.integers(0, facts.vocab_size, (1, prompt + STEPS + PADDING)), [prompt, *[1] * STEPS, PADDING]),
        _chain(rng.integers(0, facts.vocab_size, (2, prompt + STEPS)), [prompt, *[1] * STEPS], PADDING),
    ]


def _chain(ids: Array, widths: list[int], padding: int = 0) -> list[Call]:
    mask = np.ones_like(ids)
    mask[1:, :padding] = 0
    return pieces(ids, mask, default_positions(mask, ids.shape[1]), widths)


def _feeds(nodes: AttentionNodes, call: Call, past: Mapping[str, Array]) -> dict[str, Array]:
    """All inputs of a call; the unfilled part of the buffers contains large codes."""
    rows, capacity = len(call.input_ids), call.attention_mask.shape[1] + ROOM
    feeds = {"input_ids": call.input_ids, "attention_mask": call.attention_mask, "position_ids": call.position_ids}
    for name, scale in nodes.scales.items():
        feeds[name] = np.full((rows, scale.shape[1], capacity, scale.shape[3]), LARGEST_CODE, np.int8)
    for name, codes in past.items():
        feeds[past_of(name)][:, :, : codes.shape[2]] = codes
    return feeds


def _rms(call: Call, step: Step, other: Step | None) -> float:
    """Root mean square of the difference of two steps' logits where nothing is padding, or of the logits of one."""
    valid = call.attention_mask[:, -step.logits.shape[1] :].astype(bool)
    values = step.logits.astype(np.float64)[valid]
    if other is not None:
        values = values - other.logits.astype(np.float64)[valid]
    return float(np.sqrt(np.mean(values**2)))


RANGES_NAME = "cache scales"  # name of the checks in reports
RANGE = 127.0 / 1.1  # steps of the largest magnitude
TOLERANCE = 1e-3  # largest relative difference of a range, of which rounding noise is a hundredth
SHIFT, SHIFTED = 7, 64  # positions by which, and tokens of which a text is moved, to see which keys depend on positions


def ranges(model: Runner, texts: Sequence[Array]) -> dict[str, Array]:
    """The eager model's largest magnitude of every channel on texts: [kv_heads, head_dim] by cache input."""
    found: dict[str, Array] = {}
    for text in texts:
        for name, array in _cache(model, text, 0).items():
            largest = np.abs(array).max(axis=(0, 2))
            found[name] = np.maximum(found[name], largest) if name in found else largest
    return found


def rotated(model: Runner, text: Array) -> set[str]:
    """Names of the cache inputs of keys that change if all positions are moved, by the same number.

    Hidden states of the eager model depend on differences of positions alone; `text` is token ids int64 [1, tokens].
    """
    here, there = (_cache(model, text[:, :SHIFTED], shift) for shift in (0, SHIFT))
    moved = {name for name in here if np.abs(here[name] - there[name]).max() > 0.01 * np.abs(here[name]).max()}
    return {name for name in moved if name.endswith(".key")}


def _cache(model: Runner, text: Array, shift: int) -> dict[str, Array]:
    mask = np.ones_like(text)
    step = model.prefill(text, mask, default_positions(mask, text.shape[1]) + shift)
    return {past_of(name): array for name, array in step.present.arrays().items()}


def check_scales(graph: str, scales: Mapping[str, Array], wanted: Mapping[str, Array], turned: set[str]) -> list[Check]:
    """One check of all scales of a graph, float32 [1, kv_heads, 1, head_dim], by name of the cache input.

    `wanted` are ranges by that name; `turned` has the names of the cache inputs whose channels are rotated.
    """
    wrong = [name for name in wanted if not _fits(name, scales.get(name), wanted[name], rotates=name in turned)]
    wrong += sorted(scales.keys() - wanted.keys())
    first = f"{len(wrong)} of {len(wanted)} wrong, first `{wrong[0]}`: a scale is not 1.1 * the range" if wrong else ""
    problems = [f"{first} of its channel on the text / 127"] if wrong else []
    found = audited(RANGES_NAME, graph, problems, f"{len(wanted)} ranges as on the text")
    return [replace(found, output=wrong[0] if wrong else "")]


def _fits(name: str, scale: Array | None, wanted: Array, *, rotates: bool) -> bool:
    if scale is None or scale.shape != (1, wanted.shape[0], 1, wanted.shape[1]):
        return False
    found = scale[0, :, 0].astype(np.float64) * RANGE
    forms = [] if rotates else [wanted]
    forms += _shared(wanted) if name.endswith(".key") else []
    return any(bool((np.abs(found - form) <= TOLERANCE * form + (form == 0)).all()) for form in forms)


def _shared(wanted: Array) -> list[Array]:
    """Ranges of which both halves of a head, both of neighbors, or all channels of a head share the largest."""
    heads, size = wanted.shape
    whole = np.repeat(wanted.max(axis=1, keepdims=True), size, axis=1)
    if size % 2:
        return [whole]
    halves = np.tile(wanted.reshape(heads, 2, size // 2).max(axis=1), (1, 2))
    neighbors = np.repeat(wanted.reshape(heads, size // 2, 2).max(axis=2), 2, axis=1)
    return [halves, neighbors, whole]


QUERY, TOTAL, BIAS = 0, 6, 10  # indices of inputs
HALF_STEP = 0.501
"""Largest distance of a number from its code, in codes; more than 0.5 for the rounding of the quotient."""
CLOSE = 1e-4  # largest difference of an output from the formula, as a share of the output


@dataclass(frozen=True)
class AttentionNodes:
    """The attention nodes of a graph; scales are float32 [1, kv_heads, 1, head_dim], by name of the cache input."""

    probe: GraphProbe
    scales: Mapping[str, Array]

    @property
    def attention(self) -> list[onnx.NodeProto]:
        return attention_nodes(self.probe.model)

    def problems(self, feeds: Mapping[str, Array], call: Call) -> list[str]:
        """Differences in a call, a line per node; MalformedInput if the graph cannot run with more outputs."""
        names = [node.input[at] for node in self.attention for at in (QUERY, *NEW, TOTAL, BIAS)]
        names += [name for node in self.attention for name in node.output[:3]]
        values = self.probe.read(feeds, list(dict.fromkeys(names)))
        return [one for node in self.attention for one in self._problems_of(node, values, feeds, call)]

    def _problems_of(
        self, node: onnx.NodeProto, values: Mapping[str, Array], feeds: Mapping[str, Array], call: Call
    ) -> list[str]:
        inputs = list(node.input)
        total, new = int(values[inputs[TOTAL]].reshape(-1)[0]), call.input_ids.shape[1]
        dequantized: list[Array] = []
        for at, past, present in zip(NEW, PAST, node.output[1:3], strict=True):
            scale, codes = self.scales[inputs[past]], values[present][:, :, :total]
            if problem := _code_problem(values[inputs[at]], feeds[inputs[past]], codes, scale, total - new):
                return [f"`{present}` {problem}"]
            dequantized.append(codes.astype(np.float64) * scale)
        bias = values[inputs[BIAS]].astype(np.float64) if inputs[BIAS] else np.zeros(1)
        wanted = _attend(node, values[inputs[QUERY]].astype(np.float64), dequantized, bias)
        valid = call.attention_mask[:, total - new :].astype(bool)
        difference = values[node.output[0]].astype(np.float64)[valid] - wanted[valid]
        error, size = (float(np.sqrt(np.mean(one**2))) for one in (difference, wanted[valid]))
        if error <= CLOSE * size:
            return []
        share = error / size if size else inf
        return [f"`{node.name}` attends to other keys or values: difference {share:.1g}"]


def _code_problem(new: Array, before: Array, codes: Array, scale: Array, past: int) -> str:
    """What is wrong with the codes [rows, kv_heads, tokens, head_dim] of one buffer; empty if nothing is.

    They were `before` the call, of `past` tokens; `new` [rows, tokens, kv_heads * head_dim] are those of new tokens.
    """
    if not np.array_equal(codes[:, :, :past], before[:, :, :past]):
        return "has other codes for earlier tokens"
    heads, size = scale.shape[1], scale.shape[3]
    numbers = new.astype(np.float64).reshape(*new.shape[:2], heads, size).swapaxes(1, 2) / scale
    wrong = np.abs(np.clip(numbers, LEAST, LARGEST) - codes[:, :, past:]) > HALF_STEP
    return f"has {int(wrong.sum())} codes that are not the nearest to number / scale" if wrong.any() else ""


def _attend(node: onnx.NodeProto, query: Array, cache: list[Array], bias: Array) -> Array:
    """The output [rows, tokens, heads * head_dim] in float64, of keys and values [rows, kv_heads, total, head_dim]."""
    found = attribute_values(node)
    heads, kv_heads, size = found["num_heads"], found["kv_num_heads"], cache[0].shape[-1]
    rows, new, total = *query.shape[:2], cache[0].shape[2]
    split = query.reshape(rows, new, heads, size).swapaxes(1, 2)
    keys, values = (np.repeat(one, heads // kv_heads, axis=1) for one in cache)
    scores = split @ keys.swapaxes(2, 3) * (found.get("scale") or size**-0.5)
    if softcap := found.get("softcap"):
        scores = np.tanh(scores / softcap) * softcap
    scores = scores + bias
    future = np.arange(total)[None] > np.arange(total - new, total)[:, None]
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return output.swapaxes(1, 2).reshape(rows, new, heads * size)


def recorded_text(folder: Path, given: Path | None) -> CalibrationText:
    """The text of an export, which is compared with the sha256 recorded in the folder of the graphs.

    `given` is the text file; None for the text that ships with llmconv. Raises UsageProblem: no text is given and the
    export had its own, or another one is given.
    """
    recorded = {entry.get("calibrate") for entry in read_manifest(folder).graphs.values() if isinstance(entry, dict)}
    if given is None and recorded - {None} <= {CalibrationText.shipped().sha256}:
        return CalibrationText.shipped()
    if given is None:
        raise UsageProblem(
            "the ranges of activations, keys and values are compared with those on the text of the export",
            hint="give it: `--calibrate FILE`, as for `llmconv export`",
        )
    text = CalibrationText.read(given)
    if recorded - {None} and recorded != {text.sha256}:
        raise UsageProblem(
            f"`{given}` is not the text on which the ranges were measured (its sha256 differs)",
            hint="give the file that `llmconv export --calibrate` read",
        )
    return text
