"""What PEFT's tuners other than LoRA consist of: a module's tensors, the fields of the config, draws of a seed.

Some adapters store only a seed: torch's CPU generator is the Mersenne Twister, seeded like numpy's `RandomState`
(`aten/src/ATen/core/MT19937RNGEngine.h`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from llmconv.convert.adapters.lora_config import AdapterFields
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import Array, LazyTensor

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
        alpha = self.settings.of_module("alpha_pattern", self.module, self.settings.positive("alpha", alpha_default))
        return alpha / self.rank()

    def rank(self, default: float = 8) -> int:
        """r of the config by the module's path; MalformedInput unless a number above 0."""
        return int(self.settings.of_module("rank_pattern", self.module, self.settings.positive("r", default)))


LONG = (2**32 - 1) // 20
"""Size from which torch draws permutations in another way (`aten/src/ATen/native/TensorFactories.cpp`)."""


class TorchRandom:
    """The 32-bit numbers of torch's generator after `manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed & 0xFFFFFFFF)

    def take(self, count: int) -> Array:
        """The next `count` numbers, uint32."""
        return np.frombuffer(self._state.bytes(4 * count), "<u4")

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Array:
        """A float32 array with the values of `tensor.uniform_(low, high)` (`at::uniform_real_distribution`)."""
        fractions = (self.take(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        start, width = np.float32(low), np.float32(high) - np.float32(low)
        return (fractions * float(width) + float(start)).astype(np.float32).reshape(shape)


def first_of_permutation(size: int, count: int, seed: int) -> Array:
    """The first `count` of `torch.randperm(size)` by this seed, int64; UnsupportedInput if `size` is `LONG` or more."""
    if size >= LONG:
        raise UnsupportedInput(
            f"unsupported: a seeded permutation of {size:,} elements",
            hint="merge it with PEFT's `merge_and_unload`",
        )
    draws = TorchRandom(seed).take(count) % (size - np.arange(count, dtype=np.int64))
    moved: dict[int, int] = {}
    result = np.empty(count, np.int64)
    for step, draw in enumerate(draws.tolist()):
        result[step] = moved.get(step + draw, step + draw)
        moved[step + draw] = moved.pop(step, step)
    return result


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
