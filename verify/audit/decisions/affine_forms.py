"""Forms: what a value that follows from a call alone is made of, as a sum of multiples of atoms and a number.

`q + past_sequence_length - 9` is the form of a window's edge. Layout is left out: a value and its transpose, slice or
broadcast copy have one form, since all of their elements are made in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

LENGTH, BATCH, POSITION, TOKEN, MASK = "length", "batch size", "position", "token id", "mask"
"""What of a call an atom follows from."""


PLACE = "place in the sequence"
"""Source of an index that counts from the first token, or the first new one."""

WITHIN = "place within a block"
"""Source of an index along a block of tokens, see `BLOCKS`."""

BLOCKS = frozenset({16.0, 64.0})
"""Tokens of the blocks by which llmconv's recurrent layers go (export/caches/delta_rule.py, state_space.py)."""

BLOCK = "tokens of a block"
"""What a length that is limited by one of them is called in forms."""

NAME_LENGTH = 500
"""Characters of a name; what is longer ends in its hash, so that different results keep different names."""


class ValueKind(IntEnum):
    """What the numbers of an atom can be; that of several is the largest."""

    BINARY = 0
    """0, 1, or what masks add."""
    COUNT = 1
    """Lengths, indices, positions and ids, with no number that is not in the form."""
    PERIODIC = 2
    """Cosines and sines."""
    UNKNOWN = 3
    """Anything: a number of which nothing is known may be in it."""


@dataclass(frozen=True)
class Atom:
    """What a form counts in: an input's elements, an axis, an index along one, or a result that is no sum.

    Attributes:
        name: equal for equal values.
        sources: what of a call it follows from.
        nature: what its numbers can be.
    """

    name: str
    sources: frozenset[str]
    nature: ValueKind = ValueKind.COUNT


@dataclass(frozen=True)
class AffineForm:
    """A sum of multiples of atoms and a number.

    Attributes:
        terms: factors by atom, none of them zero.
        number: what is added.
    """

    terms: Mapping[Atom, float] = field(default_factory=dict)
    number: float = 0.0

    @property
    def sources(self) -> frozenset[str]:
        """What of a call it follows from."""
        return frozenset().union(*(atom.sources for atom in self.terms))

    @property
    def nature(self) -> ValueKind:
        """What its numbers can be; one truth and its opposite are no more than that, sums of several are counts."""
        found = max((atom.nature for atom in self.terms), default=ValueKind.BINARY)
        return ValueKind.COUNT if found is ValueKind.BINARY and len(self.terms) > 1 else found

    @property
    def factors(self) -> list[float]:
        """The factors of the atoms, the smallest as 1: a form and its multiples decide alike."""
        found = [abs(factor) for factor in self.terms.values()]
        return [factor / min(found) for factor in found]

    @property
    def offset(self) -> float:
        """The number in the unit of the smallest factor, without its sign."""
        found = [abs(factor) for factor in self.terms.values()]
        return abs(self.number) / min(found) if found else abs(self.number)

    def __add__(self, other: AffineForm) -> AffineForm:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0.0) + factor
        return AffineForm({atom: factor for atom, factor in terms.items() if factor}, self.number + other.number)

    def times(self, factor: float) -> AffineForm:
        """Its multiple."""
        if not factor:
            return AffineForm()
        return AffineForm({atom: factor * old for atom, old in self.terms.items()}, factor * self.number)

    def key(self) -> str:
        """Equal for equal forms."""
        terms = sorted((atom.name, factor) for atom, factor in self.terms.items())
        return " + ".join([*(f"{factor!r}*{name}" for name, factor in terms), repr(self.number)])


def atom(name: str, *sources: str, nature: ValueKind = ValueKind.COUNT) -> AffineForm:
    """The form of one atom."""
    return AffineForm({Atom(name, frozenset(sources), nature): 1.0})


def made_of(name: str, forms: Iterable[AffineForm], nature: ValueKind | None = None) -> AffineForm:
    """The form of a result that is no sum: an atom of its own, by what it is made of.

    Args:
        nature: of the result; None for that of what it is made of.
    """
    forms = list(forms)
    sources = frozenset().union(*(form.sources for form in forms)) or frozenset({LENGTH})
    whole = f"{name}({', '.join(form.key() for form in forms)})"
    if len(whole) > NAME_LENGTH:
        whole = f"{whole[:NAME_LENGTH]}… {sha256(whole.encode()).hexdigest()}"
    inherited = max((form.nature for form in forms), default=ValueKind.COUNT)
    return AffineForm({Atom(whole, sources, inherited if nature is None else nature): 1.0})


def is_of(name: str, form: AffineForm) -> bool:
    """Whether a form is a sum of results of that name alone, see `made_of`."""
    return bool(form.terms) and all(one.name.startswith(f"{name}(") for one in form.terms)
