"""The tensors of the base that the factors of one adapter belong to, and the update of each.

`target_parameters` of PEFT (`tuners/lora/layer.py`, `ParamWrapper`): a module is wrapped once for each adapted
parameter, in the order in which it declares them, so the factors of the first are the innermost:
`experts.base_layer.lora_A.weight`, those of the last `experts.lora_A.weight`. A is (E·r)×in with the rows of an expert
contiguous; B is out×(r·E) with the expert as the fastest index (Unsloth: the columns of an expert contiguous).

Expert weights in either layout: one fused tensor for all experts, or separate tensors per expert.

transformers 5 fuses the tensors that older versions keep separate (`conversion_mapping.py`, "mixtral" and "qwen2_moe"):
gate and up of all experts become `experts.gate_up_proj` [E, 2·I, H], down becomes `experts.down_proj` [E, H, I]. Files
mostly keep `experts.3.gate_proj.weight` or `experts.3.w1.weight`. Adapter and base may have different layouts, so a
missing name may be a part of a fused tensor, or several separate ones. Unsloth divides gpt-oss's experts into lists of
layers, `experts.gate_up_projs.3` and `experts.down_projs.3`, whose rows stay in the order of the fused tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np

from llmconv.checkpoint import is_conv1d
from llmconv.convert.adapters.adapter import Adapter, Pair, grouped_convolution
from llmconv.convert.adapters.lora_config import LoraConfig
from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products, add_products_to_rows, round_into
from llmconv.convert.adapters.tensor_names import AS_STORED, Naming, match_names
from llmconv.convert.algebra import slice_columns, slice_rows
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array, DType, LazyTensor, lists_by_key

PARTS = {  # name of a fused tensor to the separate tensors that it stacks by rows, under each naming convention
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}

ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<part>\w+)\.weight")
FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertProduct:
    """The product added to `count` rows, from row `first`, of one expert (index in dim 0) of a fused tensor."""

    expert: int
    first: int
    count: int
    change: LoraProduct


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a fused tensor that hold the matrix of one expert (dim 0), possibly stored in×out (`either`)."""

    tensor: str
    expert: int
    first: int
    count: int
    either: bool = False


ExpertTensors = tuple[tuple[str, ...], ...]
"""The separate tensors of each expert that make up a fused tensor, in the order in which it stacks them."""


def fused_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertTensors]:
    """Names of the fused tensors that a file with separate experts lacks, to their separate tensors."""
    found: dict[str, dict[str, set[int]]] = {}
    for name in tensors:
        if match := ONE.fullmatch(name):
            found.setdefault(match["experts"], {}).setdefault(match["part"], set()).add(int(match["index"]))
    result: dict[str, ExpertTensors] = {}
    for experts, parts in found.items():
        for fused, conventions in PARTS.items():
            for convention in conventions:
                indices = parts.get(convention[0], set())
                complete = indices and all(parts.get(part) == indices for part in convention)
                if complete and indices == set(range(len(indices))):
                    result[f"{experts}.{fused}"] = tuple(
                        tuple(f"{experts}.{index}.{part}.weight" for part in convention) for index in sorted(indices)
                    )
    return {name: stack for name, stack in result.items() if name not in tensors}


def separate_tensors(tensors: Mapping[str, LazyTensor]) -> dict[str, ExpertRows]:
    """Names of the separate tensors that a file with fused experts lacks, to their location."""
    result: dict[str, ExpertRows] = {}
    for name, tensor in tensors.items():
        if not (match := FUSED.fullmatch(name)) or len(tensor.shape) != 3:
            continue
        for convention in PARTS[match["name"]]:
            count = tensor.shape[1] // len(convention)
            for index in range(tensor.shape[0]):
                for at, part in enumerate(convention):
                    result[f"{match['experts']}.{index}.{part}.weight"] = ExpertRows(name, index, at * count, count)
        for index in range(tensor.shape[0]):
            listed = f"{match['experts']}.{match['name']}s.{index}.weight"
            result[listed] = ExpertRows(name, index, 0, tensor.shape[1], either=True)
    return {name: part for name, part in result.items() if name not in tensors}


