"""Write the tables of the inputs of the action in docs/ci.md; with --check, only report whether they are up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tools.marked_page import MarkedPage

ROOT = Path(__file__).parents[1]
ACTION = Path("action.yml")
PAGE = MarkedPage(Path("docs/ci.md"), "<!-- action: written by `make docs` -->", "<!-- end of action -->")


def tables() -> str:
    """One row per input, then one per output."""
    action: dict[str, Any] = yaml.safe_load((ROOT / ACTION).read_text())
    inputs = ["| input | default | description |", "| --- | --- | --- |"]
    for name, field in action["inputs"].items():
        default = f"`{field['default']}`" if field.get("default") else "none"
        inputs.append(f"| `{name}` | {_cell(default)} | {_cell(field['description'])} |")
    outputs = ["| output | description |", "| --- | --- |"]
    outputs += [f"| `{name}` | {_cell(field['description'])} |" for name, field in action["outputs"].items()]
    return "\n\n".join(["\n".join(inputs), "\n".join(outputs)])


def _cell(text: str) -> str:
    """A text in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(PAGE.update(tables()))
