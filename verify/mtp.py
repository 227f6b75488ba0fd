"""Compares the graph of an MTP head with transformers' own layer in float64, and the hidden states that it reads.

Each text is run alone by the reference, without padding; the graphs run all of them in one batch.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from safetensors.numpy import save_file
from transformers.cache_utils import DynamicLayer, MtpCache
from transformers.modeling_layers import MtpModel

from llmconv.checkpoint import SINGLE
from llmconv.errors import LlmconvError
from llmconv.export.rewrite.running_form import may_change, to_running_form
from llmconv.output.manifest import MTP
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.extra_inputs import HIDDEN, PREVIOUS_HIDDEN
from llmconv.runtime.low_memory.runner import EmptyRunner
from llmconv.runtime.onnxruntime.graph import OrtGraph, open_graph
from llmconv.runtime.runner import ArrayCache, Cache, Step
from llmconv.tensors import Array
from llmconv.verify.audit.decisions import audit_decisions, read_config
from llmconv.verify.audit.structure import dead_inputs
from llmconv.verify.audit.weights import WeightSource, audit_graph_files, audit_weights
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.candidates import fold, measured_rows
from llmconv.verify.comparison.run import AS_RUN
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions
from llmconv.verify.quantized_folder import audited_codes, is_quantized
from llmconv.verify.reference.other_roundings import SEEDS, nudged, outputs_of
from llmconv.verify.results import WHOLE, Check, Checks, Report, audited, problem_of
from llmconv.verify.scenarios.calls import windows_of
from llmconv.verify.sigma import GATES, NoiseFloor

NAME = "MTP head"
CACHE = ("present.0.key", "present.0.value")
INPUTS = ["input_ids", "attention_mask", "position_ids", PREVIOUS_HIDDEN.name]
INPUTS += [f"past_key_values.0.{part}" for part in ("key", "value")]
UNSEEN = "faults of the MTP head (`--method whole` compares it)"
STEPS = (1, 3, 1)  # tokens of the calls after the prompt
SEED = 23


@dataclass(frozen=True)
class Texts:
    """A batch of texts, the shorter ones padded on the left: a prompt, then the calls of `STEPS`."""

    ids: Array  # int64 [batch, tokens]
    mask: Array  # int64 [batch, tokens]
    positions: Array  # int64 [batch, tokens]

    @classmethod
    def drawn(cls, prompts: Sequence[int], vocabulary: int, gaps: int = 0) -> Texts:
        """Random texts with prompts of these lengths; `gaps` is a number of positions that are left out inside."""
        longest, tail = max(prompts), sum(STEPS)
        ids = np.random.default_rng([SEED, *prompts]).integers(0, vocabulary, (len(prompts), longest + tail))
        mask = np.array([[0] * (longest - length) + [1] * (length + tail) for length in prompts])
        positions = mask.cumsum(axis=1)
        return cls(ids, mask, positions + gaps * (positions > 3))

    @property
    def calls(self) -> list[slice]:
        ends = np.cumsum([self.ids.shape[1] - sum(STEPS), *STEPS]).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def rows(self) -> list[tuple[int, slice]]:
        """Each row with its tokens."""
        return [(row, slice(int(mask.argmax()), None)) for row, mask in enumerate(self.mask)]


@dataclass(frozen=True)
class MtpFolder:
    """The graph of the MTP head of a folder, alone in `verified`, and the graphs whose hidden state it reads."""

    verified: VerifiedFolder
    main: VerifiedFolder
    reference: Any  # folder of the model
    report: Report
    allow_changed: bool  # a graph that was changed after its export is a note instead of a failure

    def checks(self, cost: QuantizationOptions) -> Checks:
        """All checks; `cost` has what codes and factors must be, where weights are quantized."""
        path, models, config = self.verified.path, self.verified.models, read_config(self.reference)
        checks, notes = audit_graph_files(path, self.verified.entries, models, allow_changed=self.allow_changed)
        self.report.notes += notes
        yield [check for check in checks if check.verdict != "skip"]
        coded = is_quantized(models)
        source = None if coded else WeightSource.of(path, self.reference)
        for name, model in models.items():
            ports = [[port.name for port in side] for side in (model.graph.input, model.graph.output)]
            wrong = (
                [] if ports == [INPUTS, ["logits", HIDDEN, *CACHE]] else ["its inputs and outputs are of another layer"]
            )
            yield [audited("structure", name, [*wrong, *dead_inputs(model)])]
            if source:
                yield [audit_weights(name, model, source)[0], audit_decisions(name, model, config)]
            if wrong:
                return
        if coded:
            with ExitStack() as stack:
                yield from self._quantized(cost, stack)
            return
        if self.report.method != WHOLE:
            self.report.unseen.append(UNSEEN)
            return
        yield from self._compared()

    def _quantized(self, cost: QuantizationOptions, stack: ExitStack) -> Checks:
        """Audits codes, and compares with the model of the same codes, which is written into a temporary folder."""
        own, main = self.verified, self.main
        both = replace(own, entries=[*main.entries, *own.entries], models={**main.models, **own.models})
        audits = audited_codes(both, self.reference, {}, cost, replace(self.report, notes=[], quantization=None), stack)
        coded = None
        while True:  # the checks of the main graphs were made with theirs
            try:
                yield [check for check in next(audits) if check.graph in own.models]
            except StopIteration as end:
                coded = end.value
                break
        if coded is None:
            return
        if self.report.method != WHOLE:
            self.report.unseen.append(UNSEEN)
            return
        empty = EmptyRunner(coded.plain.folder, **coded.plain.options(None))
        model = coded.model_of(coded.files, empty.model)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="llmconv-dequantized-")))
        shutil.copyfile(model.folder / "config.json", folder / "config.json")
        save_file({name: tensor.read().astype(np.float32) for name, tensor in model.tensors.items()}, folder / SINGLE)
        settings = coded.unrounded.settings
        own, main = replace(own, settings=settings), replace(main, settings=settings)
        yield from replace(self, verified=own, main=main, reference=folder)._compared()

    def _compared(self) -> Checks:
        head = ReferenceHead(self.reference)
        vocabulary = head.main.vocab_size
        windows = [window for window in windows_of(head.main.config) if window <= 1024]
        batches = [
            Texts.drawn(lengths, vocabulary) for lengths in ([12], [9, 14, 4], *([2 * w + 3, w] for w in windows))
        ]
        batches.append(Texts.drawn([11, 6], vocabulary, gaps=5))
        hidden = [head.hidden(texts) for texts in batches]
        for entry in self.main.entries:
            yield [self._hidden_states(entry, batches[1], hidden[1])]
        settings = replace(self.verified.settings, extra_inputs=lambda: (PREVIOUS_HIDDEN,))
        forms = [("", settings)]
        if may_change(self.verified.models[MTP]):
            forms.append((AS_RUN, replace(settings, change=partial(_as_run, settings.change))))
        expected = [
            head.expected(texts, exact.astype(np.float32)) for texts, (exact, _) in zip(batches, hidden, strict=True)
        ]
        for suffix, one in forms:
            blank = Check(NAME, f"{MTP}{suffix}", "")
            try:
                graph = open_graph(self.verified.path, self.verified.entries[0], one)
                made = [
                    run(graph, texts, exact.astype(np.float32))
                    for texts, (exact, _) in zip(batches, hidden, strict=True)
                ]
            except LlmconvError as error:
                yield [replace(blank, verdict="fail", detail=problem_of(error))]
                continue
            pairs = [pair for several in zip(expected, made, strict=True) for pair in zip(*several, strict=True)]
            gates = GATES["float32"]
            yield [
                fold(blank, name, [measured_rows(truths[name], rows[name], gates) for truths, rows in pairs], gates)
                for name in ("logits", HIDDEN, *CACHE)
            ]

    def _hidden_states(self, entry: Any, texts: Texts, expected: tuple[Array, Array]) -> Check:
        """The hidden state that a graph of the model returns, which the head reads."""
        blank, (exact, rounded) = Check(NAME, entry.name, HIDDEN), expected
        truth = NoiseFloor("float32", exact.shape[-1]).truth(HIDDEN, exact, rounded, texts.mask == 1)
        try:
            graph, past = open_graph(self.main.path, entry, self.main.settings), None
            found: list[Array | None] = []
            for call in texts.calls:
                given = texts.ids[:, call], texts.mask[:, : call.stop], np.maximum(texts.positions[:, call] - 1, 0)
                step = graph.run(*given, past)
                found, past = [*found, step.hidden], step.present
        except LlmconvError as error:
            return replace(blank, verdict="fail", detail=problem_of(error))
        whole = [one for one in found if one is not None]
        rows = np.concatenate(whole, axis=1) if whole else None
        return fold(blank, HIDDEN, [measured_rows(truth, rows, GATES["float32"])], GATES["float32"])


def run(graph: OrtGraph, texts: Texts, hidden: Array) -> list[dict[str, Array]]:
    """Every output of every call, as rows."""
    past: Cache | None = None
    found = []
    for call in texts.calls:
        given = texts.ids[:, call], texts.mask[:, : call.stop], texts.positions[:, call]
        step = graph.run(*given, past, {PREVIOUS_HIDDEN.name: hidden[:, call]})
        found.append(rows_of(step))
        past = step.present
    return found


def rows_of(step: Step) -> dict[str, Array]:
    return {**outputs_of(step), **({} if step.hidden is None else {HIDDEN: step.hidden})}


def _as_run(change: Callable[[Path, onnx.ModelProto], None] | None, path: Path, model: onnx.ModelProto) -> None:
    if change:
        change(path, model)
    to_running_form(path, model)


def _of(run: Callable[[], list[dict[str, Array]]], at: int, name: str) -> Array:
    return run()[at][name]


class ReferenceHead:
    """transformers' MTP layer in float64 and in float32, with the model that it belongs to."""

    def __init__(self, folder: Any) -> None:
        self.main, self._exact_main = EagerRunner(folder, "float32"), EagerRunner(folder, "float64")
        model, layers = self.main.model, self.main.config.num_hidden_layers
        # transformers lists the numbers of published models alone
        own = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*own, rf"\.layers\.{layers}\."}
        rounded = MtpModel.from_pretrained(model).eval()
        self._heads = copy.deepcopy(rounded).double(), rounded
        self._floor = NoiseFloor("float32", int(self.main.config.hidden_size))

    def hidden(self, texts: Texts) -> tuple[Array, Array]:
        """The hidden state of the model, exact and rounded, [batch, tokens, hidden]; zeros under padding."""
        found = []
        for runner in (self._exact_main, self.main):
            rows = np.zeros((*texts.ids.shape, self.main.config.hidden_size))
            for row, own in texts.rows():
                given = {"input_ids": texts.ids[row : row + 1, own]}
                given["position_ids"] = np.maximum(texts.positions[row : row + 1, own] - 1, 0)
                with runner.compute_mode():
                    states = runner.model(**runner.tensors(given), output_hidden_states=True, use_cache=False)
                rows[row, own] = states.hidden_states[-1][0].numpy()
            found.append(rows)
        return found[0], found[1]

    def expected(self, texts: Texts, hidden: Array) -> list[dict[str, Any]]:
        """Every output of every call, with its noise; `hidden` is what the head reads, in float32."""
        exact, rounded = (self._run(head, texts, hidden) for head in self._heads)
        again = [cache(partial(self._again, texts, hidden, seed)) for seed in SEEDS]
        found: list[dict[str, Any]] = []
        for at, (true, near) in enumerate(zip(exact, rounded, strict=True)):
            truths = {}
            for name, rows in true.items():
                call = texts.calls[at]
                valid = texts.mask[:, : call.stop] if name in CACHE else texts.mask[:, call]
                truth = self._floor.truth(name, rows, near[name], valid == 1)
                truths[name] = replace(truth, others=[partial(_of, run, at, name) for run in again])
            found.append(truths)
        return found

    def _again(self, texts: Texts, hidden: Array, seed: int) -> list[dict[str, Array]]:
        with nudged(seed):
            return self._run(self._heads[1], texts, hidden)

    def _run(self, head: Any, texts: Texts, hidden: Array) -> list[dict[str, Array]]:
        """Every output of every call as rows, zeros under padding."""
        is_exact = head.shared_head.weight.dtype == torch.float64
        found: list[dict[str, Array]] = [{} for _ in texts.calls]
        for row, own in texts.rows():
            past = MtpCache(config=head.config)
            past.layers = [DynamicLayer()]  # one that keeps every token
            for at, call in enumerate(texts.calls):
                part = slice(max(call.start, own.start), call.stop)
                given = [torch.from_numpy(array[row : row + 1, part]) for array in (texts.ids, texts.positions, hidden)]
                ids, positions, states = given[0], given[1], given[2].to(head.shared_head.weight.dtype)
                with (self._exact_main if is_exact else self.main).compute_mode():
                    last = head.forward_layer(0, states, positions, past, input_ids=ids)
                    logits = head._project_to_logits(last)
                layer = past.layers[0]
                pair = dict(zip(CACHE, (layer.keys.numpy(), layer.values.numpy()), strict=True))
                rows = rows_of(Step(logits.numpy(), ArrayCache(pair, call.stop), hidden=last.numpy()))
                for name, array in rows.items():
                    shape = len(texts.ids), (call.stop if name in CACHE else call.stop - call.start), array.shape[-1]
                    found[at].setdefault(name, np.zeros(shape, array.dtype))[row, -array.shape[1] :] = array[0]
        return found
