"""Regular expressions of users and of files, matched in bounded time and memory.

`re` takes exponential time for `(a+)+$`. `regex` reads the same syntax (its version 0) and stops at a timeout. It
copies repeated groups when it compiles a pattern, so nested and counted ones are limited first.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from math import prod
from time import thread_time
from typing import Any

import regex

PATTERN_LIMIT = 1000
NAME_LIMIT = 200  # characters; module paths have about 60
# CPU time of one match, and of all matches that share a `MatchTime`; an ordinary match takes microseconds
MATCH_SECONDS, TOTAL_SECONDS = 0.1, 5.0
# repeated groups within repeated groups; the product of all counts `{n}` of a pattern
DEPTH_LIMIT, COPIES_LIMIT = 10, 10_000
SPECIAL = re.compile(r"[*+?{|()\[^$]|\\[^.]")  # characters that a module path with escaped dots does not contain

TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d*)(?P<most>,\d*)?\}\+?|\(\?(?::|P<\w+>)|\(\?|[*+?]\+|.", re.DOTALL
)
# possessive repetition, and what `re` and `regex` read differently
AMBIGUOUS = re.compile(r"[*+?]\+|\{[^}]+\}\+|\[.*\[:.*", re.DOTALL)
COSTLY = re.compile(r"\\\d|\(\?")  # backreferences, lookaround and flags


class PatternProblem(ValueError):
    """Why a pattern is refused; the text continues a sentence about it, such as `which takes too long to match`."""


class MatchTime:
    """The CPU time in seconds that is left for a set of patterns, over all names."""

    def __init__(self) -> None:
        self.left = TOTAL_SECONDS


def compiled(pattern: str, form: str = "{}", *, costly: bool = True) -> Any:
    """An expression for `search_in` and `match_in`: of `re` for a module path, of `regex` for anything more.

    `form` is the whole expression, with `{}` for the pattern; `costly` allows backreferences, lookaround and flags.
    Raises PatternProblem for invalid or unsupported syntax, or too deep or too many repetitions.
    """
    return _compiled(pattern, form, costly)


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str, form: str, costly: bool) -> Any:
    problem: Exception | str = f"it has more than {PATTERN_LIMIT} characters"
    if len(pattern) <= PATTERN_LIMIT:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about syntax that a later Python may read differently
                expression = re.compile(form.replace("{}", pattern))
                if not SPECIAL.search(pattern):
                    return expression
                return regex.compile(form.replace("{}", _limited(pattern, costly)))
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            problem = error
    raise PatternProblem(f"which is not a valid regular expression: {problem}")


def _limited(pattern: str, costly: bool) -> str:
    """The pattern for `regex`, to which a brace that is not a count means something else; raises as `compiled`."""
    tokens = list(TOKEN.finditer(pattern))
    depths = [0]
    for token in tokens:
        if AMBIGUOUS.fullmatch(token[0]) or (not costly and COSTLY.fullmatch(token[0])):
            raise PatternProblem(f"of which {pattern[token.start() :][:8]!r} is not supported")
        if token[0].startswith("("):
            depths.append(0)
        elif token[0] == ")" and len(depths) > 1:
            inner = depths.pop() + pattern.startswith(("+", "*", "?", "{"), token.end())
            depths[-1] = max(depths[-1], inner)
    counts = [max(int(token["least"] or 1), int((token["most"] or ",1")[1:] or 1), 1) for token in tokens]
    if depths[0] > DEPTH_LIMIT or prod(counts) > COPIES_LIMIT:
        raise PatternProblem("which is nested too deeply or repeats too often")
    return "".join(r"\{" if token[0] == "{" else token[0] for token in tokens)


def finds(expression: Any, name: str, time: MatchTime | None = None, *, anywhere: bool = False) -> bool:
    """Whether an expression of `compiled` matches the name of a module or tensor from its start, or `anywhere`.

    `time` is shared by several matches (default: that of a single match). Raises PatternProblem if the match takes too
    long, or the name is too long to try.
    """
    method = expression.search if anywhere else expression.match
    if isinstance(expression, re.Pattern):
        return method(name) is not None
    if len(name) > NAME_LIMIT:
        raise PatternProblem(f"which is not tried on a name of {len(name)} characters")
    time, began = time or MatchTime(), thread_time()
    try:
        if time.left <= 0:
            raise TimeoutError
        return method(name, timeout=min(MATCH_SECONDS, time.left)) is not None
    except TimeoutError as error:
        raise PatternProblem("which takes too long to match") from error
    finally:
        time.left -= thread_time() - began
