"""Adapter: the content of an opened adapter of any kind: pairs A and B, whole tensors, trained rows, other tuners' own.

Whole tensors are trained ones (`modules_to_save`), and originals that PEFT (`get_peft_model_state_dict`) saves next to
them with `save_embedding_layers`, the default for a resized vocabulary: `.base_layer.weight` under LoRA,
`.token_adapter.base_layer.weight` under trained rows, and for `modules_to_save` the same tensor as `.weight` and as
`.modules_to_save.weight`, with `.original_module.weight` for the one before training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmconv.checkpoint import HEADS
from llmconv.convert.adapters.lora_config import AdapterFields, LoraConfig
from llmconv.convert.algebra import all_zero, equal
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import BY_NAME, FLOATS, Array, LazyTensor, cast

ORIGINAL = re.compile(r"\.(?:original_module|(?:token_adapter\.)?base_layer)(?=\.\w+$)")
TRAINED = re.compile(r"\.(?:modules_to_save|ln_tuning_layers)(?:\.\w+)?(?=\.\w+$)")
FLOAT32 = BY_NAME["float32"]


WeightShape = tuple[int, int]
# out and in of the weight that an adapter's tensors fit; None for any size
FittingShape = tuple[int | None, int | None]
RowChange = Callable[[Array, int], Array]
"""`delta(rows, start)`: the update of the rows of a weight from `start` on (float64, rows×in), given those rows."""


@dataclass(frozen=True)
class ModuleTensors:
    """The trained tensors of the module at a path, by their names in PEFT, such as `hada_w1_a`, with shared ones."""

    module: str
    tensors: Mapping[str, LazyTensor]
    settings: AdapterFields

    def shape(self, name: str, dims: int | None = None) -> tuple[int, ...]:
        """The shape of one tensor; MalformedInput if it is missing or does not have `dims` dimensions."""
        if name not in self.tensors:
            raise MalformedInput(
                f"the adapter lacks `{name}` of `{self.module}`",
                hint="the file is incomplete; save or copy the adapter again",
            )
        shape = self.tensors[name].shape
        if (dims is not None and len(shape) != dims) or not shape:
            raise self.misfit(f"`{name}` has shape {list(shape)}")
        return shape

    def read(self, name: str) -> Array:
        return self.tensors[name].read().astype(np.float64)

    def same(self, what: str, *sizes: int) -> int:
        """The common value of `sizes`; MalformedInput, with `what` as their name, if they differ."""
        if len(set(sizes)) != 1:
            raise self.misfit(f"{what} is {' or '.join(str(size) for size in dict.fromkeys(sizes))}")
        return sizes[0]

    def misfit(self, problem: str) -> MalformedInput:
        return MalformedInput(
            f"the adapter's tensors of `{self.module}` do not fit together or its config: {problem}",
            hint="config and tensors belong to different adapters; copy the adapter again",
        )

    def scale(self, alpha_default: float = 8) -> float:
        """alpha/r (PEFT `LycorisLayer.update_layer`) by the module's path; MalformedInput unless numbers above 0."""
        alpha = self.settings.of_module(
            "alpha_pattern", self.module, self.settings.number("alpha", default=alpha_default)
        )
        return alpha / self.rank()

    def rank(self, default: float = 8) -> int:
        """r of the config by the module's path; MalformedInput unless a number above 0."""
        return int(self.settings.of_module("rank_pattern", self.module, self.settings.number("r", default=default)))


def no_formula(*learned: object) -> NoReturn:
    """`fit` and `delta` of a tuner that only has whole tensors."""
    raise NotImplementedError("a tuner with parts needs `fit` and `delta`")


@dataclass(frozen=True)
class Tuner:
    """One kind of adapter; a row of `TUNERS`."""

    peft_type: str  # as in `adapter_config.json`
    parts: tuple[str, ...]  # names of its tensors, after the module's path; empty if it only has whole tensors
    # known fields of its config: those that are read, and those that only describe the training
    fields: tuple[str, ...]
    # `fit(learned)` returns the size of the weight from the shapes alone; refuses a shape mismatch
    fit: Callable[[ModuleTensors], FittingShape] = no_formula
    # `delta(learned, shape)` returns a function from rows of the weight to rows of its update, as a matrix out×in
    # (convolutions are flattened); values needed for all rows are computed once, in `delta`
    delta: Callable[[ModuleTensors, WeightShape], RowChange] = no_formula
    # `require(learned, shape)` refuses tensors that do not fit a weight of this size
    require: Callable[[ModuleTensors, WeightShape], None] = lambda learned, shape: None
    shared: tuple[str, ...] = ()  # names of tensors that the file has once for all modules
    # `drawn(fields, shapes)` returns the shared tensors that the file may lack, from the config and the sizes of all
    # adapted weights
    drawn: Callable[[AdapterFields, Sequence[WeightShape]], Mapping[str, LazyTensor]] = lambda settings, shapes: {}
    conv1d: bool = False  # PEFT supports weights that are stored in×out
    # the bias of a module is updated like its weight, as a matrix out×1, if `fit` returns out
    scales_output: bool = False
    former: Mapping[str, str] = field(default_factory=dict)  # other parts that it had, and the PEFT that merges those
    of_weight: bool = False  # the update depends on the weight, so that of two adapters on one weight is not a sum
    # how many rows the formula changes together; it is given whole groups of them
    group: Callable[[ModuleTensors], int] = lambda learned: 1