def add_to_experts(base: LazyTensor, products: Sequence[ExpertProduct], dtype: DType) -> LazyTensor:
    """A fused tensor [E, rows, columns] plus the summed updates of its experts, rounded once; see `add_products`."""
    by_expert = lists_by_key((product.expert, product) for product in products)

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        for expert in range(start, stop):
            _add_to_expert(result[expert - start], rows[expert - start], by_expert.get(expert, []), dtype)
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: add_to_experts(base, products, other))


def _add_to_expert(result: Array, rows: Array, products: Sequence[ExpertProduct], dtype: DType) -> None:
    """Adds the products of one expert; all rows between two edges are updated by the same products."""
    edges = sorted({0, len(rows), *(edge for each in products for edge in (each.first, each.first + each.count))})
    for start, stop in zip(edges, edges[1:], strict=False):
        here = [each for each in products if each.first <= start and stop <= each.first + each.count]
        if pairs := [product.change.factors(start - product.first, stop - product.first) for product in here]:
            result[start:stop] = add_products_to_rows(rows[start:stop], pairs, dtype)
        else:
            round_into(result[start:stop], rows[start:stop].astype(np.float64))


class WeightUpdate(Protocol):
    """The update of one weight by one adapter: new value minus old value."""

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        """Rows `start:stop` of the update of `base`, float64 [rows, columns]; its other dimensions count as columns."""
        ...


WeightChange = LoraProduct | ExpertProduct | WeightUpdate  # an update of a tensor; the first two kinds have faster sums


def add_changes(base: LazyTensor, changes: Sequence[WeightChange], dtype: DType) -> LazyTensor:
    """`base` plus the sum of `changes`, each relative to the original base, rounded once (nearest even) to `dtype`."""
    slabs = [change for change in changes if isinstance(change, ExpertProduct)]
    low_rank = [change for change in changes if isinstance(change, LoraProduct)]
    if slabs:
        return add_to_experts(base, slabs, dtype)
    if len(low_rank) == len(changes):
        return add_products(base, low_rank, dtype)
    return _add_updates(base, [change for change in changes if not isinstance(change, ExpertProduct)], dtype)


def _add_updates(base: LazyTensor, updates: Sequence[WeightUpdate], dtype: DType) -> LazyTensor:
    """The sum in float64, for updates other than a product of two factors."""

    def load(start: int, stop: int) -> Array:
        rows = base.rows(start, stop)
        total = rows.astype(np.float64).reshape(len(rows), -1)
        for update in updates:
            total += update.update(base, start, stop)
        result = np.empty(rows.shape, dtype.numpy)
        round_into(result, total.reshape(rows.shape))
        return result

    return LazyTensor(dtype, base.shape, load, lambda other: _add_updates(base, updates, other))


NamedChanges = Iterator[tuple[str, Sequence[WeightChange]]]  # names of the base's tensors, and their updates


