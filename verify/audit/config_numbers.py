"""ConfigNumbers: the numbers in `config.json` that a model decides by: windows, chunks, contexts, padding ids.

The scenarios cross all of them; decisions by other numbers may be out of the scenarios' reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np
import onnx

from llmconv.tensors import BY_NAME, Array
from llmconv.verify.audit.state import (
    BATCH,
    BLOCKS,
    LENGTH,
    TOKEN,
    WITHIN,
    AffineForm,
    AuditFindings,
    ForeignDecision,
    ValueKind,
    atom,
    made_of,
)

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

    `lengths` are for lengths, positions and counts of a mask, `tokens` for token ids, and `data`, absolute values, for
    values that the model computes.
    """

    lengths: frozenset[float]
    tokens: frozenset[float]
    data: frozenset[float]

    @classmethod
    def of(cls, config: Mapping[str, Any], sizes: Iterable[int] = (), half: str = "") -> ConfigNumbers:
        """The numbers of a `config.json`, and `sizes`, the lengths that are fixed in the graph.

        `half` is the dtype to which the graph rounds numbers, `float16` or `bfloat16`; empty for none.
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
    """The sliding window, in tokens, of some layers."""

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


FEW = 64
"""Numbers of tokens or sequences up to this are reached by the scenarios."""

OF_LENGTH = atom("length", LENGTH)


class DecisionJudge:
    """Collects the decisions of a graph."""

    def __init__(self, numbers: ConfigNumbers) -> None:
        self.numbers, self.found = numbers, AuditFindings()

    def decision(self, node: onnx.NodeProto, form: AffineForm, *, rounded: bool = False) -> None:
        """A node that decides by whether a form is zero; if `rounded`, by where it reaches the next whole number."""
        if not form.terms or self._is_within_a_block(form):
            return
        if form.kind > ValueKind.COUNT:
            if node.op_type == "Div":
                return  # sizes of heads; later decisions by them are not analyzed either
            self.flag(node, f"decides on {sources_text(form)} by a value that is not analyzed", certain=False)
            return
        self.found.decisions += 1
        self.found.numbers |= {form.offset}
        if not (self.numbers.explain_rounding(form) if rounded else self.numbers.explain(form)):
            point = node.op_type == "Equal" and form.offset > FEW and not self.numbers.bounds_data(form.offset)
            text = f"decides on {sources_text(form)} by {_numbers_text(form, rounded)}"
            self.flag(node, text, point=point, number=max(form.offset, *form.factors))

    def offset(self, node: onnx.NodeProto, form: AffineForm) -> None:
        """A node whose result no longer contains the number of a form, so the number must be the model's."""
        if form.terms and not self.numbers.knows(form.offset, form):
            self.flag(node, f"decides on {sources_text(form)} by {form.offset:g}", number=form.offset)

    def is_of_the_call(self, size: AffineForm) -> bool:
        """Whether an axis is an unchanged axis of the call, or has a size known to the model or the graph."""
        if not size.terms:
            return self.numbers.knows(size.number, OF_LENGTH)
        return size.kind is ValueKind.COUNT and len(size.terms) == 1 and not size.number and size.factors == [1]

    def _is_within_a_block(self, form: AffineForm) -> bool:
        """Whether a form halves blocks of tokens repeatedly, as in the inverse of a triangular matrix."""
        numbers = [int(number) for number in (form.offset, *form.factors) if float(number).is_integer()]
        halves = len(numbers) == 1 + len(form.terms) and all(not number & (number - 1) for number in numbers)
        return form.sources == {WITHIN} and form.kind <= ValueKind.COUNT and halves and max(numbers) <= max(BLOCKS)

    def decisions(self, node: onnx.NodeProto, forms: Sequence[AffineForm], *, rounded: bool = False) -> None:
        """A decision on each form that depends on the call, compared with each form that is a number."""
        cuts = [form.number for form in forms if not form.terms] or [0.0]
        for form in (form for form in forms if form.terms):
            for number in cuts:
                self.decision(node, form + AffineForm(number=-number), rounded=rounded)

    def choices(self, node: onnx.NodeProto, forms: Sequence[AffineForm], numbers: Iterable[float] = ()) -> None:
        """A node that selects from or concatenates values: constants among its inputs must be the model's numbers."""
        call = [form for form in forms if form.terms]
        for form in call:
            if form.kind is not ValueKind.PERIODIC or node.op_type != "Concat":
                self.decision(node, form)
        whole = made_of("", call) if call else OF_LENGTH
        for number in (*numbers, *(form.number for form in forms if not form.terms)):
            if call and not self.numbers.knows(abs(number), whole):
                self.flag(node, f"combines {number:g} with {sources_text(whole)}", certain=False, number=abs(number))

    def knows_lengths(self, numbers: Array) -> bool:
        """Whether lengths may be compared with all these numbers."""
        return all(self.numbers.knows(abs(float(number)), OF_LENGTH) for number in numbers.ravel())

    def flag(
        self, node: onnx.NodeProto, text: str, *, certain: bool = True, point: bool = False, number: float = 0.0
    ) -> None:
        """Records a node that decides by other numbers, as a `ForeignDecision`."""
        name = node.name or node.output[0]
        self.found.findings.append(ForeignDecision(name, node.op_type, text, certain, point, number))


def sources_text(form: AffineForm) -> str:
    """The sources of a form in words, such as `length and mask`."""
    return " and ".join(sorted(form.sources)) or "a number"


def _numbers_text(form: AffineForm, rounded: bool) -> str:
    """The numbers of a form in words, such as `3817 and multiples of 256`."""
    factors = [abs(factor) for factor in form.terms.values()] if rounded else form.factors
    multiples = [f"multiples of {factor:g}" for factor in factors if factor != 1]
    return " and ".join([f"{form.offset:g}", *multiples[:2]])
