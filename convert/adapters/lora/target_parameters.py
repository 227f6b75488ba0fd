"""`target_parameters` of PEFT: which tensor the factors of a wrapper are for, and the update of each expert.

Layout (PEFT `tuners/lora/layer.py`, `ParamWrapper`): a module is wrapped once for each adapted parameter, in the order
in which it declares them, so the factors of the first are the innermost: `experts.base_layer.lora_A.weight`, those of
the last `experts.lora_A.weight`. A is (E·r)×in with the rows of an expert together; B is out×(r·E) with the expert as
the fastest index (Unsloth: the columns of an expert together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llmconv.convert.adapters.lora.config import LoraConfig
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array, LazyTensor

WRAPPER = ".base_layer"
DECLARED = (
    *("gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "w1", "w3", "fc1", "input_linear", "weight"),
    *("down_proj", "down_proj_bias", "w2", "fc2", "output_linear", "bias"),
)
"""The order in which modules of transformers declare their parameters."""

ALWAYS_TRANSPOSED = ("gpt_oss", "openai_privacy_filter", "aria_text")
"""Model types whose experts are marked `is_transposed`: [E, in, out] to every version of PEFT."""

SWAPPED_SINCE = (0, 19)
"""PEFT reads unmarked [E, d1, d2] as [E, out, in] since this version (pull request 3083), before as [E, in, out]."""

MatrixShape = tuple[int, int]
"""Rows of B and columns of A."""


@dataclass(frozen=True)
class ExpertLayout:
    """How the factors of one fused tensor are divided among its experts.

    Attributes:
        experts: E, the number of experts.
        transposed: the tensor is [E, in, out].
        together: the columns of B of an expert lie together (Unsloth).
    """

    experts: int
    transposed: bool
    together: bool

    def changes(self, a: LazyTensor, b: LazyTensor, scale: float) -> list[LoraProduct]:
        """The update of each expert.

        Args:
            a: (E·r)×in.
            b: out×(r·E).
            scale: the factor of their product.
        """
        rank = a.shape[0] // self.experts
        return [
            LoraProduct(_rows(a, index * rank, rank), self._columns(b, index, rank), scale, self.transposed)
            for index in range(self.experts)
        ]

    def _columns(self, b: LazyTensor, index: int, rank: int) -> LazyTensor:
        mine = slice(index * rank, (index + 1) * rank) if self.together else slice(index, None, self.experts)
        return LazyTensor(b.dtype, (b.shape[0], rank), lambda start, stop: _whole(b)[start:stop, mine])


def _rows(tensor: LazyTensor, first: int, count: int) -> LazyTensor:
    shape = (count, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda start, stop: tensor.rows(first + start, first + stop))


@lru_cache(maxsize=4)
def _whole(tensor: LazyTensor) -> Array:
    """All of a B, of which every expert needs some columns; a few are cached, so that it is not read per expert."""
    return np.asarray(tensor.read())


def parameter_names(modules: Sequence[str], config: LoraConfig, names: Sequence[str]) -> dict[str, str]:
    """Module path of each wrapper of adapted parameters to the name of its tensor.

    Args:
        modules: paths of all modules with factors.
        config: its `parameters` lists the targets.
        names: the base's tensors, also under the names of other versions of transformers.

    Raises:
        UnsupportedInput: the order of the wrappers of a module is ambiguous.
    """
    wrapped: dict[str, list[str]] = {}
    for module in modules:
        wrapped.setdefault(module.replace(WRAPPER, ""), []).append(module)
    result: dict[str, str] = {}
    for module, levels in wrapped.items():
        own = _parameters(module, config.parameters, len(levels), names)
        if not own:
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
    found = {
        target.rpartition(".")[2] for target in targets if f".{module}".endswith(f".{_parent(target)}".rstrip("."))
    }
    if len(found) > count:
        found = {name for name in found if any(f".{item}".endswith(f".{module}.{name}") for item in names)}
    return sorted(found)


def _parent(target: str) -> str:
    return target.rpartition(".")[0]


def is_transposed(
    sizes: Mapping[str, tuple[MatrixShape, MatrixShape]], config: LoraConfig, model_type: str | None, adapter: str
) -> bool:
    """Whether an adapter treats the fused tensors as [E, in, out]: one answer for all of them.

    Args:
        sizes: by tensor name: (rows of B, columns of A), and the last two dimensions of the tensor.
        config: of the adapter, with the version of PEFT that wrote it.
        model_type: of the base.
        adapter: its name, for messages.

    Raises:
        MalformedInput: the adapter belongs to another base.
        UnsupportedInput: neither the shapes nor the version decide.
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
