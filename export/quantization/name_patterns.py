"""Patterns for the names of weights: `--quant-exclude PATTERN` and `--quant-bits PATTERN=8`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from llmconv.errors import UsageProblem, listing
from llmconv.tensors import LazyTensor
from llmconv.timed_patterns import MatchTime, PatternProblem, compiled, finds

INDEX = re.compile(r"\.\d+\.")
"""In the name of a tensor of a layer."""


def require_pattern(option: str, pattern: str) -> None:
    """Raises UsageProblem if the regular expression of an option is invalid, or nested too deeply."""
    try:
        compiled(pattern)
    except PatternProblem as problem:
        raise _refused(option, pattern, problem) from problem


def matches(option: str, pattern: str, name: str, time: MatchTime | None = None) -> bool:
    """Whether an option's regular expression is found anywhere in the name of a stored tensor.

    Raises UsageProblem if that takes too long; several matches may share a `time` limit.
    """
    try:
        return finds(compiled(pattern), name, time, anywhere=True)
    except PatternProblem as problem:
        raise _refused(option, pattern, problem) from problem


def require_used(patterns: Mapping[str, Sequence[str]], tensors: Mapping[str, LazyTensor]) -> None:
    """Raises UsageProblem for a pattern of an option that matches no stored tensor, or takes too long."""
    time = MatchTime()
    for option, given in patterns.items():
        for pattern in given:
            if not any([matches(option, pattern, name, time) for name in tensors]):
                raise UsageProblem(f"`{option} {pattern}` matches no weight", hint=_near(pattern, tensors))


def _near(pattern: str, tensors: Mapping[str, LazyTensor]) -> str:
    """Names that were possibly meant; without such, those of an embedding, a head and a matrix of a layer."""
    matrices = [name.removesuffix(".weight") for name, tensor in tensors.items() if len(tensor.shape) > 1]
    parts = dict.fromkeys(part for name in matrices for part in name.split(".") if not part.isdecimal())
    if found := get_close_matches(pattern, dict.fromkeys([*parts, *matrices]), n=3):
        return f"close names: {listing(found)}"
    outside = [name for name in matrices if not INDEX.search(name)]
    return f"names are such as {listing([*outside[:2], *(name for name in matrices if INDEX.search(name))][:3])}"


def _refused(option: str, pattern: str, problem: PatternProblem) -> UsageProblem:
    return UsageProblem(
        f"`{option}` has the regular expression {pattern[:80]!r}, {problem}",
        hint="`lm_head` matches every name with it",
    )
