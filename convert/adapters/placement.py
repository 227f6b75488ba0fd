"""Edits: every tensor of every adapter placed on exactly one tensor of the base, shapes checked, nothing read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.convert.adapters.low_rank import LowRank
from llmconv.convert.adapters.names import match_names
from llmconv.convert.adapters.reading import Adapter, Pair
from llmconv.convert.blueprint.names import EMBEDDINGS
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import BY_NAME, FLOATS, LazyTensor, in_memory

HEAD = "lm_head.weight"
CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Modules that transformers makes as Conv1D, whose weight is stored in×out, and the model types that have them."""

ONE = in_memory(np.ones((1, 1), dtype=np.float32), BY_NAME["float32"])


@dataclass
class Edits:
    """What all adapters together do to the base's tensors, by the base's names.

    Attributes:
        tensors: the base's tensors, and those that adapters add.
        config: the base's `config.json`.
        whole: tensors that are replaced.
        changes: low-rank changes, added after replacing.
        warnings: what a user should know, one line each.
    """

    tensors: dict[str, LazyTensor]
    config: Mapping[str, Any]
    whole: dict[str, LazyTensor] = field(default_factory=dict)
    changes: dict[str, list[LowRank]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def touches(self, name: str | None) -> bool:
        """Whether the tensor will differ from the base's."""
        return name in self.whole or name in self.changes

    def current(self, name: str) -> LazyTensor:
        """The tensor that changes are added to."""
        return self.whole.get(name) or self.tensors[name]

    def place(self, adapter: Adapter, weight: float) -> None:
        """Adds one adapter, its update multiplied by `weight`.

        Raises:
            MalformedInput: a tensor that matches nothing, has another shape, or was replaced by another adapter.
            UnsupportedInput: the weight in the base is not a floating-point tensor.
        """
        new = {name for name in adapter.whole if name not in self.tensors and _is_saved_module(name, adapter)}
        wanted = {f"{module}.weight" for module in adapter.pairs} | adapter.whole.keys() - new
        wanted |= {f"{module}.bias" for module, pair in adapter.pairs.items() if pair.bias}
        homes = match_names(wanted, self.tensors.keys(), adapter.name)
        for name, tensor in adapter.whole.items():
            self._replace(adapter.name, homes.get(name, name), tensor)
        for module, pair in adapter.pairs.items():
            scale = weight * adapter.config.scale(module, pair.rank)
            self._change(adapter.name, homes[f"{module}.weight"], pair, scale)
            if pair.bias:
                self._change_bias(adapter.name, homes[f"{module}.bias"], pair.bias, scale)
        self._warn(adapter, weight)

    def _replace(self, adapter: str, name: str, tensor: LazyTensor) -> None:
        if name in self.whole:
            raise MalformedInput(
                f"`{adapter}` replaces `{name}`, which another adapter replaces too",
                hint="whole tensors cannot be summed; merge one adapter at a time and decide which one counts",
            )
        there = self.tensors.setdefault(name, tensor)
        rows_may_differ = name == HEAD or name.endswith(EMBEDDINGS)
        if there.shape != tensor.shape and not (rows_may_differ and there.shape[1:] == tensor.shape[1:]):
            raise _other_base(adapter, name, there.shape, tensor.shape)
        self.whole[name] = tensor

    def _change(self, adapter: str, name: str, pair: Pair, scale: float) -> None:
        weight = self.current(name)
        if weight.dtype.name not in ("float64", *FLOATS):
            raise UnsupportedInput(
                f"`{name}` of the base is stored as {weight.dtype.name}", hint="merge into the unquantized model"
            )
        own = (pair.b.shape[0], pair.a.shape[1])
        possible = {own[::-1]} if pair.embedding else {own, own[::-1]}
        if weight.shape not in possible:
            raise _other_base(adapter, name, weight.shape, own[::-1] if pair.embedding else own)
        transposed = pair.embedding or (self._is_conv1d(name) if own[0] == own[1] else weight.shape != own)
        self.changes.setdefault(name, []).append(LowRank(pair.a, pair.b, scale, transposed))

    def _is_conv1d(self, name: str) -> bool:
        """For square weights, whose shape does not tell; nor does `fan_in_fan_out`, which PEFT overrides."""
        return self.config.get("model_type") in CONV1D_TYPES and name.split(".")[-2] in CONV1D

    def _change_bias(self, adapter: str, name: str, bias: LazyTensor, scale: float) -> None:
        """`lora_bias`: the bias of B is one more product, of a column and a one."""
        if bias.shape != self.current(name).shape:
            raise _other_base(adapter, name, self.current(name).shape, bias.shape)
        column = LazyTensor(bias.dtype, (*bias.shape, 1), lambda start, stop: bias.rows(start, stop).reshape(-1, 1))
        self.changes.setdefault(name, []).append(LowRank(ONE, column, scale))

    def _warn(self, adapter: Adapter, weight: float) -> None:
        notes = list(adapter.config.warnings)
        has_bias = any(name.endswith(".bias") for name in adapter.whole)
        if adapter.config.bias != "none" and not has_bias and any(name.endswith(".bias") for name in self.tensors):
            notes.append(f"`bias` is {adapter.config.bias!r}, but the file holds no bias; PEFT up to 0.20 lost them")
        if adapter.whole and weight != 1:
            notes.append(f"the weight {weight:g} does not apply to the {len(adapter.whole)} tensors it replaces")
        self.warnings += [f"`{adapter.name}`: {note}" for note in notes]


def _is_saved_module(name: str, adapter: Adapter) -> bool:
    module = name.rpartition(".")[0]
    return any(module == saved or module.endswith(f".{saved}") for saved in adapter.config.modules_to_save)


def _other_base(adapter: str, name: str, base: tuple[int, ...], own: tuple[int, ...]) -> MalformedInput:
    return MalformedInput(
        f"`{adapter}` is for `{name}` of shape {list(own)}, in the base it has shape {list(base)}",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )
