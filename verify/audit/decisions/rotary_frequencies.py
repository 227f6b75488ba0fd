"""Recognizes rotary frequencies that depend on the length: `longrope` selects from two tables, `dynamic` computes one.

    dynamic    1 / (base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))) ** (i / dim)

Source: transformers modeling_rope_utils.py.
"""

from __future__ import annotations

from llmconv.verify.audit.decisions.affine_forms import is_of
from llmconv.verify.audit.decisions.value_kinds import ConstantValue, InputValue, Value

FREQUENCIES = "frequencies"
"""Name of a selection between frequencies in forms; a position may be multiplied by it."""

FLAT = 2.0
"""The largest allowed exponent: `dim / (dim - 2)` for four dimensions; larger powers are steps."""


def is_frequency(value: Value) -> bool:
    """Whether a value is a table of frequencies in (0, 1], or the result of a reciprocal."""
    if isinstance(value, ConstantValue):
        array = value.array
        return array.dtype.kind == "f" and array.size > 1 and bool((array > 0).all() and (array <= 1).all())
    return isinstance(value, InputValue) and is_of("Reciprocal", value.form)


def is_flat_power(given: list[Value]) -> bool:
    """Whether a power is a root, or a low power of a value that is not a power; repeated powers would be a step."""
    base, exponent = given
    if not isinstance(base, InputValue) or not isinstance(exponent, ConstantValue) or exponent.array.dtype.kind != "f":
        return False
    array = exponent.array
    most = 1.0 if any("Pow(" in one.name for one in base.form.terms) else FLAT
    return bool(array.size and (array >= 0).all() and (array <= most).all())
