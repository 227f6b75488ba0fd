"""Rows of a parametrized test of which few run in the quick tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """The rows, slow but for some.

    Args:
        rows: names or other values.
        quick: those that the quick tests run.
    """
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]
