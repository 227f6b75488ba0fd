"""Docstrings: a public function of the Python API with three or more parameters describes each of them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import llmconv

ROOMS = [room for name in llmconv.__all__ if inspect.ismodule(room := getattr(llmconv, name))]
PUBLIC = {f"{room.__name__}.{name}": getattr(room, name) for room in ROOMS for name in getattr(room, "__all__", ())}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
MANY = 3


def undocumented(function: Any) -> list[str]:
    """Parameters that the docstring does not name."""
    code = inspect.unwrap(function).__code__  # a signature also lists what stands for `**options`
    names = [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name[0] != "_"]
    text = inspect.getdoc(function) or ""
    return [name for name in names if not re.search(rf"\b{name}\b", text)] if len(names) >= MANY else []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_a_public_function_with_three_or_more_is_described(name: str) -> None:
    assert undocumented(FUNCTIONS[name]) == []
