"""ConfigNumbers: the numbers in `config.json` that a model decides by: windows, chunks, contexts, padding ids.

The scenarios cross all of them; decisions by other numbers may be out of the scenarios' reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np

from llmconv.tensors import BY_NAME
from llmconv.verify.audit.decisions.affine_forms import BATCH, TOKEN, AffineForm

LENGTHS = re.compile(
    r"window|chunk|context|max_pos|max_seq|original_max|n_positions|n_ctx|seq_len|block_size|floor_scale|conv|max_length"
)
"""Config fields whose numbers may be compared with lengths and positions."""

TOKENS = re.compile(r"vocab|(pad|image|audio|video|vision|boi|eoi|boa|eoa|mask)\w*token|(pad|image|audio|video)\w*_id")
"""Config fields whose numbers may be compared with token ids."""

POOLING = re.compile(r"pooling_kernel_size")
"""Config field; its square divides numbers of patches (transformers modeling_gemma4.py)."""

JITTER = re.compile(r"router_jitter")
"""Config field; twice its value is a threshold for scores of experts (transformers modeling_phimoe.py)."""
TWICE = 2
"""A length may be added twice (in transformers modeling_mpt.py), which every scenario reaches."""

SIZES = re.compile(r"theta|vocab|position|token|hidden_size|intermediate_size|initializer")
"""Config fields whose numbers never limit a value of the model."""

LIBRARY = frozenset({0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0})
"""Bounds of torch's activations: hard sigmoid, ReLU6, and the threshold of softplus (20)."""

CLOSE = 1e-6
"""Relative tolerance: numbers of a config are float64, those of a graph float32."""

HUGE = 1e9
"""Factors of this size can make small numbers overflow."""

SMALLEST, LARGEST = 1e-4, 3e38
"""Smaller numbers guard against division by zero, larger ones are the end of float32."""


@dataclass(frozen=True)
class ConfigNumbers:
    """The numbers that values may be compared with.

    Attributes:
        lengths: for lengths, positions and counts of a mask.
        tokens: for token ids.
        data: absolute values, for values that the model computes.
    """

    lengths: frozenset[float]
    tokens: frozenset[float]
    data: frozenset[float]

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: Iterable[int] = (), half: str = "") -> ConfigNumbers:
        """The numbers of a config and of a graph's fixed axes.

        Args:
            config: content of `config.json`.
            sizes: lengths that are fixed in the graph.
            half: dtype to which the graph rounds numbers, `float16` or `bfloat16`; empty for none.
        """
        found = list(_numbers("", config))
        lengths = {number for name, number in found if LENGTHS.search(name)} | {float(size) for size in sizes}
        lengths |= {length * (1 - 1 / factor) for length in lengths for factor in _dynamic_factors(config)}
        lengths |= {float(number**power) for name, number in found if POOLING.search(name) for power in (1, 2)}
        tokens = {number for name, number in found if TOKENS.search(name)}
        data = {abs(number) for name, number in found if not SIZES.search(name)}
        data |= {2 * number for name, number in found if JITTER.search(name)}
        if half:
            data |= {rounded(number, half) for number in data if abs(number) <= LARGEST}
        return cls(_with_neighbors(lengths), _with_neighbors(tokens), LIBRARY | data)

    def explain(self, form: AffineForm) -> bool:
        """Whether a decision on a form uses only numbers of the model."""
        if any(not 1 / HUGE < abs(factor) < HUGE for factor in form.terms.values()):
            return False
        factors = (factor for factor in form.factors if abs(factor) != TWICE)
        return all(self.knows(number, form) for number in (form.offset, *factors))

    def explain_rounding(self, form: AffineForm) -> bool:
        """The same for a form that is rounded to whole numbers, whose unit matters as well."""
        steps = [abs(factor) for factor in form.terms.values()]
        return self.explain(form) and all(self.knows(step, form) or self.knows(1 / step, form) for step in steps)

    def knows(self, number: float, form: AffineForm) -> bool:
        """Whether a number is one that the model may compare with a form."""
        if number in (0, 1) or _is_mask_value(number):
            return True
        return any(isclose(number, known, rel_tol=CLOSE) for known in self._fitting(form))

    def _fitting(self, form: AffineForm) -> frozenset[float]:
        if TOKEN in form.sources:
            return self.tokens
        return frozenset() if form.sources == {BATCH} else self.lengths

    def bounds_data(self, number: float) -> bool:
        """Whether values of the model may be compared with a number."""
        size = abs(number)
        known = any(isclose(size, known, rel_tol=CLOSE) for known in self.data)
        return known or size <= SMALLEST or _is_mask_value(number)


@dataclass(frozen=True)
class SlidingWindow:
    """The sliding window of some layers.

    Attributes:
        size: in tokens.
        layers: the layers that have it.
    """

    size: int
    layers: frozenset[int]


def window_of(config: Any) -> SlidingWindow | None:
    """The window of the first config, nested ones included, whose `layer_types` has sliding layers; else None."""
    if not isinstance(config, Mapping):
        return None
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if isinstance(size, int) and isinstance(kinds, list) and "sliding_attention" in kinds:
        return SlidingWindow(size, frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"))
    return next(filter(None, map(window_of, config.values())), None)


def _is_mask_value(number: float) -> bool:
    return not abs(number) < LARGEST


def _with_neighbors(numbers: Iterable[float]) -> frozenset[float]:
    """The numbers and their neighbors: `< n` and `<= n - 1` are equal, `> n - w` is a window of w."""
    return frozenset(number + step for number in numbers for step in (-1, 0, 1))


def _dynamic_factors(config: Any) -> set[float]:
    """Factors of dynamic rotary scaling, whose base is zero at `1 - 1 / factor` of the context."""
    if not isinstance(config, Mapping):
        return set()
    kinds = (config.get("rope_type"), config.get("type"))
    factor = config.get("factor")
    own = {float(factor)} if isinstance(factor, int | float) and factor > 1 and "dynamic" in kinds else set()
    return own.union(*map(_dynamic_factors, config.values()))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a config with the name of its field, including lists and nested configs."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for inner, content in value.items():
            yield from _numbers(str(inner), content)
    elif isinstance(value, list):
        for content in value:
            yield from _numbers(name, content)


def rounded(number: float, dtype: str) -> float:
    """A number rounded to a dtype; infinity beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float64(number).astype(BY_NAME[dtype].numpy))