@dataclass(frozen=True)
class WholeTensors:
    """The whole tensors of a file by their names in the model: trained ones, and originals before training."""

    trained: dict[str, LazyTensor] = field(default_factory=dict)
    originals: dict[str, LazyTensor] = field(default_factory=dict)

    def place(self, plain: str) -> tuple[dict[str, LazyTensor], str]:
        """The dictionary and the key for a tensor of this name."""
        if ORIGINAL.search(plain):
            return self.originals, ORIGINAL.sub("", plain)
        return self.trained, TRAINED.sub("", plain)

    def all(self) -> dict[str, LazyTensor]:
        return self.originals | self.trained

    def untrained(self, saved: Collection[str]) -> dict[str, LazyTensor]:
        """The tensors that were not trained: an embedding or head outside `modules_to_save` was only resized."""
        ends = (*EMBEDDINGS, *HEADS)
        more = {
            name: tensor
            for name, tensor in self.trained.items()
            if name.endswith(ends) and not parts_from_saved(name, saved) and name not in self.originals
        }
        return self.originals | more


def parts_from_saved(name: str, modules: Collection[str]) -> int:
    """Components of a name from the saved module on (PEFT compares ends of paths, and saves all below), or 0."""
    parts = name.split(".")
    ends = tuple(modules)
    return next((len(parts) - at + 1 for at in range(len(parts) - 1, 0, -1) if ".".join(parts[:at]).endswith(ends)), 0)


