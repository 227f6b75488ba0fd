"""AdapterTargets: the tensors of the base that one adapter's factors mean, and what they do to each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from llmconv.convert.adapters.adapter import Adapter, Pair
from llmconv.convert.adapters.lora.dora import DoraUpdate
from llmconv.convert.adapters.lora.experts import ExpertProduct, ExpertRows, ExpertTensors, parts, stacks
from llmconv.convert.adapters.lora.target_parameters import ExpertLayout, MatrixShape, is_transposed, parameter_names
from llmconv.convert.adapters.placement.tensor_names import match_names
from llmconv.convert.adapters.placement.weight_updates import WeightChange
from llmconv.convert.adapters.weighted_sum import LoraProduct
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Modules that transformers makes as Conv1D, whose weight is stored in×out, and the model types that have them."""

NamedChanges = Iterator[tuple[str, Sequence[WeightChange]]]
"""Names of the base's tensors, and what is done to each."""


class AdapterTargets:
    """Where the factors of one adapter belong."""

    def __init__(self, adapter: Adapter, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> None:
        """Of `adapter` in the base of these tensors, replaced ones included, and this `config.json`."""
        self.adapter, self.tensors, self.config = adapter, tensors, config
        wide = any(".experts." in f"{module}." for module in adapter.pairs)
        self.stacks: dict[str, ExpertTensors] = stacks(tensors) if wide else {}
        self.parts: dict[str, ExpertRows] = parts(tensors) if wide else {}
        self._homes: dict[str, str] = {}

    @cached_property
    def wanted(self) -> dict[str, str]:
        """The tensor that each module's factors change, by the name that the adapter's model has for it."""
        names = [*self.tensors, *self.stacks]
        modules = list(self.adapter.pairs)
        named = parameter_names(modules, self.adapter.config, names) if self.adapter.config.parameters else {}
        return {module: named.get(module, f"{module}.weight") for module in modules}

    def homes(self, others: Collection[str]) -> dict[str, str]:
        """The base's names for all that the adapter names.

        Args:
            others: names of its whole tensors.

        Raises:
            MalformedInput: a name that matches nothing.
            UnsupportedInput: a layer of packed projections, or a bias for a layer that has none.
        """
        modules = (*self.adapter.tokens, *self.adapter.learned)
        wanted = {*others, *self.wanted.values(), *(f"{module}.weight" for module in modules)}
        for name in wanted - self.tensors.keys():
            if f"{name.removesuffix('.weight')}.in_proj_weight" in self.tensors:
                raise UnsupportedInput(
                    f"`{self.adapter.name}` adapts `{name.removesuffix('.weight')}`, a `nn.MultiheadAttention`",
                    hint="PEFT adds the change of its `out_proj` twice; merge it with PEFT's `merge_and_unload`",
                )
        known = {**self.tensors, **self.stacks, **self.parts}
        self._homes = match_names(wanted, known.keys(), self.adapter.name)
        return self._homes | {
            f"{module}.bias": self._bias(module) for module, own in self.adapter.pairs.items() if own.bias
        }

    def _bias(self, module: str) -> str:
        """Where the trained bias of B is added; PEFT merges none that has no place, either."""
        weight = self._homes[self.wanted[module]]
        name = f"{weight.removesuffix('.weight')}.bias"
        if name not in self.tensors:
            raise UnsupportedInput(
                f"`{self.adapter.name}` has a bias for `{module}` (`lora_bias`), whose layer in the base has none",
                hint="no weight can hold it; serve the adapter with PEFT, or train it without `lora_bias`",
            )
        return name

    def changes(self, module: str, pair: Pair, weight: float) -> NamedChanges:
        """What a module's factors do, once `homes` is known.

        Raises:
            MalformedInput: shapes that do not fit.
            UnsupportedInput: a layer whose layout is not known.
        """
        name = self._homes[self.wanted[module]]
        if name in self.parts:
            yield from self._change_part(module, pair, weight, self.parts[name])
        elif self._is_fused(name, pair):
            yield from self._change_experts(module, pair, weight, name)
        else:
            yield name, self._change(module, pair, weight, name)

    def _is_fused(self, name: str, pair: Pair) -> bool:
        return name in self.stacks or (len(self.tensors[name].shape) == 3 and not pair.kernel)

    def _scale(self, module: str, rank: int) -> float:
        wanted = self.wanted[module]
        return self.adapter.config.scale(module if wanted == f"{module}.weight" else wanted, rank)

    def _factors(self, module: str, pair: Pair, weight: float, transposed: bool) -> list[LoraProduct]:
        """The trained product, and the initial one to be subtracted where there is one."""
        result = [LoraProduct(pair.a, pair.b, weight * self._scale(module, pair.rank), transposed)]
        if self.adapter.initial:
            before = self.adapter.initial.pairs[module]
            scale = self.adapter.initial.config.scale(module, before.rank)
            result.append(LoraProduct(before.a, before.b, -weight * scale, transposed))
        return result

    def _change(self, module: str, pair: Pair, weight: float, name: str) -> Sequence[WeightChange]:
        transposed = self._is_transposed(module, pair, name)
        if not pair.magnitude:
            return self._factors(module, pair, weight, transposed)
        outputs = self.tensors[name].shape[1 if transposed else 0]
        if pair.magnitude.shape not in {(outputs,), (1, outputs, *(1,) * len(pair.kernel))}:
            raise other_base(self.adapter.name, f"{module}.lora_magnitude_vector", (outputs,), pair.magnitude.shape)
        return [DoraUpdate(self._factors(module, pair, 1.0, transposed), pair.magnitude, weight)]

    def _is_transposed(self, module: str, pair: Pair, name: str) -> bool:
        """Whether the weight is stored in×out; raises where it has another shape."""
        weight, own = self.tensors[name], (pair.b.shape[0], pair.a.shape[1])
        if pair.kernel:
            inputs = own[1] // prod(pair.kernel)
            if weight.shape != (own[0], inputs, *pair.kernel):
                raise other_base(self.adapter.name, name, weight.shape, (own[0], inputs, *pair.kernel))
            return False
        possible = {own[::-1]} if pair.embedding else {own, own[::-1]}
        if weight.shape not in possible:
            raise other_base(self.adapter.name, name, weight.shape, own[::-1] if pair.embedding else own)
        parameter = self.wanted[module] != f"{module}.weight"
        return pair.embedding or (self.is_conv1d(name) and not parameter if own[0] == own[1] else weight.shape != own)

    def is_conv1d(self, name: str) -> bool:
        """For square weights, whose shape does not tell; nor does `fan_in_fan_out`, which PEFT overrides."""
        return self.config.get("model_type") in CONV1D_TYPES and name.split(".")[-2] in CONV1D

    def _change_part(self, module: str, pair: Pair, weight: float, part: ExpertRows) -> NamedChanges:
        """One expert's pair, where the base has all experts in one tensor [E, out, in]."""
        there, own = (part.count, self.tensors[part.tensor].shape[2]), (pair.b.shape[0], pair.a.shape[1])
        if there != own or pair.magnitude:
            raise other_base(self.adapter.name, self.wanted[module], there, own)
        factors = self._factors(module, pair, weight, transposed=False)
        yield part.tensor, [ExpertProduct(part.expert, part.first, part.count, change) for change in factors]

    def _change_experts(self, module: str, pair: Pair, weight: float, name: str) -> NamedChanges:
        """The pairs of all experts, where the base has one tensor or one for each."""
        experts, _ = self._sizes(name)
        if pair.rank % experts:
            raise MalformedInput(
                f"the adapter has {pair.rank} rows of A for the {experts} experts of `{name}`",
                hint="the adapter was trained on another model; see its `base_model_name_or_path`",
            )
        scale = weight * self._scale(module, pair.rank // experts)
        layout = ExpertLayout(experts, self._experts_transposed, self.adapter.config.fused_by_unsloth)
        for index, change in enumerate(layout.changes(pair.a, pair.b, scale)):
            if name in self.tensors:
                yield name, [ExpertProduct(index, 0, self.tensors[name].shape[1], change)]
                continue
            first = 0
            for tensor in self.stacks[name][index]:
                count = self.tensors[tensor].shape[0]
                yield tensor, [_rows(change, first, count)]
                first += count

    @cached_property
    def _experts_transposed(self) -> bool:
        sizes: dict[str, tuple[MatrixShape, MatrixShape]] = {}
        for module, pair in self.adapter.pairs.items():
            name = self._homes[self.wanted[module]]
            if name not in self.parts and self._is_fused(name, pair):
                sizes[name] = (pair.b.shape[0], pair.a.shape[1]), self._sizes(name)[1]
        return is_transposed(sizes, self.adapter.config, self.config.get("model_type"), self.adapter.name)

    def _sizes(self, name: str) -> tuple[int, MatrixShape]:
        """How many experts there are, and the sizes of the matrix of each."""
        if name in self.tensors:
            experts, rows, columns = self.tensors[name].shape
            return experts, (rows, columns)
        stack = self.stacks[name]
        shapes = {tuple(self.tensors[tensor].shape for tensor in tensors) for tensors in stack}
        widths = {shape[-1] for group in shapes for shape in group}
        if len(shapes) != 1 or len(widths) != 1 or any(len(shape) != 2 for group in shapes for shape in group):
            raise UnsupportedInput(
                f"the experts of `{name}` have different shapes in the base", hint="merge it with PEFT"
            )
        return len(stack), (sum(shape[0] for shape in next(iter(shapes))), widths.pop())


def _rows(change: LoraProduct, first: int, count: int) -> LoraProduct:
    """Some rows of a change."""
    if change.transposed:
        a = change.a
        columns = slice(first, first + count)
        part = LazyTensor(a.dtype, (a.shape[0], count), lambda start, stop: a.rows(start, stop)[:, columns])
        return replace(change, a=part)
    b = change.b
    part = LazyTensor(b.dtype, (count, b.shape[1]), lambda start, stop: b.rows(first + start, first + stop))
    return replace(change, b=part)


def other_base(adapter: str, name: str, base: tuple[int, ...], own: tuple[int, ...]) -> MalformedInput:
    """The error for an adapter whose shapes are not those of the base."""
    return MalformedInput(
        f"`{adapter}` is for `{name}` of shape {list(own)}, in the base it has shape {list(base)}",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )
