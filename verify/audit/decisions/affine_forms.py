"""AffineForm: a value that depends on the call only, as a weighted sum of atoms (lengths, positions, …) and a number.

For example, the edge of a window is `q + past_sequence_length - 9`. Layout is ignored: a value and its transpose, slice
or broadcast copy have the same form, because all their elements are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

LENGTH, BATCH, POSITION, TOKEN, MASK = "length", "batch size", "position", "token id", "mask"
"""Sources: the properties of a call that an atom depends on."""


INDEX = "place in the sequence"
"""Source of an index that counts from the first token, or from the first new token."""

WITHIN = "place within a block"
"""Source of an index along a block of tokens, see `BLOCKS`."""

BLOCKS = frozenset({16.0, 64.0})
"""Block sizes in tokens of llmconv's recurrent layers (export/caches/delta_rule.py, state_space.py)."""

BLOCK = "tokens of a block"
"""Name of the atom of a length that is limited by a block size."""

NAME_LENGTH = 500
"""Maximum length of an atom's name; longer names are cut and end in a hash, so that they stay different."""


class ValueKind(IntEnum):
    """The possible values of an atom; the kind of several atoms is the largest."""

    BINARY = 0
    """0, 1, or the number that masks add."""
    COUNT = 1
    """Lengths, indices, positions and ids; all numbers that they involve are in the form."""
    PERIODIC = 2
    """Cosines and sines."""
    UNKNOWN = 3
    """Any number; it may hide unknown numbers."""


@dataclass(frozen=True)
class Atom:
    """A term of a form: an input's elements, an axis, an index along an axis, or a result that is not a sum.

    Attributes:
        name: equal for equal values.
        sources: the properties of a call that it depends on.
        kind: its possible values.
    """

    name: str
    sources: frozenset[str]
    kind: ValueKind = ValueKind.COUNT


@dataclass(frozen=True)
class AffineForm:
    """A weighted sum of atoms and a number.

    Attributes:
        terms: factors by atom, none of them zero.
        number: the added number.
    """

    terms: Mapping[Atom, float] = field(default_factory=dict)
    number: float = 0.0

    @property
    def sources(self) -> frozenset[str]:
        """The properties of a call that it depends on."""
        return frozenset().union(*(atom.sources for atom in self.terms))

    @property
    def kind(self) -> ValueKind:
        """Its possible values; the sum of several binary atoms is a count."""
        found = max((atom.kind for atom in self.terms), default=ValueKind.BINARY)
        return ValueKind.COUNT if found is ValueKind.BINARY and len(self.terms) > 1 else found

    @property
    def factors(self) -> list[float]:
        """Absolute factors relative to the smallest: a form and its multiples decide equally."""
        found = [abs(factor) for factor in self.terms.values()]
        return [factor / min(found) for factor in found]

    @property
    def offset(self) -> float:
        """The absolute number relative to the smallest factor."""
        found = [abs(factor) for factor in self.terms.values()]
        return abs(self.number) / min(found) if found else abs(self.number)

    def __add__(self, other: AffineForm) -> AffineForm:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0.0) + factor
        return AffineForm({atom: factor for atom, factor in terms.items() if factor}, self.number + other.number)

    def times(self, factor: float) -> AffineForm:
        """The form multiplied by a number."""
        if not factor:
            return AffineForm()
        return AffineForm({atom: factor * old for atom, old in self.terms.items()}, factor * self.number)

    def key(self) -> str:
        """A string that is equal for equal forms."""
        terms = sorted((atom.name, factor) for atom, factor in self.terms.items())
        return " + ".join([*(f"{factor!r}*{name}" for name, factor in terms), repr(self.number)])


def atom(name: str, *sources: str, kind: ValueKind = ValueKind.COUNT) -> AffineForm:
    """The form of a single atom.

    Args:
        name: equal for equal values.
        sources: the properties of a call that it depends on.
        kind: its possible values.
    """
    return AffineForm({Atom(name, frozenset(sources), kind): 1.0})


def made_of(name: str, forms: Iterable[AffineForm], kind: ValueKind | None = None) -> AffineForm:
    """The form of a result that is not a sum: a new atom, named after its inputs.

    Args:
        name: of the operation.
        forms: of its inputs.
        kind: possible values of the result; None for those of the inputs.
    """
    forms = list(forms)
    sources = frozenset().union(*(form.sources for form in forms)) or frozenset({LENGTH})
    whole = f"{name}({', '.join(form.key() for form in forms)})"
    if len(whole) > NAME_LENGTH:
        whole = f"{whole[:NAME_LENGTH]}… {sha256(whole.encode()).hexdigest()}"
    inherited = max((form.kind for form in forms), default=ValueKind.COUNT)
    return AffineForm({Atom(whole, sources, inherited if kind is None else kind): 1.0})


def is_of(name: str, form: AffineForm) -> bool:
    """Whether a form is a sum of results of the operation `name` only, see `made_of`."""
    return bool(form.terms) and all(one.name.startswith(f"{name}(") for one in form.terms)
