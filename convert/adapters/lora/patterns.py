"""Regular expressions out of an adapter's settings, matched in bounded time, as they may be an attack.

Python's `re` tries one way after the other, of which `(a+)+$` has as many as a power of two. Here a part of a pattern
is the relation between the places of a name where it may begin and those where it may end; parts are joined by algebra
(K. Thompson, "Regular Expression Search Algorithm", 1968, on bits), so that no way is gone twice.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache

from llmconv.errors import MalformedInput

PATTERN_LIMIT = 500
NAME_LIMIT = 200
"""Characters; names of modules have about 60."""

TOTAL_LIMIT = 4000
"""Characters of all patterns of an adapter that are more than a name."""

SPECIAL = re.compile(r"[*+?{|()\[^$]|\\[^.]")
"""What is not in a name with escaped dots."""

COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
GROUP = re.compile(r"\((?:\?:|\?P<\w+>)?(?!\?)")
ATOM = re.compile(r"\\[^\w]|\\[dDwWsS]|[^\\]", re.DOTALL)
ANCHORS = {"^": 0, "$": -1, r"\A": 0, r"\Z": -1}

Relation = list[int]
"""By the place where a part begins, a bit for each place where it may end."""


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> re.Pattern[str]:
    """PEFT's own expression for `pattern`: at the end of a path, after a dot.

    Raises:
        MalformedInput: it is none, or longer than such patterns are.
    """
    problem: Exception | str = f"it has more than {PATTERN_LIMIT} characters"
    if len(pattern) <= PATTERN_LIMIT:
        try:
            return _quietly(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            problem = error
    raise refused(pattern, f"which is no regular expression: {problem}")


@lru_cache(maxsize=1 << 12)
def _letter(text: str) -> re.Pattern[str]:
    """The part of a pattern that matches one letter."""
    return _quietly(text)


def _quietly(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later Python may read otherwise
        return re.compile(pattern)


def matches(pattern: str, module: str) -> bool:
    """Whether `pattern` matches the path of a module as PEFT's `get_pattern_key` has it: `(.*\\.)?(pattern)$`.

    Raises:
        MalformedInput: it is no regular expression, or one with parts that only backtracking can match.
    """
    expression = _compiled(pattern)
    if not SPECIAL.search(pattern):
        return expression.match(module) is not None
    if len(module) > NAME_LIMIT:
        raise refused(pattern, f"which is not tried on a name of {len(module)} characters")
    try:
        found = _Reader(pattern, module).whole()
    except RecursionError as error:
        raise refused(pattern, "which is nested too deeply") from error
    starts = [0, *(place + 1 for place, letter in enumerate(module) if letter == ".")]
    return any(found[start] >> len(module) & 1 for start in starts)


def require_few(patterns: Iterable[str]) -> None:
    """Refuses more patterns than can be tried on every module in a short time; names are no patterns.

    Raises:
        MalformedInput: there are more.
    """
    special = [pattern for pattern in patterns if SPECIAL.search(pattern)]
    if (total := sum(map(len, special))) > TOTAL_LIMIT:
        raise refused(special[0], f"and {len(special) - 1} more, of {total} characters together")


def refused(pattern: str, problem: str) -> MalformedInput:
    """The error for a pattern."""
    return MalformedInput(
        f"the adapter config has the regular expression {pattern[:80]!r}, {problem}",
        hint="repair `rank_pattern` or `alpha_pattern` in `adapter_config.json`",
    )


class _Reader:
    """The relation of a pattern on one name, read from left to right."""

    def __init__(self, pattern: str, name: str) -> None:
        self._pattern, self._name = pattern, name
        self._place = 0
        self._here = [1 << place for place in range(len(name) + 1)]

    def whole(self) -> Relation:
        found = self._choice()
        if self._place < len(self._pattern):
            raise self._unread()
        return found

    def _choice(self) -> Relation:
        found = self._sequence()
        while self._take("|"):
            found = [one | other for one, other in zip(found, self._sequence(), strict=True)]
        return found

    def _sequence(self) -> Relation:
        found = self._here
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            found = _then(found, self._repeated(self._part()))
        return found

    def _part(self) -> Relation:
        if match := GROUP.match(self._pattern, self._place):
            self._place = match.end()
            found = self._choice()
            self._take(")")
            return found
        match = CLASS.match(self._pattern, self._place) or ATOM.match(self._pattern, self._place)
        if match is None and self._pattern[self._place : self._place + 2] not in ANCHORS:
            raise self._unread()
        text = match[0] if match else self._pattern[self._place : self._place + 2]
        if text in "(*+?":
            raise self._unread()
        self._place += len(text)
        if text in ANCHORS:
            at = ANCHORS[text] % len(self._here)
            return [bit if place == at else 0 for place, bit in enumerate(self._here)]
        one = _letter(text)
        return [
            *(bit << 1 if one.fullmatch(letter) else 0 for bit, letter in zip(self._here, self._name, strict=False)),
            0,
        ]

    def _repeated(self, part: Relation) -> Relation:
        """What a quantifier behind a part makes of it; whether it is greedy does not matter here."""
        counts = self._counts()
        if counts is None:
            return part
        least, most = counts
        self._take("?")
        if self._pattern[self._place : self._place + 1] == "+":
            raise self._unread()  # possessive: what it has taken is not given back
        found = _power(part, least, self._here)
        if most is None:
            return _then(found, _closure(part))
        maybe = [one | bit for one, bit in zip(part, self._here, strict=True)]
        return _then(found, _power(maybe, min(most - least, len(self._name)), self._here))

    def _counts(self) -> tuple[int, int | None] | None:
        """The least and the most times that the quantifier here says, None where there is none."""
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return least, most
        match = COUNT.match(self._pattern, self._place)
        if match is None or match[0] == "{,}":
            return None
        self._place = match.end()
        if match[1]:
            return int(match[1]), int(match[1])
        return int(match[2] or 0), int(match[3]) if match[3] else None

    def _take(self, sign: str) -> bool:
        there = self._pattern.startswith(sign, self._place)
        self._place += len(sign) if there else 0
        return there

    def _unread(self) -> MalformedInput:
        return refused(self._pattern, f"of which {self._pattern[self._place : self._place + 8]!r} is not read")


def _then(first: Relation, second: Relation) -> Relation:
    """One after the other."""
    return [_image(row, second) for row in first]


def _image(places: int, relation: Relation) -> int:
    """Where one of `places` leads."""
    found = 0
    while places:
        lowest = places & -places
        found |= relation[lowest.bit_length() - 1]
        places ^= lowest
    return found


def _closure(relation: Relation) -> Relation:
    """Any number of times, none included; as places only go up, those behind a place are known before it."""
    rows = [0] * len(relation)
    for place in reversed(range(len(relation))):
        rows[place] = 1 << place | _image(relation[place] & ~(1 << place), rows)
    return rows


def _power(relation: Relation, count: int, here: Relation) -> Relation:
    """So many times, by squares."""
    found = here
    while count:
        found = _then(found, relation) if count & 1 else found
        relation, count = _then(relation, relation), count >> 1
    return found
