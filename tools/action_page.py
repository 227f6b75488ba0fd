"""Write the tables of the inputs of the action in docs/ci.md; with --check, only report whether they are up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGE, ACTION = Path("docs/ci.md"), Path("action.yml")
BEGIN, END = "<!-- action: written by `make docs` -->", "<!-- end of action -->"


def main() -> int:
    """Writes the tables between their markers, or compares them; returns 1 if they differ."""
    text = PAGE.read_text()
    new = with_tables(text)
    if "--check" not in sys.argv:
        PAGE.write_text(new)
    elif new != text:
        print(
            f"error: the inputs of {ACTION} in {PAGE} are out of date\n\nhint: run `make docs`",
            file=sys.stderr,
        )
        return 1
    return 0


def with_tables(text: str) -> str:
    """The page with the current tables.

    Raises:
        LookupError: the page has no markers.
    """
    new, count = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: tables(), text, flags=re.DOTALL)
    if count != 1:
        raise LookupError(f"{PAGE} has no markers for the inputs of {ACTION}, `{BEGIN}` and `{END}`")
    return new


def tables() -> str:
    """One row per input, then one per output, markers included."""
    action: dict[str, Any] = yaml.safe_load((ROOT / ACTION).read_text())
    inputs = ["| input | default | description |", "| --- | --- | --- |"]
    for name, field in action["inputs"].items():
        default = f"`{field['default']}`" if field.get("default") else "none"
        inputs.append(f"| `{name}` | {_cell(default)} | {_cell(field['description'])} |")
    outputs = ["| output | description |", "| --- | --- |"]
    outputs += [f"| `{name}` | {_cell(field['description'])} |" for name, field in action["outputs"].items()]
    return "\n\n".join([BEGIN, "\n".join(inputs), "\n".join(outputs), END])


def _cell(text: str) -> str:
    """A text in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
