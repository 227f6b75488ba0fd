"""Compares the graphs without a cache of a folder with the eager model: declarations, weights, every output.

The modules after the last hidden state of an embedding model are computed in numpy: a second implementation, which
shares no code. Their files are those of sentence-transformers 6.2 (`modules.json` and a folder for each module).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from llmconv.causal_lm import length_of, length_switch
from llmconv.checkpoint import SINGLE, open_weights, read_small
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, first_line
from llmconv.files.safetensors_file import FileTensor, read_header
from llmconv.memory import raise_if_out_of_memory
from llmconv.output.manifest import GraphEntry
from llmconv.runtime.eager.limit_margins import Float64Casts
from llmconv.runtime.eager.stored_tensors import require_loaded, stored_tensors
from llmconv.runtime.extra_inputs import POSITIONS
from llmconv.runtime.library_patches import reset_dynamic_rope, silence_kernel_hints, use_eager_experts
from llmconv.runtime.onnxruntime.graph import SinglePassGraph
from llmconv.runtime.runner import default_positions
from llmconv.tensors import Array
from llmconv.verify.audit.decisions import audit_decisions, read_config
from llmconv.verify.audit.structure import dead_inputs
from llmconv.verify.audit.weights import WeightSource, audit_files, audit_graph_files, audit_weights, span_of
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.comparison.candidates import fold
from llmconv.verify.other_exporters.quantized_verdict import QuantizationOptions
from llmconv.verify.quantized_folder import audited_codes, is_quantized
from llmconv.verify.reference.eager import ComputedModel
from llmconv.verify.reference.other_roundings import SCALINGS, SEEDS, hidden_faults, nudged
from llmconv.verify.results import Check, Checks, Report, problem_of
from llmconv.verify.scenarios.calls import windows_of
from llmconv.verify.sigma import GATES, ExpectedOutput, Measure, NoiseFloor, measure
from llmconv.verify.verification import Session

DTYPE = "float32"
INPUTS = {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class SinglePassFolder:
    """A folder's graphs without a cache, alone in `verified`; with `allow_changed` a changed graph is a note."""

    verified: VerifiedFolder
    reference: Path
    report: Report
    session: Session
    allow_changed: bool

    def checks(self, cost: QuantizationOptions, *, alone: bool) -> Checks:
        """All checks; `alone` if the folder has no other graphs, whose audit checks the weight files.

        `cost` has what codes and factors must be, where weights are quantized.
        """
        folder, models = self.verified.path, self.verified.models
        checks, notes = audit_graph_files(folder, self.verified.entries, models, allow_changed=self.allow_changed)
        self.report.notes += notes
        yield [check for check in checks if alone or check.verdict != "skip"]
        if alone:
            yield audit_files(folder)
        self.report.unseen += hidden_faults(SCALINGS, self.reference)
        if is_quantized(models):
            with ExitStack() as stack:
                yield from self._quantized(cost, stack)
            return
        source = self._weights()
        yield [audit_weights(name, model, source)[0] for name, model in models.items()]
        config = read_config(self.reference)
        yield [audit_decisions(name, model, config) for name, model in models.items()]
        for entry in self.verified.entries:
            yield from self._graph(entry, TaskReference(self.reference, entry.role))

    def _quantized(self, options: QuantizationOptions, stack: ExitStack) -> Checks:
        """Audits codes, and compares the graphs with the model of the same codes; `stack` keeps its configuration."""
        further = Modules(self.reference).tensors()
        coded = yield from audited_codes(self.verified, self.reference, further, options, self.report, stack)
        if coded is None:
            return
        self.report.unseen.append("the cost of quantization, which is measured in graphs with a cache")
        runs = replace(self, verified=coded.unrounded)
        for entry, file in zip(self.verified.entries, coded.files, strict=True):
            weights = coded.model_of([file], empty_model(coded.plain.folder, entry.role))
            yield from runs._graph(entry, TaskReference(self.reference, entry.role, weights))

    def _weights(self) -> WeightSource:
        source = WeightSource.of(self.verified.path, self.reference)
        own, theirs = (Modules(folder).tensors() for folder in (self.verified.path, self.reference))
        return replace(
            source,
            spans={**source.spans, **{span_of(tensor): name for name, tensor in own.items()}},
            reference={**source.reference, **theirs},
            stored={**source.stored, **own},
        )

    def _graph(self, entry: GraphEntry, reference: TaskReference) -> Checks:
        blank = Check("structure", entry.name, "")
        try:
            graph = SinglePassGraph(self.verified.path / entry.files[0], self.verified.settings)
        except LlmconvError as error:
            yield [replace(blank, verdict="fail", detail=problem_of(error))]
            return
        takes_positions = POSITIONS in graph.inputs
        suite, pools = self.session.selection.suite, entry.role in {"embed", "classify", "rerank"}
        texts, left = batches(reference.limits, suite, pools=pools, takes_positions=takes_positions)
        self.report.unseen += left
        wanted = reference.expected(texts[0])
        problem = _declared(graph, entry.role, set(wanted)) or "; ".join(dead_inputs(self.verified.models[entry.name]))
        if problem:
            yield [replace(blank, verdict="fail", detail=problem)]
            return
        yield [replace(blank, detail=f"inputs and outputs of `{entry.role}`")]
        for batch in texts:
            known = wanted if batch is texts[0] else reference.expected(batch)
            yield list(_batch(graph, entry, batch, known))


