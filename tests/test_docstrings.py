"""Docstrings: a public function with three or more parameters describes each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("convert", "export", "verify", "llmconv")
LINKS = {ROOT / "llmconv" / room for room in ROOMS[:3]}
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not LINKS & set(path.parents))
MANY = 3


def undocumented(path: Path) -> Iterator[str]:
    """Parameters of public functions that the docstring does not name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not _is_command(node):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
            text = ast.get_docstring(node) or ""
            if len(names) >= MANY:
                yield from (f"{node.name}({name})" for name in names if not re.search(rf"\b{name}\b", text))


def _is_command(node: ast.FunctionDef) -> bool:
    """Whether the docstring is the text of `--help`."""
    return any("click." in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_parameter_of_a_public_function_with_three_or_more_is_described(path: Path) -> None:
    assert list(undocumented(path)) == []
