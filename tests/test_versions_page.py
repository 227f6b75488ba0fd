"""docs/versions.md: what `make versions` ran, and what it finds on a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmconv.requirements import OLDEST, TESTED
from tools.versions import END, HEADER, MINORS, START, cells_of, environments, interpreter, with_row

PAGE = Path(__file__).parents[1] / "docs/versions.md"


def rows(page: str) -> dict[str, tuple[str, ...]]:
    table = page.partition(START)[2].partition(END)[0]
    return {cells[0]: cells for line in table.splitlines() if len(cells := cells_of(line)) == len(HEADER)}


def test_every_environment_has_a_row_without_a_failure() -> None:
    found = rows(PAGE.read_text())
    assert {one.name for one in environments() if not one.python} < {*found}  # not every Python was there
    assert [name for name, cells in found.items() if "failed" in " ".join(cells)] == []


def test_the_minor_versions_of_transformers_are_those_that_the_command_line_accepts_as_tested() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in MINORS]
    assert (minors[0], minors[-1]) == (OLDEST, TESTED)


def test_a_new_row_takes_the_place_of_the_old_one() -> None:
    page = PAGE.read_text()
    row = ("lowest", "3.11.7", "click 8.2.1", "passes", "7 passed")
    changed = with_row(page, row)
    assert rows(changed)["lowest"] == row
    assert list(rows(changed)) == list(rows(page))


@pytest.mark.slow
def test_a_python_is_found_by_its_version() -> None:
    assert interpreter(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert interpreter("3.99") == ""
