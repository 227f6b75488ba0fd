"""Regular expressions from an adapter's config (`rank_pattern`, `alpha_pattern`), matched in bounded time and memory.

A config may be an attack: `re` takes exponential time for `(a+)+$`. `regex` reads the same syntax (its version 0) and
stops at a timeout. It copies repeated groups when it compiles a pattern, so nested and counted ones are limited first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from time import thread_time
from typing import Any

import regex

from llmconv.errors import MalformedInput

PATTERN_LIMIT = 500
NAME_LIMIT = 200
"""Characters; module paths have about 60."""

TOTAL_LIMIT = 4000
"""Characters of all patterns of an adapter, plain names not counted."""

MATCH_SECONDS, TOTAL_SECONDS = 0.1, 5.0
"""CPU time of one match, and of all matches of an adapter; an ordinary match takes microseconds."""

DEPTH_LIMIT, COPIES_LIMIT = 10, 10_000
"""Repeated groups within repeated groups; the product of all counts `{n}` of a pattern."""

SPECIAL = re.compile(r"[*+?{|()\[^$]|\\[^.]")
"""Characters that a module path with escaped dots does not contain."""

TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d*)(?P<most>,\d*)?\}\+?|\(\?(?::|P<\w+>)|\(\?|[*+?]\+|.", re.DOTALL
)
UNSUPPORTED = re.compile(r"\\\d|\(\?|[*+?]\+|\{[^}]+\}\+|\[.*\[:.*", re.DOTALL)
"""Backreferences, lookaround, flags and possessive repetition; and what `re` and `regex` read differently."""


class MatchTime:
    """The CPU time in seconds that is left for the patterns of one adapter, over all of its modules."""

    def __init__(self) -> None:
        self.left = TOTAL_SECONDS


def matches(pattern: str, module: str, time: MatchTime | None = None) -> bool:
    r"""Whether `pattern` matches the path of a module as in PEFT's `get_pattern_key`: `(.*\.)?(pattern)$`.

    Args:
        pattern: a key of `rank_pattern` or `alpha_pattern`.
        module: path of the module.
        time: shared by all matches of an adapter (default: that of a single match).

    Raises:
        MalformedInput: an invalid regular expression, unsupported syntax, or one that takes too long.
    """
    expression = _compiled(pattern)
    if isinstance(expression, re.Pattern):
        return expression.match(module) is not None
    if len(module) > NAME_LIMIT:
        raise refused(pattern, f"which is not tried on a name of {len(module)} characters")
    time, began = time or MatchTime(), thread_time()
    try:
        if time.left <= 0:
            raise TimeoutError
        return expression.match(module, timeout=min(MATCH_SECONDS, time.left)) is not None
    except TimeoutError as error:
        raise refused(pattern, "which takes too long to match") from error
    finally:
        time.left -= thread_time() - began


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> Any:
    """PEFT's expression for `pattern`: of `re` for a module path, of `regex` for anything more."""
    problem: Exception | str = f"it has more than {PATTERN_LIMIT} characters"
    if len(pattern) <= PATTERN_LIMIT:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about syntax that a later Python may read differently
                expression = re.compile(rf"(.*\.)?({pattern})$")
                return regex.compile(rf"(.*\.)?({_limited(pattern)})$") if SPECIAL.search(pattern) else expression
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            problem = error
    raise refused(pattern, f"which is not a valid regular expression: {problem}")


def _limited(pattern: str) -> str:
    """The pattern for `regex`, to which a brace that is not a count means something else.

    Raises:
        MalformedInput: unsupported syntax, or too deep or too many repetitions.
    """
    tokens = list(TOKEN.finditer(pattern))
    depths = [0]
    for token in tokens:
        if UNSUPPORTED.fullmatch(token[0]):
            raise refused(pattern, f"of which {pattern[token.start() :][:8]!r} is not supported")
        if token[0].startswith("("):
            depths.append(0)
        elif token[0] == ")" and len(depths) > 1:
            inner = depths.pop() + pattern.startswith(("+", "*", "?", "{"), token.end())
            depths[-1] = max(depths[-1], inner)
    counts = [max(int(token["least"] or 1), int((token["most"] or ",1")[1:] or 1), 1) for token in tokens]
    if depths[0] > DEPTH_LIMIT or prod(counts) > COPIES_LIMIT:
        raise refused(pattern, "which is nested too deeply or repeats too often")
    return "".join(r"\{" if token[0] == "{" else token[0] for token in tokens)


def require_few(patterns: Iterable[str]) -> None:
    """Refuses more patterns than can be tried on every module in a short time; plain names do not count.

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
