"""Forms: what a value that follows from a call alone is made of, as a sum of multiples of atoms and a number.

`q + past_sequence_length - 9` is the form of a window's edge. Layout is left out: a value and its transpose, slice or
broadcast copy have one form, since all of their elements are made in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LENGTH, BATCH, POSITION, TOKEN, MASK = "length", "batch size", "position", "token id", "mask"
"""What of a call an atom follows from."""


PLACE = "place in the sequence"
"""Source of an index that counts from the first token, or the first new one."""

WITHIN = "place within a block"
"""Source of what is never larger than a block of a few tokens."""


@dataclass(frozen=True)
class Atom:
    """What a form counts in: an input's elements, an axis, an index along one, or a result that is no sum.

    Attributes:
        name: equal for equal values.
        sources: what of a call it follows from.
    """

    name: str
    sources: frozenset[str]


@dataclass(frozen=True)
class Form:
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
    def factors(self) -> list[float]:
        """The factors of the atoms, the smallest as 1: a form and its multiples decide alike."""
        found = [abs(factor) for factor in self.terms.values()]
        return [factor / min(found) for factor in found]

    @property
    def offset(self) -> float:
        """The number in the unit of the smallest factor, without its sign."""
        found = [abs(factor) for factor in self.terms.values()]
        return abs(self.number) / min(found) if found else abs(self.number)

    def __add__(self, other: Form) -> Form:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0.0) + factor
        return Form({atom: factor for atom, factor in terms.items() if factor}, self.number + other.number)

    def times(self, factor: float) -> Form:
        """Its multiple."""
        if not factor:
            return Form()
        return Form({atom: factor * old for atom, old in self.terms.items()}, factor * self.number)

    def within_a_block(self) -> Form:
        """The same, known to be no larger than a block of a few tokens."""
        return Form({Atom(atom.name, frozenset({WITHIN})): factor for atom, factor in self.terms.items()}, self.number)

    def key(self) -> str:
        """Equal for equal forms."""
        terms = sorted((atom.name, factor) for atom, factor in self.terms.items())
        return " + ".join([*(f"{factor:g}*{name}" for name, factor in terms), f"{self.number:g}"])


def atom(name: str, *sources: str) -> Form:
    """The form of one atom."""
    return Form({Atom(name, frozenset(sources)): 1.0})


def made_of(name: str, forms: Iterable[Form]) -> Form:
    """The form of a result that is no sum: an atom of its own, by what it is made of."""
    forms = list(forms)
    sources = frozenset().union(*(form.sources for form in forms))
    return Form({Atom(f"{name}({', '.join(form.key() for form in forms)})"[:2000], sources): 1.0})


def is_of(name: str, form: Form) -> bool:
    """Whether a form is a sum of results of that name alone, see `made_of`."""
    return bool(form.terms) and all(one.name.startswith(f"{name}(") for one in form.terms)