def _declared(graph: SinglePassGraph, role: str, outputs: set[str]) -> str:
    """What is wrong with the names of inputs and outputs; empty if nothing is."""
    optional = {POSITIONS} if role == "scoring" else set()
    if set(graph.inputs) - optional != INPUTS:
        return f"inputs are {', '.join(graph.inputs)}, expected {', '.join(sorted(INPUTS))}"
    if set(graph.outputs) != outputs:
        return f"outputs are {', '.join(graph.outputs)}, expected {', '.join(sorted(outputs))}"
    return ""


def _batch(
    graph: SinglePassGraph, entry: GraphEntry, texts: Texts, wanted: dict[str, ExpectedOutput]
) -> Iterator[Check]:
    blank = Check(texts.name, entry.name, "")
    try:
        found = graph.run(texts.input_ids, texts.attention_mask, texts.position_ids)
    except LlmconvError as error:
        yield from (fold(blank, name, [Measure(problem=problem_of(error))], GATES[DTYPE]) for name in wanted)
        return
    for name, truth in wanted.items():
        rows = as_rows(entry.role, name, found[name]) if found[name].ndim else found[name]
        measured = measure(truth, rows, tokens=name == "logits")
        if not measured.passes(GATES[DTYPE]) and truth.is_doubtful(measured, GATES[DTYPE]):
            measured = measure(truth.again(), rows, tokens=name == "logits")
        yield fold(blank, name, [measured], GATES[DTYPE])


CLASSES: dict[str, Any] = {  # by the role of the graph
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "rerank": AutoModelForCausalLM,
    "scoring": AutoModelForCausalLM,
}

HIDDEN, EMBEDDING = "last_hidden_state", "sentence_embedding"
PER_TOKEN = {"scoring": {"logits"}, "embed": {HIDDEN}}
"""Outputs with a row for every token, by role; all others have one for every text."""


class TaskModel:
    """The transformers model of a graph's role, in `float64` or `float32`; InputRefused if it cannot be loaded.

    `computed` has its configuration and weights, if they are not those of the folder.
    """

    def __init__(self, folder: Path, role: str, dtype: str, computed: ComputedModel | None = None) -> None:
        transformers_logging.disable_progress_bar()
        silence_kernel_hints()
        self.role, self.dtype, self.modules = role, dtype, Modules(folder)
        self.model = _loaded(folder, role, computed)
        use_eager_experts(self.model)
        self.model = (self.model.double() if dtype == "float64" else self.model).eval()
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

    def outputs(self, texts: Texts) -> dict[str, Array]:
        """All outputs as rows [batch, tokens or 1, features], by name."""
        reset_dynamic_rope(self.model)
        found = self._run(texts)
        return {name: as_rows(self.role, name, array) for name, array in found.items()}

    def _run(self, texts: Texts) -> dict[str, Array]:
        mask, positions = texts.attention_mask, texts.position_ids
        given = {"input_ids": texts.input_ids, "attention_mask": mask}
        if self._takes_positions:
            given["position_ids"] = default_positions(mask, mask.shape[1]) if positions is None else positions
        tensors = {name: torch.from_numpy(array) for name, array in given.items()}
        exact: Any = Float64Casts() if self.dtype == "float64" else nullcontext()
        with torch.no_grad(), exact:
            result = self.model(**tensors, use_cache=False)
        if self.role != "embed":
            logits: Array = result.logits.numpy()
            return {"scores": self.modules.score(logits, mask)} if self.role == "rerank" else {"logits": logits}
        hidden: Array = result.last_hidden_state.numpy()
        if not self.modules.has(POOLING):
            return {HIDDEN: hidden}
        return {HIDDEN: hidden, EMBEDDING: self.modules.embedding(hidden, mask)}


