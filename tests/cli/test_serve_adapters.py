"""`llmconv serve --adapter`: names and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmconv.cli.options import adapters_of
from llmconv.errors import UsageProblem


def test_adapters_have_names_and_one_may_be_that_of_all_requests(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert adapters_of(["one=x", "two=y=z", str(odd)]) == (str(odd), {"one": "x", "two": "y=z"})
    assert adapters_of([]) == (None, {})


@pytest.mark.parametrize("given", [["one=x", "one=y"], ["x", "y"]])
def test_what_has_no_single_meaning_is_refused(given: list[str]) -> None:
    with pytest.raises(UsageProblem, match="`one`|all requests"):
        adapters_of(given)
