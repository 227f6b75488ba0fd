"""Patterns of adapters match what Python's `re` matches, in a time that no pattern can stretch."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmconv.convert.adapters.lora_config import AdapterFields, matches
from llmconv.errors import MalformedInput
from llmconv.timed_patterns import TOTAL_SECONDS, MatchTime

PARTS = [
    "a",
    "b",
    ".",
    r"\.",
    r"\d",
    "[ab]",
    "[^a]",
    "(",
    "(?:",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2}",
    "{1,}",
    "{,2}",
    "^",
    "$",
]
NAMES = st.text("ab1.", max_size=9)
LONG = "model.layers.10.self_attn.q_proj" * 3


READ_DIFFERENTLY = [*"{}[]", "{,}", "{e}", "{e<=1}", "[[", "[]a]", "[[:a:]]", "[a&&b]", "[a--b]", r"\b", "(?P<n>"]
"""Syntax that has another meaning to `regex` than to `re`, or might have."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible")
@given(st.lists(st.sampled_from([*PARTS, *READ_DIFFERENTLY, "*?", r"\w", ".*"]), max_size=8).map("".join), NAMES)
def test_what_matches_is_what_python_matches(pattern: str, name: str) -> None:
    try:
        expression = re.compile(rf"(.*\.)?({pattern})$")
        found = matches(pattern, name)
    except (re.error, MalformedInput):
        assume(False)
    assert found == (expression.match(name) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["((.+)+)+[^j]", "(.|.|.)*!", ".*" * 12 + "!", ".?" * 40 + "." * 90 + "!", "(..|.)" * 40 + "!", "(.*)*" * 99],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    began = time.process_time()
    with suppress(MalformedInput):
        matches(pattern, LONG)
    assert time.process_time() - began < 2


@pytest.mark.slow
def test_a_pattern_that_takes_too_long_is_refused_by_name() -> None:
    with pytest.raises(MalformedInput, match="takes too long"):
        matches("(.*|.*)+.*?" * 40 + "[^j]", LONG)


def test_all_patterns_of_an_adapter_share_one_limit_of_time() -> None:
    shared = MatchTime()
    assert not matches(".*x", LONG, shared)
    assert shared.left < TOTAL_SECONDS
    shared.left = 0
    with pytest.raises(MalformedInput, match="takes too long"):
        matches(".*x", LONG, shared)


@pytest.mark.parametrize(
    "pattern",
    [
        *("((", "x{1099511627776}", "(" * 400, "a" * 1001, r"(a)\1+", "(?=a+)a", "a++b", "(?i:a)+"),
        *("((.?){65000}){65000}", "(" * 60 + "." + "+)" * 60),
    ],
)
def test_invalid_and_unsupported_and_huge_expressions_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(MalformedInput, match="the regular expression"):
        matches(pattern, LONG)


def test_names_may_be_many_and_patterns_may_not() -> None:
    names = {f"model.layers.{number}.q_proj": 8 for number in range(9000)}
    AdapterFields({"rank_pattern": names}).patterns("rank_pattern")
    with pytest.raises(MalformedInput, match="characters together"):
        AdapterFields({"rank_pattern": {f"{name}*": 8 for name in names}}).patterns("rank_pattern")