def as_rows(role: str, name: str, array: Array) -> Array:
    """An output as rows: [batch, tokens, features], or [batch, 1, features] for one row per text."""
    return array if name in PER_TOKEN.get(role, ()) else array.reshape(len(array), 1, -1)


def _loaded(folder: Path, role: str, computed: ComputedModel | None) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "attn_implementation": "eager", "dtype": torch.float32}
    stored = open_weights(folder) if computed is None else computed.tensors
    try:
        if computed is None:
            options |= {"trust_remote_code": False, "use_safetensors": True}
            source, path = CLASSES[role], folder
        else:
            source, config = _class_of(computed.folder, role)
            options |= {"config": config, "state_dict": stored_tensors(stored, torch.float32)}
            path = None
        model, report = source.from_pretrained(path, output_loading_info=True, **options)
    except LlmconvError:
        raise
    except Exception as error:  # an invalid config may raise anything in the model's code
        raise_if_out_of_memory(error, f"while `{folder.name}` was loaded")
        raise InputRefused(
            f"transformers cannot load `{folder}`: {first_line(error)}",
            hint="the folder needs config.json and safetensors weights of the model that was exported",
        ) from error
    require_loaded(model, report, stored, folder)
    return model


def _class_of(folder: Path, role: str) -> tuple[Any, Any]:
    """The class of a role in transformers for the configuration of a folder, and the configuration."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return CLASSES[role]._model_mapping[type(config)], config


def empty_model(folder: Path, role: str) -> Any:
    """The model of a role without weights, on the meta device."""
    source, config = _class_of(folder, role)
    with torch.device("meta"):
        return source(config)


class TaskReference:
    """The model of a task (the graph's role), exact and in float32, and the rounding noise between the two.

    `computed` as `TaskModel` has it.
    """

    def __init__(self, folder: Path, role: str, computed: ComputedModel | None = None) -> None:
        self._role = role
        self._exact, self._rounded = (TaskModel(folder, role, dtype, computed) for dtype in ("float64", "float32"))
        self._floor = NoiseFloor("float32", int(getattr(self._config, "hidden_size", 0) or 0))

    @property
    def _config(self) -> Any:
        return self._exact.model.config.get_text_config(decoder=True)

    @cached_property
    def limits(self) -> TextLimits:
        config = self._config
        fields = config.to_dict()
        padding = config.pad_token_id if self._role == "classify" else None
        vocabulary = int(self._exact.model.get_input_embeddings().weight.shape[0])
        switch = length_switch(fields)
        return TextLimits(vocabulary, padding, length_of(fields), windows_of(config), switch.tokens if switch else None)

    def expected(self, texts: Texts) -> dict[str, ExpectedOutput]:
        exact, rounded = self._exact.outputs(texts), self._rounded.outputs(texts)
        is_token = texts.attention_mask != 0
        found: dict[str, ExpectedOutput] = {}
        runs = [cache(partial(self._again, texts, seed)) for seed in SEEDS]
        for name in exact:
            valid = is_token if name in PER_TOKEN.get(self._role, ()) else is_token.any(axis=1, keepdims=True)
            truth = self._floor.truth(name, exact[name].astype(np.float64), rounded[name], valid)
            found[name] = replace(truth, others=[partial(_of, run, name) for run in runs])
        return found

    def _again(self, texts: Texts, seed: int) -> dict[str, Array]:
        with nudged(seed):
            return self._rounded.outputs(texts)


def _of(run: Callable[[], dict[str, Array]], name: str) -> Array:
    return run()[name]


MODULES = "modules.json"
POOLING, DENSE, NORMALIZE, SCORE = "Pooling", "Dense", "Normalize", "LogitScore"
KINDS = {"Transformer", "Dropout", POOLING, DENSE, NORMALIZE, SCORE}


class Modules:
    """The modules of a folder; none without a `modules.json`.

    `listed` has kind, folder and configuration of every module, in order. Raises MalformedInput: a file is not what
    sentence-transformers writes; UnsupportedInput: a module of another kind, or with an option that is not computed
    here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            entries = json.loads(read_small(folder / MODULES)) if (folder / MODULES).is_file() else []
            found = [(entry["type"].split(".")[-1], entry["path"]) for entry in entries]
            self.listed = [(kind, path, self._config(path)) for kind, path in found]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedInput(f"`{MODULES}` is not valid: {error}", hint="copy the model's folder again") from error
        for kind, path, config in self.listed:
            if kind not in KINDS or config.get("use_residual") or config.get("include_prompt") is False:
                raise UnsupportedInput(
                    f"`verify` does not know what the module `{path or kind}` of `{MODULES}` computes",
                    hint="docs/embeddings.md lists the modules",
                )

    def _config(self, path: str) -> dict[str, Any]:
        file = self._folder / path / "config.json"
        return json.loads(read_small(file)) if path and file.is_file() else {}

    def has(self, kind: str) -> bool:
        return any(one == kind for one, _, _ in self.listed)

    def tensors(self) -> dict[str, FileTensor]:
        """Weights of the modules after the model, as `2_Dense.linear.weight`."""
        found = {}
        for kind, path, _ in self.listed:
            name = f"{path}/{SINGLE}"
            if kind == DENSE and (self._folder / name).is_file():
                for key, one in read_header(self._folder / name).tensors.items():
                    found[f"{path}.{key}"] = FileTensor(one.path, one.offset, one.dtype, one.shape, location=name)
        return found

    def embedding(self, hidden: Array, mask: Array) -> Array:
        """The embeddings [batch, features], in the dtype of the hidden state [batch, tokens, hidden]."""
        rows, weights = hidden, {name: tensor.read().astype(hidden.dtype) for name, tensor in self.tensors().items()}
        for kind, path, config in self.listed:
            if kind == POOLING:
                texts = [row[real != 0] for row, real in zip(hidden, mask, strict=True)]
                vectors = [np.stack([_of_text(mode, tokens) for tokens in texts]) for mode in _modes(config)]
                rows = np.concatenate(vectors, axis=-1)
            elif kind == DENSE:
                product = rows @ weights[f"{path}.linear.weight"].T
                product = product + weights.get(f"{path}.linear.bias", np.zeros((), hidden.dtype))
                rows = ACTIVATIONS[config.get("activation_function", "…Tanh").split(".")[-1]](product)
            elif kind == NORMALIZE:
                rows = rows / np.maximum(np.sqrt((rows * rows).sum(-1, keepdims=True)), hidden.dtype.type(1e-12))
        return rows.astype(hidden.dtype)

    def score(self, logits: Array, mask: Array) -> Array:
        """The scores of a reranker [batch], from logits [batch, tokens, vocab]."""
        config = next(config for kind, _, config in self.listed if kind == SCORE)
        rows = np.stack([row[np.flatnonzero(real)[-1]] for row, real in zip(logits, mask, strict=True)])
        found: Array = rows[:, config["true_token_id"]]
        return found if config.get("false_token_id") is None else found - rows[:, config["false_token_id"]]


def _modes(config: dict[str, Any]) -> list[str]:
    if (given := config.get("pooling_mode")) is not None:
        return given if isinstance(given, list) else [given]
    old = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    modes = [name for name in old if config.get(f"pooling_mode_{name}")] or ["mean"]
    return [name if "sqrt" in name else name.removesuffix("_tokens").removesuffix("_token") for name in modes]


def _of_text(mode: str, tokens: Array) -> Array:
    """The vector of the tokens [tokens, hidden] of one text."""
    count = len(tokens)
    results: dict[str, Callable[[], Any]] = {
        "cls": lambda: tokens[0],
        "lasttoken": lambda: tokens[-1],
        "max": lambda: tokens.max(axis=0),
        "mean": lambda: tokens.mean(axis=0),
        "mean_sqrt_len_tokens": lambda: tokens.sum(axis=0) / np.sqrt(count).astype(tokens.dtype),
        "weightedmean": lambda: np.average(tokens, axis=0, weights=np.arange(1, count + 1)),
    }
    found: Array = results[mode]()
    return found


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: np.asarray(x * 0.5 * (np.vectorize(erf)(x / np.sqrt(2)) + 1), dtype=x.dtype),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}