def place_once(place: dict[str, LazyTensor], key: str, tensor: LazyTensor, named: str, *, may_repeat: bool) -> None:
    """Adds a tensor to `place`; MalformedInput if its key has another one (with `may_repeat`, an unequal one)."""
    if key in place and not (may_repeat and equal(place[key], tensor)):
        raise MalformedInput(
            f"{named} twice, under different names (duplicate key)",
            hint="several adapters are in one file; save each in its own folder",
        )
    place[key] = tensor


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors have equal values, in whatever floating-point types they are stored."""
    if one.shape != other.shape:
        return False
    wide = all(tensor.dtype.name in FLOATS for tensor in (one, other))
    return equal(cast(one, FLOAT32), cast(other, FLOAT32)) if wide else equal(one, other)


TRAINABLE_HEADS = ("lm_head", "embed_out")
"""Modules that may be tied to the embedding; some checkpoints then contain its trained rows twice."""


@dataclass(frozen=True)
class TokenRows:
    """Rows [ids, dim] of an embedding that one adapter trained, and their ids."""

    ids: tuple[int, ...]
    rows: LazyTensor


def pair_tokens(deltas: Mapping[str, LazyTensor], config: LoraConfig) -> dict[str, TokenRows]:
    """The trained rows of each module (PEFT `utils/other.py`, `set_additional_trainable_modules`).

    `config.tokens` has their ids by the end of a module's path, or by `""` for the only module; MalformedInput if
    config and tensors contradict each other.
    """
    result = {}
    for module, rows in deltas.items():
        named = {ids for key, ids in config.tokens.items() if f".{module}".endswith(f".{key}")}
        tied = set(config.tokens.values()) if module in TRAINABLE_HEADS and len(deltas) > 1 else set()
        found = {ids for key, ids in config.tokens.items() if key == ""} or named or tied
        if (ids := found.pop() if len(found) == 1 else None) is None:
            raise _contradiction(f"the file contains trained tokens of `{module}`, but the config lacks their indices")
        if len(rows.shape) != 2 or rows.shape[0] != len(ids):
            raise _contradiction(
                f"shape mismatch for the trained tokens of `{module}`: expected {len(ids)} rows, got {list(rows.shape)}"
            )
        result[module] = TokenRows(ids, rows)
    found = {tokens.ids for tokens in result.values()}
    # PEFT does not save the rows of a tied head, which equal the embedding's
    apart = [
        ids for key, ids in config.tokens.items() if key.rpartition(".")[2] not in TRAINABLE_HEADS or ids not in found
    ]
    if len(result) < len(apart):
        raise _contradiction(f"the config has trained tokens of {len(apart)} modules, the file of {len(result)}")
    return result


def _contradiction(message: str) -> MalformedInput:
    return MalformedInput(message, hint="config and tensors belong to different adapters; copy the adapter again")


def with_rows(base: LazyTensor, trained: Sequence[TokenRows]) -> LazyTensor:
    """`base` with the trained rows in place of its own, rounded to its element type."""
    homes = {row: (tokens.rows, at) for tokens in trained for at, row in enumerate(tokens.ids)}

    def load(start: int, stop: int) -> Array:
        rows = np.array(base.rows(start, stop))
        for row in homes.keys() & range(start, stop) if len(homes) < stop - start else range(start, stop):
            if row in homes:
                tensor, at = homes[row]
                rows[row - start] = tensor.rows(at, at + 1)[0].astype(rows.dtype)
        return rows

    return LazyTensor(base.dtype, base.shape, load, lambda other: with_rows(cast(base, other), trained))


@dataclass(frozen=True)
class Pair:
    """The LoRA tensors of one module."""

    a: LazyTensor  # r×in (an embedding: r×vocab)
    b: LazyTensor  # out×r (an embedding: dim×r)
    bias: LazyTensor | None = None  # out, added to the module's bias; only with `lora_bias`
    embedding: bool = False  # the update is the transpose of B·A
    magnitude: LazyTensor | None = None  # one number per output; only with DoRA
    # kernel sizes of a convolution, by which the columns of A are flattened after the inputs
    kernel: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """One opened adapter."""

    path: Path
    weights: tuple[Path, ...]
    settings: Path
    config: LoraConfig  # the fields of the config that affect the merged weight
    pairs: Mapping[str, Pair]  # module path to its A and B
    whole: Mapping[str, LazyTensor] = field(default_factory=dict)  # tensor name to a tensor that replaces the base's
    # the tensors of `whole` that are not trained, such as a resized embedding
    originals: Mapping[str, LazyTensor] = field(default_factory=dict)
    tokens: Mapping[str, TokenRows] = field(default_factory=dict)  # module path to rows that replace the base's
    initial: Adapter | None = None  # the adapter as it was before training, if training subtracted it from the base
    # module path to the tensors of an adapter of another kind than LoRA
    learned: Mapping[str, ModuleTensors] = field(default_factory=dict)
    tuner: Tuner | None = None  # that kind
    model_type: str = ""  # of the base; empty if the adapter's files do not contain it
    # fields of the base's `config.json` that the adapter changes
    fields: Mapping[str, Any] = field(default_factory=dict)
    keeps_tie: bool = False  # an update of a tied embedding is applied to the head, too

    @property
    def name(self) -> str:
        return self.path.absolute().name


INDICES = "_indices"  # end of the names of integers


def check(adapter: Adapter) -> None:
    """Checks ranks against the config, and finite values; MalformedInput, or UnsupportedInput for another dtype."""
    if not any((adapter.pairs, adapter.whole, adapter.tokens, adapter.learned)):
        raise MalformedInput(f"`{adapter.weights[0].name}` contains no tensors", hint="save the adapter again")
    for module, pair in adapter.pairs.items():
        if not adapter.config.parameters:  # their rank depends on the number of experts, which only the base has
            adapter.config.scale(module, pair.rank)
        parts = {"lora_A": pair.a, "lora_B": pair.b, "lora_B.bias": pair.bias, "lora_magnitude_vector": pair.magnitude}
        for part, tensor in parts.items():
            if tensor is not None:
                _require_finite(f"{module}.{part}", tensor)
    for name, tensor in adapter.whole.items():
        _require_gathered(name, tensor)
        _require_finite(name, tensor)
    for module, learned in adapter.learned.items():
        for part, tensor in learned.tensors.items():
            _require_finite(f"{module}.{part}", tensor)
    for name, tokens in adapter.tokens.items():
        _require_finite(f"{name}.trainable_tokens_delta", tokens.rows)


def is_zero(adapter: Adapter) -> bool:
    """Whether the adapter consists of factors whose products are all zero; reading stops at the first that is not."""
    if adapter.whole or adapter.tokens or adapter.learned or adapter.initial or not adapter.pairs:
        return False
    pairs = adapter.pairs.values()
    if any(pair.magnitude is not None or (pair.bias is not None and not all_zero(pair.bias)) for pair in pairs):
        return False
    # A begins as zeros in an embedding
    return all(all_zero(pair.b) or (pair.embedding and all_zero(pair.a)) for pair in pairs)


def _require_gathered(name: str, tensor: LazyTensor) -> None:
    if 0 in tensor.shape:
        raise MalformedInput(
            f"`{name}` of the adapter has shape {list(tensor.shape)}: it was saved before it was gathered",
            hint="gather the parameters (ZeRO-3, FSDP) before saving the adapter",
        )


def _require_finite(name: str, tensor: LazyTensor) -> None:
    if name.endswith(INDICES) and tensor.dtype.numpy.kind in "iu":
        return
    if tensor.dtype.numpy.kind not in "fV":
        raise UnsupportedInput(
            f"the adapter stores `{name}` as {tensor.dtype.name}", hint="only floating-point adapters are merged"
        )
    for start, stop in tensor.blocks():
        if not np.isfinite(tensor.rows(start, stop)).all():
            raise MalformedInput(
                f"the adapter's `{name}` contains values that are not finite",
                hint="the training diverged; take an earlier checkpoint of the adapter",
            )


def grouped_convolution(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> UnsupportedInput:
    """The error for factors of these shapes on a convolution whose channels are in groups."""
    return UnsupportedInput(
        f"`{module}` is a convolution with groups: A has shape {list(a)}, B {list(b)}",
        hint="its update has no groups, so no merged weight equals it; serve the adapter",
    )
