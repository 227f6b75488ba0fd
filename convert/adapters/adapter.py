"""Adapter: the content of an opened adapter of any kind: pairs A and B, whole tensors, trained rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.convert.adapters.lora_config import LoraConfig
from llmconv.convert.adapters.saved_modules import TokenRows
from llmconv.convert.adapters.tuners import Tuner
from llmconv.convert.adapters.tuners.module_tensors import ModuleTensors
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor


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
        """r: the rows of A and the columns of B."""
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
        """The folder's name."""
        return self.path.absolute().name


def check(adapter: Adapter) -> None:
    """Checks ranks against the config, and finite values; MalformedInput, or UnsupportedInput for another dtype."""
    if not any((adapter.pairs, adapter.whole, adapter.tokens, adapter.learned)):
        raise MalformedInput(f"`{adapter.weights[0].name}` contains no tensors", hint="save the adapter again")
    for module, pair in adapter.pairs.items():
        if not adapter.config.parameters:  # their rank depends on the number of experts, which only the base has
            adapter.config.scale(module, pair.rank)
        for part, tensor in (
            *(("lora_A", pair.a), ("lora_B", pair.b), ("lora_B.bias", pair.bias)),
            ("lora_magnitude_vector", pair.magnitude),
        ):
            if tensor is not None:
                _require_finite(f"{module}.{part}", tensor)
    for name, tensor in adapter.whole.items():
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
    if any(pair.magnitude is not None or (pair.bias is not None and _any(pair.bias)) for pair in pairs):
        return False
    return not any(_any(pair.b) and (not pair.embedding or _any(pair.a)) for pair in pairs)  # A begins as zeros there


def _any(tensor: LazyTensor) -> bool:
    return any(tensor.rows(*block).any() for block in tensor.blocks())


def _require_finite(name: str, tensor: LazyTensor) -> None:
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
