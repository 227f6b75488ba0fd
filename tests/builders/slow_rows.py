"""Rows of a parametrized test of which few run in the quick tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(rows: Iterable[Any], *quick: str) -> list[Any]:
    """The rows, slow but for some.

    Args:
        rows: names.
        quick: the names that the quick tests run.
    """
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]
