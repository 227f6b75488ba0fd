"""Sigma has one scale: the report and the pages say the same of it, and it is what calibration found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmconv.verify import Report
from llmconv.verify.report.html import render_html
from llmconv.verify.sigma import SCALE

DOCS = Path(__file__).parents[3] / "docs"
EPSILONS = ("one norm's epsilon times ten", "every norm's epsilon a fifth too large")
STRUCTURES = (
    "bias dropped",
    "causal mask too narrow",
    "causal mask too wide",
    "first side of a residual dropped",
    "key and value swapped",
    "last layer skipped",
    "one norm skipped",
    "padding ignored",
    "positions off by one",
    "query not rotated in one layer",
    "two pasts swapped",
    "window dropped",
    "window off by one",
)


def smallest(*names: str) -> float:
    """The smallest sigma of these mutants over all families."""
    families = json.loads((DOCS / "calibration.json").read_text())["families"]
    return min(float(mutant["sigma"]) for family in families for mutant in family["mutants"] if mutant["name"] in names)


def words(text: str) -> str:
    """The text on one line."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("page", ["verification.md", "design.md"])
def test_the_pages_say_what_the_report_says(page: str) -> None:
    assert SCALE in words((DOCS / page).read_text())


def test_the_report_says_it() -> None:
    assert SCALE in words(render_html(Report("model", "model", "quick"), "2026-01-01T00:00:00Z"))


def test_it_is_what_calibration_found() -> None:
    assert 100 < smallest("activation in another form") < 1000
    assert 1000 < smallest(*EPSILONS) < 10_000
    assert smallest(*STRUCTURES) > 10_000