LONGEST = {"quick": 1024, "full": 8192}
"""Maximum number of tokens of a text that crosses a window or the original context, by suite."""

LONG = 259  # tokens of the long texts; limits of other numbers are found in the graph itself, see `audit.decisions`
MANY = 33  # texts of the largest batch
HOLES = (3, 4, 7)  # places without a token inside a text


@dataclass(frozen=True)
class TextLimits:
    """The properties of a model that the texts depend on."""

    vocab_size: int
    padding: int | None  # id of the padding token, which no text contains; None to pad with any tokens
    max_positions: int | None  # maximum number of tokens; None for no limit
    windows: tuple[int, ...]  # sizes of sliding windows, smallest first
    # tokens beyond which the rotary frequencies of the whole text change; None if they never do
    switch: int | None = None


@dataclass(frozen=True)
class Texts:
    """One batch of a scenario: ids and mask int64 [batch, tokens], 0 for padding."""

    name: str
    input_ids: Array
    attention_mask: Array
    position_ids: Array | None = None  # of the same shape; None for positions counted from the mask


def batches(limits: TextLimits, suite: str, *, pools: bool, takes_positions: bool) -> tuple[list[Texts], list[str]]:
    """The batches of a suite, `quick` or `full`, and descriptions of what no text of it crosses.

    If the graph `pools`, it joins the tokens of a text, which then has no places left out.
    """
    most = min(limits.max_positions or LONGEST[suite], LONGEST[suite])
    rows = [
        ("one text", [48], "right"),  # a multiple of the sizes that kernels and exporters pad to
        ("one token", [1, 1, 1], "right"),
        ("two texts", [13, 6], "right"),
        ("padding on the left", [9, 3, 1, 14], "left"),
        ("padding on the right", [9, 3, 1, 14], "right"),
        ("padding on both sides", [5, 12, 2, 7], "both"),
        ("long texts", [LONG, 41, 70], "left"),
        ("many texts", [length % 17 + 1 for length in range(MANY)], "right"),
    ]
    rows += [("the longest", [most], "right")] if suite == "full" else []
    crossed = [window for window in limits.windows if 2 * window + 3 <= most]
    rows += [(f"longer than the window of {window}", [2 * window + 3, window + 2], "right") for window in crossed]
    reach = min(limits.max_positions or LONGEST["full"], LONGEST["full"])
    left = [
        _unseen(f"longer than the window of {window} tokens", suite, 2 * window + 3 <= reach)
        for window in limits.windows
        if window not in crossed
    ]
    if limits.switch and limits.switch < (limits.max_positions or LONGEST[suite]):
        if limits.switch < most:
            sizes = [min(limits.switch + LONG, most), limits.switch]
            rows += [(f"beyond the original context of {limits.switch}", sizes, "left")]
        else:
            what = f"beyond the original context of {limits.switch} tokens"
            left.append(_unseen(what, suite, limits.switch < reach))
    made = [_text_batch(name, [min(size, most) for size in sizes], side, limits) for name, sizes, side in rows]
    sizes = [min(size, most) for size in (14, 9, 11)]
    if not pools:
        made.append(_with_holes(_text_batch("places without a token inside the texts", sizes, "left", limits), limits))
    if takes_positions:
        made.append(_with_gaps(_text_batch("positions with gaps", sizes, "right", limits), most))
    return made, left[:1]