class AdapterTargets:
    """Maps the factors of one adapter to tensors of the base."""

    def __init__(
        self, adapter: Adapter, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], naming: Naming = AS_STORED
    ) -> None:
        """Prepares the mapping to `tensors`, the base's, including replaced ones, called as in `naming`."""
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
        """All names that the adapter has for tensors of its model; `others` are its whole tensors."""
        modules = (*self.adapter.tokens, *self.adapter.learned)
        return {*others, *self.wanted.values(), *(f"{module}.weight" for module in modules)}

    def homes(self, others: Collection[str]) -> dict[str, str]:
        """Names in the adapter's model to names of the base's tensors; `others` are the adapter's whole tensors.

        Raises MalformedInput for a name without a match, UnsupportedInput for a layer of packed projections, or a bias
        for a layer without one.
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
        name = f"{self._homes[self.wanted[module]].removesuffix('.weight')}.bias"
        if name not in self.tensors:
            raise UnsupportedInput(
                f"`{self.adapter.name}` has a bias for `{module}` (`lora_bias`), whose layer in the base has none",
                hint="no weight can hold it; serve the adapter with PEFT, or train it without `lora_bias`",
            )
        return name

    def changes(self, module: str, pair: Pair, weight: float) -> NamedChanges:
        """A module's updates times `weight`, after `homes`; MalformedInput: a shape, UnsupportedInput: a layout."""
        name = self._homes[self.wanted[module]]
        if name in self.parts:
            yield from self._change_part(module, pair, weight, self.parts[name])
        elif self._is_fused(name, pair):
            # the pairs of all experts, for a base with one fused tensor or separate ones
            experts, _ = self._sizes(name)
            if pair.rank % experts:
                raise MalformedInput(
                    f"the adapter has {pair.rank} rows of A for the {experts} experts of `{name}`",
                    hint="the adapter was trained on another model; see its `base_model_name_or_path`",
                )
            rank, layouts = pair.rank // experts, self.adapter.config.fused_by_unsloth
            together = layouts.get(self.wanted[module].rpartition(".")[2], layouts.get("", False))
            scale = weight * self._scale(module, rank)
            for index in range(experts):
                own = slice(index * rank, (index + 1) * rank)
                b = _columns(pair.b, rank, own if together else slice(index, None, experts))
                change = LoraProduct(slice_rows(pair.a, own.start, own.stop), b, scale, self._experts_transposed)
                if name in self.tensors:
                    yield name, [ExpertProduct(index, 0, self.tensors[name].shape[1], change)]
                    continue
                first = 0
                for tensor in self.stacks[name][index]:
                    last = first + self.tensors[tensor].shape[0]
                    if change.transposed:
                        yield tensor, [replace(change, a=slice_columns(change.a, first, last))]
                    else:
                        yield tensor, [replace(change, b=slice_rows(b, first, last))]
                    first = last
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
            if weight.shape[0] == own[0] and weight.shape[1] in range(1, inputs) and weight.shape[2:] == pair.kernel:
                raise grouped_convolution(module, (pair.rank, inputs, *pair.kernel), pair.b.shape)
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


def other_base(adapter: str, name: str, base: tuple[int, ...], own: tuple[int, ...]) -> MalformedInput:
    """The error for a tensor whose shape is `base` in the base and `own` in the adapter."""
    return MalformedInput(
        f"shape mismatch for `{name}`: `{adapter}` expected {list(own)}, got {list(base)} in the base",
        hint="the adapter was trained on another model; see its `base_model_name_or_path`",
    )


