"""AdapterTargets: the tensors of the base that the factors of one adapter belong to, and the update of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from llmconv.conv1d import is_conv1d
from llmconv.convert.adapters.adapter import Adapter, Pair
from llmconv.convert.adapters.lora.dora import DoraUpdate
from llmconv.convert.adapters.lora.experts import (
    ExpertProduct,
    ExpertRows,
    ExpertTensors,
    fused_tensors,
    separate_tensors,
)
from llmconv.convert.adapters.lora.target_parameters import (
    ALWAYS_TRANSPOSED,
    ExpertLayout,
    MatrixShape,
    is_transposed,
    parameter_names,
)
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.placement.naming import AS_STORED, Naming
from llmconv.convert.adapters.placement.tensor_names import match_names
from llmconv.convert.adapters.placement.weight_updates import WeightChange
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

NamedChanges = Iterator[tuple[str, Sequence[WeightChange]]]
"""Names of the base's tensors, and their updates."""


class AdapterTargets:
    """Maps the factors of one adapter to tensors of the base."""

    def __init__(
        self,
        adapter: Adapter,
        tensors: Mapping[str, LazyTensor],
        config: Mapping[str, Any],
        naming: Naming = AS_STORED,
    ) -> None:
        """Prepares the mapping.

        Args:
            adapter: the adapter.
            tensors: those of the base, replaced ones included.
            config: the base's `config.json`.
            naming: how the base's tensors are called.
        """
        self._naming = naming
        self.adapter, self.tensors, self.config = adapter, tensors, config
        wide = any(".experts." in f"{module}." for module in adapter.pairs)
        self.stacks: dict[str, ExpertTensors] = fused_tensors(tensors) | {**naming.stacks} if wide else {}
        self.parts: dict[str, ExpertRows] = separate_tensors(tensors) if wide else {}
        self._homes: dict[str, str] = {}

    @cached_property
    def wanted(self) -> dict[str, str]:
        """Module path to the name of its adapted tensor in the adapter's model."""
        names = [*self.tensors, *self.stacks]
        modules = list(self.adapter.pairs)
        named = parameter_names(modules, self.adapter.config, names) if self.adapter.config.parameters else {}
        return {module: named.get(module, f"{module}.weight") for module in modules}

    @property
    def known(self) -> Collection[str]:
        """Names that factors may be for: of tensors, of stacks that the base has in parts, and of parts of stacks."""
        return {**self.tensors, **self.stacks, **self.parts}.keys()

    def names(self, others: Collection[str]) -> set[str]:
        """All names that the adapter has for tensors of its model.

        Args:
            others: names of the adapter's whole tensors.
        """
        modules = (*self.adapter.tokens, *self.adapter.learned)
        return {*others, *self.wanted.values(), *(f"{module}.weight" for module in modules)}

    def homes(self, others: Collection[str]) -> dict[str, str]:
        """Names in the adapter's model to names of the base's tensors.

        Args:
            others: names of the adapter's whole tensors.

        Raises:
            MalformedInput: a name without a match.
            UnsupportedInput: a layer of packed projections, or a bias for a layer without one.
        """
        wanted = self.names(others)
        for name in wanted - self.tensors.keys():
            if f"{name.removesuffix('.weight')}.in_proj_weight" in self.tensors:
                raise UnsupportedInput(
                    f"`{self.adapter.name}` adapts `{name.removesuffix('.weight')}`, a `nn.MultiheadAttention`",
                    hint="PEFT adds the change of its `out_proj` twice; merge it with PEFT's `merge_and_unload`",
                )
        self._homes = match_names(wanted, self.known, self.adapter.name, self._naming.spelled)
        return self._homes | {
            f"{module}.bias": self._bias(module) for module, own in self.adapter.pairs.items() if own.bias
        }

    def _bias(self, module: str) -> str:
        """The bias that the trained bias of B is added to; PEFT refuses layers without a bias, too."""
        weight = self._homes[self.wanted[module]]
        name = f"{weight.removesuffix('.weight')}.bias"
        if name not in self.tensors:
            raise UnsupportedInput(
                f"`{self.adapter.name}` has a bias for `{module}` (`lora_bias`), whose layer in the base has none",
                hint="no weight can hold it; serve the adapter with PEFT, or train it without `lora_bias`",
            )
        return name

    def changes(self, module: str, pair: Pair, weight: float) -> NamedChanges:
        """The updates of a module's factors; call `homes` first.

        Args:
            module: path of the module in the adapter's model.
            pair: its factors.
            weight: the adapter's weight, by which the updates are multiplied.

        Raises:
            MalformedInput: a shape mismatch.
            UnsupportedInput: a layer with an unknown layout.
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
        """The trained product, and the negative initial one if there is an initial adapter."""
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
        """Whether the weight is stored in×out; refuses a shape mismatch."""
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
        """Whether a square weight is stored in×out; `fan_in_fan_out` is unreliable, since PEFT overrides it."""
        return is_conv1d(self.config, name)

    def _change_part(self, module: str, pair: Pair, weight: float, part: ExpertRows) -> NamedChanges:
        """The pair of one expert for a base with all experts in one tensor [E, out, in]."""
        there, own = (part.count, self.tensors[part.tensor].shape[2]), (pair.b.shape[0], pair.a.shape[1])
        square = part.either and own[0] == own[1] and self.config.get("model_type") in ALWAYS_TRANSPOSED
        transposed = there == own and square or (part.either and there != own and there == own[::-1])
        if (there != own and not transposed) or pair.magnitude:
            raise other_base(self.adapter.name, self.wanted[module], there, own)
        factors = self._factors(module, pair, weight, transposed=transposed)
        yield part.tensor, [ExpertProduct(part.expert, part.first, part.count, change) for change in factors]

    def _change_experts(self, module: str, pair: Pair, weight: float, name: str) -> NamedChanges:
        """The pairs of all experts, for a base with one fused tensor or separate ones."""
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
        """The number of experts, and the shape of the matrix of each."""
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
    """Rows `first:first + count` of a product."""
    if change.transposed:
        a = change.a
        columns = slice(first, first + count)
        part = LazyTensor(a.dtype, (a.shape[0], count), lambda start, stop: a.rows(start, stop)[:, columns])
        return replace(change, a=part)
    b = change.b
    part = LazyTensor(b.dtype, (count, b.shape[1]), lambda start, stop: b.rows(first + start, first + stop))
    return replace(change, b=part)


def other_base(adapter: str, name: str, base: tuple[int, ...], own: tuple[int, ...]) -> MalformedInput:
    """The error for a shape mismatch between an adapter and the base.

    Args:
        adapter: the adapter's name.
        name: the tensor's name in the base.
        base: shape in the base.
        own: shape that the adapter is for.
    """
    return MalformedInput(
        f"shape mismatch for `{name}`: `{adapter}` expected {list(own)}, got {list(base)} in the base",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )
