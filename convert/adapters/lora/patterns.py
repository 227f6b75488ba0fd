"""Regular expressions from an adapter's config (`rank_pattern`, `alpha_pattern`), which may be an attack."""

from __future__ import annotations

from collections.abc import Iterable

from llmconv.errors import MalformedInput
from llmconv.timed_patterns import SPECIAL, MatchTime, PatternProblem, compiled, finds

TOTAL_LIMIT = 4000
"""Characters of all patterns of an adapter, plain names not counted."""

FORM = r"(.*\.)?({})$"
"""PEFT's expression for a pattern."""


def matches(pattern: str, module: str, time: MatchTime | None = None) -> bool:
    r"""Whether `pattern` matches the path of a module as in PEFT's `get_pattern_key`: `(.*\.)?(pattern)$`.

    Args:
        pattern: a key of `rank_pattern` or `alpha_pattern`.
        module: path of the module.
        time: shared by all matches of an adapter (default: that of a single match).

    Raises:
        MalformedInput: an invalid regular expression, unsupported syntax, or one that takes too long.
    """
    try:
        return finds(compiled(pattern, FORM, costly=False), module, time)
    except PatternProblem as problem:
        raise refused(pattern, str(problem)) from problem


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