WRAPPER = ".base_layer"
DECLARED = (  # the order in which modules of transformers declare their parameters
    *("gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "w1", "w3", "fc1", "input_linear", "weight"),
    *("down_proj", "down_proj_bias", "w2", "fc2", "output_linear", "bias"),
)

# Model types whose experts are marked `is_transposed`: [E, in, out] to every version of PEFT
ALWAYS_TRANSPOSED = ("gpt_oss", "openai_privacy_filter", "aria_text")
# PEFT reads unmarked [E, d1, d2] as [E, out, in] since this version (pull request 3083), before as [E, in, out]
SWAPPED_SINCE = (0, 19)
MatrixShape = tuple[int, int]  # rows of B and columns of A


def _columns(b: LazyTensor, rank: int, columns: slice) -> LazyTensor:
    return LazyTensor(b.dtype, (b.shape[0], rank), lambda start, stop: _whole(b)[start:stop, columns])


@lru_cache(maxsize=4)
def _whole(tensor: LazyTensor) -> Array:
    """All of a B, of which every expert needs some columns; a few are cached, so that it is not read per expert."""
    return np.asarray(tensor.read())


def parameter_names(modules: Sequence[str], config: LoraConfig, names: Sequence[str]) -> dict[str, str]:
    """Wrapper of adapted parameters to its tensor among `names`; UnsupportedInput if the order is ambiguous."""
    wrapped = lists_by_key((module.replace(WRAPPER, ""), module) for module in modules)
    result: dict[str, str] = {}
    for module, levels in wrapped.items():
        if not (own := _parameters(module, config.parameters, len(levels), names)):
            continue
        if len(own) != len(levels) or (len(own) > 1 and not set(own) <= set(DECLARED)):
            raise UnsupportedInput(
                f"`{module}` has {len(levels)} pairs of factors for the parameters {', '.join(own)}",
                hint="their order is not known; merge it with PEFT's `merge_and_unload` and `save_pretrained`",
            )
        inner_first = sorted(levels, key=lambda level: -level.count(WRAPPER))
        ordered = sorted(own, key=DECLARED.index) if len(own) > 1 else own
        result |= {level: f"{module}.{name}" for level, name in zip(inner_first, ordered, strict=True)}
    return result


def _parameters(module: str, targets: Sequence[str], count: int, names: Sequence[str]) -> list[str]:
    """Names of the adapted parameters of the module; of more targets than wrappers, those that the base has."""
    pairs = [target.rpartition(".")[::2] for target in targets]
    found = {name for home, name in pairs if f".{module}".endswith(f".{home}".rstrip("."))}
    if len(found) > count:
        found = {name for name in found if any(f".{item}".endswith(f".{module}.{name}") for item in names)}
    return sorted(found)


def is_transposed(
    sizes: Mapping[str, tuple[MatrixShape, MatrixShape]], config: LoraConfig, model_type: str | None, adapter: str
) -> bool:
    """Whether an adapter treats the fused tensors as [E, in, out]: one answer for all of them.

    `sizes` has by tensor name: (rows of B, columns of A), and the last two dimensions of the tensor. If shapes do not
    decide, the model type and the version of PEFT in `config` do (else UnsupportedInput). Raises MalformedInput for an
    adapter of another base.
    """
    answers = set()
    for name, (own, there) in sizes.items():
        if there not in (own, own[::-1]):
            raise MalformedInput(
                f"`{adapter}` is for `{name}` of shape {list(own)} per expert, in the base it has {list(there)}",
                hint="the adapter was trained on another model; see its `base_model_name_or_path`",
            )
        if own[0] != own[1]:
            answers.add(there != own)
    if len(answers) == 1:
        return answers.pop()
    if answers:
        raise MalformedInput(
            f"`{adapter}` takes some fused experts as [E, in, out] and some as [E, out, in]",
            hint="the adapter was trained on another model; see its `base_model_name_or_path`",
        )
    if model_type in ALWAYS_TRANSPOSED:
        return True
    if config.peft_version is None or config.parameters == ():
        raise UnsupportedInput(
            f"`{adapter}` adapts square experts and does not say whether as [E, in, out] or [E, out, in]",
            hint="set `peft_version` in `adapter_config.json` to the version it was trained with; it changed in 0.19",
        )
    return config.peft_version < SWAPPED_SINCE


@dataclass(frozen=True)
class DoraUpdate:
    """The update of one weight: m/‖V‖·V − W with V = W + s·B·A (PEFT `tuners/lora/dora.py`, `variants.py`).

    ‖V‖ is the L2 norm of the weights of each output: of a row, or of a column if the weight is stored in×out.
    """

    changes: Sequence[LoraProduct]  # products with the sum s·B·A, not multiplied by the adapter's weight
    magnitude: LazyTensor  # m, one number per output
    weight: float  # the adapter's weight, by which the update is multiplied
    columns: list[Array] = field(default_factory=list, compare=False)  # cache of m/‖V‖ for weights stored in×out

    def update(self, base: LazyTensor, start: int, stop: int) -> Array:
        old = _matrix_rows(base, start, stop)
        new = self._adapted(base, old, start, stop)
        if self.changes[0].transposed:
            new *= self._column_factors(base)
        else:
            new *= _scales(self._magnitudes[start:stop], np.square(new).sum(axis=1))[:, None]
        return self.weight * (new - old)

    def _adapted(self, base: LazyTensor, old: Array, start: int, stop: int) -> Array:
        new = old.copy()
        for change in self.changes:
            new += change.update(base, start, stop)
        return new

    @cached_property
    def _magnitudes(self) -> Array:
        return self.magnitude.read().astype(np.float64).reshape(-1)

    def _column_factors(self, base: LazyTensor) -> Array:
        """m/‖V‖ of each column: one pass over the whole weight, block by block."""
        if not self.columns:
            squares = np.zeros(base.shape[1])
            for start, stop in base.blocks():
                squares += np.square(self._adapted(base, _matrix_rows(base, start, stop), start, stop)).sum(axis=0)
            self.columns.append(_scales(self._magnitudes, squares))
        return self.columns[0]


def _matrix_rows(tensor: LazyTensor, start: int, stop: int) -> Array:
    return tensor.rows(start, stop).reshape(stop - start, -1).astype(np.float64)


def _scales(magnitudes: Array, squares: Array) -> Array:
    """m/‖V‖; 0 for outputs with zero weights."""
    norms = np.sqrt(squares)
    return np.divide(magnitudes, norms, out=np.zeros_like(norms), where=norms > 0)
