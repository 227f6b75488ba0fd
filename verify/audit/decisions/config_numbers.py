"""The numbers that a model decides by, as its `config.json` has them: windows, chunks, contexts, ids of padding.

All of them are crossed by the scenarios; a graph that decides by another number does so where no scenario comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from llmconv.verify.audit.decisions.affine_forms import BATCH, TOKEN, AffineForm

LENGTHS = re.compile(
    r"window|chunk|context|max_pos|max_seq|original_max|n_positions|n_ctx|seq_len|block_size|floor_scale|conv|max_length"
)
"""Fields of a config whose numbers lengths and positions may be compared with."""

TOKENS = re.compile(r"vocab|(pad|image|audio|video|vision|boi|eoi|boa|eoa|mask)\w*token|(pad|image|audio|video)\w*_id")
"""Fields whose numbers token ids may be compared with."""

JITTER = re.compile(r"router_jitter")
"""Scores of experts that are nearer than twice this are alike (transformers modeling_phimoe.py, `sparsemixer`)."""
TWICE = 2
"""A length may count twice (transformers modeling_mpt.py adds the past to a length that has it): that is met early."""

SIZES = re.compile(r"theta|vocab|position|token|hidden_size|intermediate_size|initializer")
"""Fields whose numbers limit nothing that a model computes."""

LIBRARY = frozenset({0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 20.0})
"""Bounds that activations of torch have themselves: hard sigmoid's, ReLU6's, and where softplus becomes a line (20)."""

CLOSE = 1e-6
"""Relative: numbers of a config are float64, those of a graph float32."""

HUGE = 1e9
"""A factor as large makes a small number overflow."""

SMALLEST, LARGEST = 1e-4, 3e38
"""Below is a guard against division by zero, above the end of float32."""


@dataclass(frozen=True)
class ConfigNumbers:
    """What may be compared with what.

    Attributes:
        lengths: with lengths, positions and what is counted of a mask.
        tokens: with token ids.
        data: with what the model computes.
    """

    lengths: frozenset[float]
    tokens: frozenset[float]
    data: frozenset[float]

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: Iterable[int] = ()) -> ConfigNumbers:
        """Those of a config, and of a graph's axes that are numbers.

        Args:
            config: content of `config.json`.
            sizes: lengths that the graph is made for.
        """
        found = list(_numbers("", config))
        lengths = {number for name, number in found if LENGTHS.search(name)} | {float(size) for size in sizes}
        lengths |= {length * (1 - 1 / factor) for length in lengths for factor in _dynamic_factors(config)}
        tokens = {number for name, number in found if TOKENS.search(name)}
        data = {abs(number) for name, number in found if not SIZES.search(name)}
        data |= {2 * number for name, number in found if JITTER.search(name)}
        return cls(_with_neighbors(lengths), _with_neighbors(tokens), LIBRARY | data)

    def explain(self, form: AffineForm) -> bool:
        """Whether a decision on a form is by numbers of the model alone."""
        if any(not 1 / HUGE < abs(factor) < HUGE for factor in form.terms.values()):
            return False
        factors = (factor for factor in form.factors if abs(factor) != TWICE)
        return all(self.knows(number, form) for number in (form.offset, *factors))

    def explain_rounding(self, form: AffineForm) -> bool:
        """The same where a form is rounded to whole numbers: its unit decides, too."""
        steps = [abs(factor) for factor in form.terms.values()]
        return self.explain(form) and all(self.knows(step, form) or self.knows(1 / step, form) for step in steps)

    def knows(self, number: float, form: AffineForm) -> bool:
        """Whether a number is the model's where a form is compared with it."""
        if number in (0, 1) or _is_mask_value(number):
            return True
        return any(isclose(number, known, rel_tol=CLOSE) for known in self._fitting(form))

    def _fitting(self, form: AffineForm) -> frozenset[float]:
        if TOKEN in form.sources:
            return self.tokens
        return frozenset() if form.sources == {BATCH} else self.lengths

    def bounds_data(self, number: float) -> bool:
        """Whether what the model computes may be compared with a number."""
        size = abs(number)
        known = any(isclose(size, known, rel_tol=CLOSE) for known in self.data)
        return known or size <= SMALLEST or _is_mask_value(number)


@dataclass(frozen=True)
class SlidingWindow:
    """A window of some layers.

    Attributes:
        size: tokens.
        layers: that have it.
    """

    size: int
    layers: frozenset[int]


def window_of(config: Any) -> SlidingWindow | None:
    """The window of a config whose `layer_types` has sliding layers, wherever in it; None where none has."""
    if not isinstance(config, Mapping):
        return None
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if isinstance(size, int) and isinstance(kinds, list) and "sliding_attention" in kinds:
        return SlidingWindow(size, frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"))
    return next(filter(None, map(window_of, config.values())), None)


def _is_mask_value(number: float) -> bool:
    return not abs(number) < LARGEST


def _with_neighbors(numbers: Iterable[float]) -> frozenset[float]:
    """`< n` and `<= n - 1` are one; `> n - w` is a window of w."""
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
    """Every number of a config with the name of its field, those in lists and in configs inside it too."""
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
