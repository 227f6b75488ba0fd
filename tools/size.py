"""Print the lines of every file and its longest function; fail if one exceeds its limit."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDERS = ("llmconv", "convert", "export", "verify", "tests", "benchmarks", "tools", "examples")
FILE, TEST_FILE, FUNCTION = 700, 700, 90
CEILING = f"(file {FILE}, test file {TEST_FILE}, function {FUNCTION} lines)"


def main() -> int:
    """Prints one line per file, longest files first; returns 1 if something is too long."""
    rows = sorted(((lines(path), *longest(path), path) for path in files()), reverse=True)
    over = 0
    for count, size, name, path in rows:
        too_long = count > (TEST_FILE if path.parts[0] == "tests" else FILE) or size > FUNCTION
        over += too_long
        print(f"{count:5} lines, longest function {size:3}  {path}  {name}  {'TOO LONG' * too_long}".rstrip())
    print(f"{len(rows)} files, {sum(row[0] for row in rows)} lines; {over} over the ceiling {CEILING}")
    return 1 if over else 0


def files() -> list[Path]:
    """Every Python file once: the links inside llmconv/ are not followed."""
    return [path for folder in FOLDERS for path in Path(folder).rglob("*.py")]


def lines(path: Path) -> int:
    """Physical lines."""
    return len(path.read_text().splitlines())


def longest(path: Path) -> tuple[int, str]:
    """Lines and name of the longest function, docstring included; decorators are not counted."""
    tree = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [((node.end_lineno or 0) - node.lineno + 1, node.name) for node in functions]
    return max(sizes, default=(0, ""))


if __name__ == "__main__":
    sys.exit(main())