def _unseen(texts: str, suite: str, is_reached: bool) -> str:
    """The faults that no text shows, in words; `is_reached` is whether those of the full suite do."""
    return f"faults of texts {texts}" + (" (`--suite full` runs some)" if is_reached and suite != "full" else "")


def _with_holes(texts: Texts, limits: TextLimits) -> Texts:
    """The same texts with places that the mask leaves out."""
    mask, ids = texts.attention_mask.copy(), texts.input_ids.copy()
    for place in HOLES:
        mask[:, -place:][:, :1] = 0
    if limits.padding is not None:
        ids = np.where(mask == 1, ids, limits.padding)
    return replace(texts, input_ids=ids, attention_mask=mask)


def _with_gaps(texts: Texts, most: int) -> Texts:
    """The same texts at positions that leave out some, and as a client packs them: each row begins elsewhere."""
    positions = default_positions(texts.attention_mask, texts.attention_mask.shape[1])
    starts = np.arange(len(positions), dtype=np.int64)[:, None] * 2
    return replace(texts, position_ids=np.minimum(2 * positions + positions // 4 + starts, most - 1))


def _text_batch(name: str, lengths: Sequence[int], side: str, limits: TextLimits) -> Texts:
    """Random tokens; those under the padding are random too, if the model takes any."""
    random = np.random.default_rng([len(lengths), *lengths, len(side)])
    extra = 3 if side == "both" else 0
    width = max(lengths) + extra
    ids = random.integers(0, limits.vocab_size, (len(lengths), width))
    if limits.padding is not None:
        ids = np.where(ids == limits.padding, (ids + 1) % limits.vocab_size, ids)
    first = {"left": [width - n for n in lengths], "right": [0] * len(lengths)}.get(
        side, [int(random.integers(0, width - n + 1)) for n in lengths]
    )
    at = np.arange(width)[None]
    starts, stops = np.array(first)[:, None], np.array(first)[:, None] + np.array(lengths)[:, None]
    mask = ((at >= starts) & (at < stops)).astype(np.int64)
    if limits.padding is not None:
        ids = np.where(mask == 1, ids, limits.padding)
    return Texts(name, ids.astype(np.int64), mask)
