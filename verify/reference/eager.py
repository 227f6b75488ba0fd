"""The reference: every output of the eager model in float64, with the rounding noise of the graph's dtype.

The eager model after a trained prefix (virtual tokens): it continues the keys and values of the prefix.

The trained tensor is read from the folder; its keys and values are computed here independently of the exporter.
Layouts: peft `PeftModel.get_prompt` for `prefix_tuning`, PaddleNLP `pre_caches.npy`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmconv.causal_lm import LENGTHS, is_dynamic
from llmconv.checkpoint import open_weights
from llmconv.errors import MalformedInput
from llmconv.files.safetensors_file import read_header
from llmconv.output.manifest import PrefixEntry
from llmconv.runtime.eager.limit_margins import ModelLimit
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.eager.stored_tensors import ScaleFactors
from llmconv.runtime.extra_inputs import ExtraInput, ModelCall, is_state
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Runner, Step, default_positions
from llmconv.tensors import Array, DType, LazyTensor
from llmconv.verify.reference.other_roundings import (
    LEAST,
    WeightScaling,
    are_merged,
    is_another,
    merged_steps,
    other_roundings,
    outputs_of,
    run_chain,
    valid_rows,
)
from llmconv.verify.results import Check
from llmconv.verify.scenarios.calls import (
    GARBAGE,
    GARBAGE_AFTER_FLOAT16,
    GARBAGE_IN_FLOAT16,
    Call,
    Chain,
    ModelFacts,
    chain,
    full_mask,
    windows_of,
)
from llmconv.verify.scenarios.table import Scenario
from llmconv.verify.sigma import ExpectedOutput, NoiseFloor

ORIGINAL = "original_max_position_embeddings"

ExpectedOutputs = list[list[dict[str, ExpectedOutput]]]  # by chain, by call, by output name


@dataclass(frozen=True)
class ComputedModel:
    """A model whose weights are computed when they are read."""

    folder: Path  # has its configuration
    weights: Mapping[str, LazyTensor] | None = None  # by name; None where the folder's own are meant
    # weights that were integer codes before, which an export keeps: by name, the dtype of their scales
    kept: Mapping[str, DType] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        return open_weights(self.folder) if self.weights is None else self.weights

    def options(self, code: Path | None) -> dict[str, Any]:
        """Arguments of a runner of the model besides its folder and dtype; `code` as there."""
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone

        return {"code": code, "weights": self.weights, "extra_inputs": extra_inputs_of(self.folder)}


class Eager:
    """The model in float64 and in the graph's dtype, and the rounding noise between the two."""

    is_layered = False  # whether it is never held whole, and all calls of a scenario are made layer by layer

    def __init__(  # noqa: PLR0913 - one parameter per property of the model
        self,
        folder: Path,
        dtype: str,  # numpy name of the graphs' dtype
        *,
        keep: bool = False,  # keep all results, to verify several folders with graphs of one model
        code: Path | None = None,  # a trusted folder whose own code builds the model
        factors: ScaleFactors | None = None,  # the factor of each weight, by name and shape, if not as stored
        skipped: Collection[str] = (),  # names of layers that are left out (`runtime.eager.skipped_layers`)
        fixed_inputs: Collection[str] = (),  # extra inputs that the graphs lack, because they always have their default
        adapter: Path | None = None,  # folder of a PEFT adapter, which PEFT applies to the model without merging
        weights: Mapping[str, LazyTensor] | None = None,  # by name, if not those of the folder
    ) -> None:
        self._adapter, self._weights = adapter, weights
        self.folder, self.dtype, self._code, self._factors = folder, dtype, code, factors
        self._skipped, self._fixed_inputs = skipped, frozenset(fixed_inputs)
        self._kept: dict[str, ExpectedOutputs] | None = {} if keep else None
        self._variants: dict[str, Eager] = {}
        self._steps: dict[tuple[str, int, float], list[Step]] = {}
        self._run_variants: list[Eager] = []
        self._reached: dict[str, dict[ModelLimit, float]] = {}
        self._run: set[str] = set()
        self._rounded_model, self._rounded = self._open(dtype)
        self._model, self._exact = self._open("float64")
        self._floor = NoiseFloor(dtype, self.width)
        self._garbage = GARBAGE_IN_FLOAT16 if dtype == "float16" else GARBAGE
        self._virtual = self._first_position = 0

    def _open(self, dtype: str) -> tuple[EagerRunner, Runner]:
        computed = self._factors or self._weights is not None  # which takes longer than copying
        like = self._rounded_model if computed and dtype == "float64" and self.dtype == "float32" else None
        model = EagerRunner(self.folder, dtype, like=like, adapter=self._adapter, **self._options)
        return model, model

    @property
    def _options(self) -> dict[str, Any]:
        own = {"factors": self._factors, "skipped": self._skipped}
        return {**ComputedModel(self.folder, self._weights).options(self._code), **own}

    def with_fixed(self, names: Collection[str]) -> Eager:
        """The same model for graphs without some of the extra inputs; `names` as `fixed_inputs`."""
        if self._fixed_inputs == set(names):
            return self
        other = copy(self)
        other._kept, other._floor = ({} if self._kept is not None else None), NoiseFloor(self.dtype, self.width)
        other._steps, other._variants, other._fixed_inputs = {}, {}, frozenset(names)
        return other

    def with_defaults(self) -> Eager:
        """The same model for graphs that take none of the extra inputs."""
        return self.with_fixed(self._model.extra_inputs)

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        return {name: one for name, one in self._model.extra_inputs.items() if name not in self._fixed_inputs}

    def in_dtype(self, dtype: str) -> Eager:
        """The same model with the noise of another dtype; with `keep` it is opened once."""
        if dtype in {self.dtype, *self._variants}:
            return self._variants.get(dtype, self)
        other = copy(self)
        other.dtype, other._variants, other._kept = dtype, {}, ({} if self._kept is not None else None)
        other._rounded_model, other._rounded = other._open(dtype)
        other._floor = NoiseFloor(dtype, self.width)
        others = GARBAGE_AFTER_FLOAT16 if self.dtype == "float16" else GARBAGE
        other._garbage = GARBAGE_IN_FLOAT16 if dtype == "float16" else others
        if self._kept is not None:
            self._variants[dtype] = other
        return other

    def with_prefix(self, entry: PrefixEntry, start: Callable[[EagerRunner], PrefixStart]) -> Eager:
        """The same model after a prefix; `start` returns the keys and values of the prefix for a runner."""
        other = copy(self)
        other._kept, other._floor = ({} if self._kept is not None else None), NoiseFloor(self.dtype, self.width)
        other._steps = {}
        other._virtual, other._first_position = entry.length, entry.first_position
        runners = [
            PrefixedRunner(runner, start(runner), entry.first_position) for runner in (self._model, self._rounded_model)
        ]
        other._exact, other._rounded = runners
        return other

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self._exact, self._rounded

    @property
    def models(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return self._model.model, self._rounded_model.model

    def facts(self) -> ModelFacts:
        config = self._model.config
        limit = next(filter(None, (getattr(config, name, None) for name in LENGTHS)), None)
        original = original_context(config)
        if limit:
            limit = max(limit, 4 * (original or 0)) - self._first_position
        shapes = self.cache_shapes()
        return ModelFacts(
            self._model.vocab_size,
            max_positions=limit,
            windows=windows_of(config),
            takes_positions=self._model.takes_positions,
            original=original,
            keeps_states=any(is_state(name) for name in shapes),
            no_synthetic_past="no synthetic past after a prefix" if self._virtual else "",
            cache=shapes,
            parameters=self._model.model.num_parameters(),
            garbage=self._garbage,
            padding=getattr(config, "pad_token_id", None),
            greedy=self._continued,
            extra_inputs=self.extra_inputs,
        )

    def _continued(self, prompt: Array, steps: int) -> Array:
        """A prompt [1, tokens] and its greedy continuation, [1, tokens + steps]."""
        ids, past, new = prompt, None, prompt
        for _ in range(steps):
            mask = np.ones_like(ids)
            step = self._exact.prefill(new, mask, default_positions(mask, new.shape[1]), past)
            new, past = step.logits[:, -1].argmax(axis=-1)[:, None], step.present
            ids = np.concatenate([ids, new], axis=1)
        return ids

    @property
    def width(self) -> int:
        return int(getattr(self._model.config, "hidden_size", 0) or 0)

    def rotary_frequencies(self) -> list[tuple[Array, float]]:
        """Rotary frequencies, float32 [head_dim / 2], each with the factor of its cosines and sines."""
        found = []
        for module in self._rounded_model.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                prefix, ending, rest = name.rpartition("inv_freq")
                if ending and not rest and not prefix.endswith("original_"):
                    factor = getattr(module, f"{prefix}attention_scaling", 1.0)
                    found.append((buffer.float().numpy(), float(factor)))
        return found

    @property
    def num_layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the cache for one sequence and one token, by output name."""
        one = np.zeros((1, 1), dtype=np.int64)
        present = self._exact.prefill(one, one + 1, one).present
        return {name: array.shape for name, array in present.arrays().items()}

    def heeds_positions(self) -> bool:
        ids, mask = np.zeros((1, 3), dtype=np.int64), full_mask(1, 3)
        ids[0, 1] = 1
        near, far = (self._exact.prefill(ids, mask, np.array([at])).logits for at in ((0, 1, 2), (0, 2, 1)))
        return not np.array_equal(near, far, equal_nan=True)

    def embed(self, input_ids: Array) -> tuple[Array, Array]:
        return self._model.embed(input_ids).astype(np.float64), self._rounded_model.embed(input_ids)

    @property
    def eager_runners(self) -> tuple[EagerRunner, EagerRunner]:
        """The model in float64 and in the graph's dtype, without a prefix."""
        return self._model, self._rounded_model

    def outputs_of(self, call: Call, run: Callable[[EagerRunner], Step]) -> dict[str, ExpectedOutput]:
        """Every output of a call, which `run` makes on a model; `call` determines which rows are padding."""
        exact, rounded = (outputs_of(run(model)) for model in self.eager_runners)
        return {
            name: self._floor.truth(name, rows, rounded[name], self._valid(call, name)) for name, rows in exact.items()
        }

    def scaled(self, scaling: WeightScaling) -> Eager:
        """The same model with scaled weights; this one releases its memory until it is used again."""
        scaled = self._variants.get(scaling.name)
        if scaled is None:
            self.release()
            scaled = self._scaled(scaling)
        self._run_variants.append(scaled)
        if self._kept is not None:
            self._variants = {**self._variants, scaling.name: scaled}
        return scaled

    def begin(self) -> None:
        """Forgets the limits that were reached for other graphs."""
        self._run_variants.clear()
        self._run.clear()
        for scaled in self._variants.values():
            scaled.begin()

    def release(self) -> None:
        self._model.release()
        self._rounded_model.release()

    def _scaled(self, scaling: WeightScaling) -> Eager:
        options: dict[str, Any] = {"code": self._code, "factors": scaling.factor_of, "skipped": self._skipped}
        options |= {"keep": self._kept is not None, "fixed_inputs": self._fixed_inputs, "adapter": self._adapter}
        options["weights"] = self._weights
        return Eager(self.folder, self.dtype, **options)

    def own_shares(self) -> dict[ModelLimit, float]:
        """The largest share of each limit that the model reached in the scenarios since `begin`; see `Reach`."""
        if self._kept is None:
            return dict(self._model.limit_margins.shares)
        return _largest(self._reached[name] for name in self._run)

    def shares(self) -> dict[ModelLimit, float]:
        """The same, with own and scaled weights."""
        return _largest([self.own_shares(), *(scaled.own_shares() for scaled in self._run_variants)])

    def expected_outputs(self, scenario: Scenario, chains: list[Chain]) -> ExpectedOutputs:
        """Every output of every call of a scenario; results are kept by its name."""
        if self._kept is None:
            return [self._truths(chain, {}, "") for chain in chains]
        self._run.add(scenario.name)
        if scenario.name not in self._kept:
            self._model.limit_margins.shares = {}
            # float64 steps are equal for all dtypes, except for the garbage in a cache
            self._kept[scenario.name] = [
                self._truths(chain, self._steps, (scenario.name, at, max(call.edit.garbage for call in chain)))
                for at, chain in enumerate(chains)
            ]
            known = self._reached.get(scenario.name, {})  # reached in float64, for graphs of another dtype or prefix
            self._reached[scenario.name] = _largest([known, self._model.limit_margins.shares])
        return self._kept[scenario.name]

    def _truths(self, chain: Chain, known: dict[Any, list[Step]], key: Any) -> list[dict[str, ExpectedOutput]]:
        """Every output of a chain; its float64 steps are taken from `known[key]` or stored there."""
        rounded, floor = run_chain(self._rounded, chain), self._floor.copy()
        if key not in known:
            known[key] = self._merged(chain) or run_chain(self._exact, chain)
        found = self._chain(chain, known[key], rounded)
        if are_merged(known[key]) and is_another(found):
            known[key], self._floor = run_chain(self._exact, chain), floor
            found = self._chain(chain, known[key], rounded)
        return found

    def _merged(self, chain: Chain) -> list[Step] | None:
        """The float64 steps from one merged call; None where that may differ, or a difference could not be detected."""
        if len(chain) < LEAST or self._virtual or not self._floor.knows_noise or original_context(self._model.config):
            return None
        return merged_steps(self._exact, chain)

    def _chain(self, chain: Chain, steps: list[Step], rounded_steps: list[Step]) -> list[dict[str, ExpectedOutput]]:
        runs = zip(steps, rounded_steps, strict=True)
        found = []
        others = other_roundings(self._repeating, chain)
        for call, (exact, rounded), (orders, nudges) in zip(chain, runs, others, strict=True):
            pairs = zip(outputs_of(exact, call.known).items(), outputs_of(rounded, call.known).values(), strict=True)
            truths = {name: self._floor.truth(name, a, b, self._valid(call, name)) for (name, a), b in pairs}
            found.append(
                {
                    name: replace(
                        truth,
                        others=[partial(run, name) for run in nudges],
                        orders=[partial(run, name) for run in orders],
                    )
                    for name, truth in truths.items()
                }
            )
        return found

    @property
    def _repeating(self) -> Runner:
        """The runner in the graph's dtype, which computes equal calls again."""
        return self._rounded

    def _valid(self, call: Call, output: str) -> Array:
        """The rows that are not padding; in the cache, the prefix comes first."""
        valid = valid_rows(call, output)
        return valid if output == "logits" else np.pad(valid, ((0, 0), (self._virtual, 0)), constant_values=True)


def _largest(several: Iterable[Mapping[ModelLimit, float]]) -> dict[ModelLimit, float]:
    found: dict[ModelLimit, float] = {}
    for shares in several:
        for place, share in shares.items():
            found[place] = max(share, found.get(place, 0.0))
    return found


def original_context(config: Any) -> int | None:
    """Context length in tokens before rotary scaling; None without rotary scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    if any(is_dynamic(kind.get("rope_type")) for kind in kinds):
        return int(config.max_position_embeddings)
    return next((int(kind[ORIGINAL]) for kind in kinds if kind.get(ORIGINAL)), None)


NAME = "the model's own cache"
CACHE_LENGTHS = (5, 1, 1, 1)  # tokens of a prompt, and of the calls after it
LIMIT = 1e-4
"""Largest difference in float64, as a share of the logits' RMS; 1e-15 in every exported family of transformers."""

SEED = 8


def own_cache_chains(facts: ModelFacts) -> tuple[Chain, Chain]:
    """A text in one call, and the same text in several, each on the cache of the previous."""
    mask = full_mask(1, sum(CACHE_LENGTHS))
    whole, pieces = (
        chain(mask, lengths, facts, np.random.default_rng(SEED)) for lengths in ((len(mask[0]),), CACHE_LENGTHS)
    )
    return whole, pieces


def check_own_cache(eager: Eager, graphs: list[str]) -> list[Check]:
    """A failed check for each graph if the model's logits after a cache differ from those without; else none.

    All other checks compare a graph with the model on a cache of its own. A model whose tokens attend to later ones
    agrees there with a graph, and both are wrong. Where an extra input is computed from each call, such as the number
    of its tokens, earlier calls rightly differ from the whole text: only the last call's logits are compared.
    """
    facts = eager.facts()
    whole, pieces = own_cache_chains(facts)
    exact = eager.runners[0]
    if eager.is_layered:
        expected = run_chain(exact, whole)[0].logits
    else:
        expected = eager.eager_runners[0].without_cache(whole[0].tokens)
    steps = run_chain(exact, pieces)
    computed = any(callable(extra.default) for extra in facts.extra_inputs.values())
    found = np.concatenate([step.logits for step in (steps[-1:] if computed else steps)], axis=1)
    expected = expected[:, -found.shape[1] :]
    size = np.sqrt(np.mean(np.square(expected))) or 1.0
    error = float(np.sqrt(np.mean(np.square(found - expected))) / size)
    detail = (
        f"the model's logits after a cache differ by {error:.2g} of their size from those without: tokens attend to "
        "later ones, as those of an encoder do, or its cache is wrong"
    )
    return [Check(NAME, name, "", verdict="fail", detail=detail) for name in graphs] if not error <= LIMIT else []


KeyValues = list[tuple[Array, Array]]  # key and value of each layer, `[1, kv_heads, P, head_dim]`

PARTS = ("key", "value")


@dataclass(frozen=True)
class PrefixStart:
    """The cache of a prefix: keys and values by layer."""

    layers: KeyValues

    @property
    def length(self) -> int:
        return int(self.layers[0][0].shape[2])

    def arrays(self) -> dict[str, Array]:
        pairs = enumerate(self.layers)
        return {f"present.{layer}.{part}": a for layer, pair in pairs for part, a in zip(PARTS, pair, strict=True)}

    def of_batch(self, batch: int) -> PrefixStart:
        return PrefixStart(
            [(np.repeat(key, batch, axis=0), np.repeat(value, batch, axis=0)) for key, value in self.layers]
        )


@dataclass(frozen=True)
class PrefixedRunner(Runner):
    """A runner that puts the prefix before every sequence; callers see it only in the length of the cache."""

    runner: EagerRunner
    start: PrefixStart
    first_position: int  # added to all positions

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        whole = call.after(self.start.length, self.first_position)
        return self.runner.prefill(*whole.arrays, past or self.start.of_batch(len(call.input_ids)), extras, placed)


Start = Callable[[EagerRunner], PrefixStart]  # keys and values of a prefix, for the precision of a runner

StartOf = Callable[[Path, PrefixEntry], Start]  # the prefix of a folder


def trained_start(folder: Path, entry: PrefixEntry) -> Callable[[EagerRunner], PrefixStart]:
    """Computes the prefix from the trained tensor, in the precision of the runner that it is given.

    Raises MalformedInput: the manifest declares an unknown kind, or the file lacks the tensor.
    """
    content = _read(folder, entry, "adapter")
    make = _MAKERS.get(entry.kind)
    if make is None:
        raise MalformedInput(
            f"unsupported prefix kind in the manifest: `{entry.kind}`", hint="run `llmconv export` again"
        )
    return lambda runner: PrefixStart(make(content, runner))


def stored_start(folder: Path, entry: PrefixEntry, layers: int) -> Callable[[EagerRunner], PrefixStart]:
    """Returns the stored keys and values of a manifest's prefix that the graphs map, for any runner."""
    names = [(f"prefix.{layer}.key", f"prefix.{layer}.value") for layer in range(layers)]
    start = PrefixStart([(_read(folder, entry, key), _read(folder, entry, value)) for key, value in names])
    return lambda runner: start


def _read(folder: Path, entry: PrefixEntry, name: str) -> Array:
    tensors = read_header(folder / entry.file).tensors if (folder / entry.file).is_file() else {}
    if name not in tensors:
        raise MalformedInput(f"missing key in `{entry.file}`: `{name}`", hint="run `llmconv export` again")
    return tensors[name].read()


def _of_rows(content: Array, runner: EagerRunner) -> KeyValues:
    """`[P, 2 * layers * heads * size]`: `view(P, 2 * layers, heads, size)`, then `permute(1, 2, 0, 3)`."""
    shapes = _shapes(runner)
    rows = content.reshape(len(content), 2 * len(shapes), *shapes[0]).transpose(1, 2, 0, 3)
    return [(rows[i : i + 1], rows[i + 1 : i + 2]) for i in range(0, len(rows), 2)]


def _of_embeddings(content: Array, runner: EagerRunner) -> KeyValues:
    """`[P, hidden]`: embeddings that the model runs before the tokens."""
    arrays = runner.run_embedded(content[None]).arrays()
    return [(arrays[f"present.{layer}.key"], arrays[f"present.{layer}.value"]) for layer in range(len(arrays) // 2)]


def _shapes(runner: EagerRunner) -> list[tuple[int, int]]:
    one = np.zeros((1, 1), dtype=np.int64)
    present = runner.prefill(one, one + 1, one).present.arrays()
    return [(array.shape[1], array.shape[3]) for name, array in present.items() if name.endswith(".key")]


_MAKERS: dict[str, Callable[[Array, EagerRunner], KeyValues]] = {
    "prefix_tuning": _of_rows,
    "pre_caches": lambda content, runner: [
        (layer[0:1], layer[1:2]) for layer in content
    ],  # [layers, 2, heads, P, size]
    "soft_prompt": _of_embeddings,
}
