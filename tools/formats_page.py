"""Write the table of formats in docs/reading.md; with --check, only report whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from llmconv.convert.formats import Format, formats
from tools.marked_page import MarkedPage

PAGE = MarkedPage(Path("docs/reading.md"), "<!-- formats: written by `make docs` -->", "<!-- end of formats -->")


def table() -> str:
    """One row per format."""
    lines = [
        "| `llmconv formats` | reads | covers |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {_cells(found)} |" for name, found in formats().items()),
    ]
    return "\n".join(lines)


def _cells(found: Format) -> str:
    written = "; `from-hf` writes it" if found.save else ""
    return " | ".join(cell.replace("|", "\\|") for cell in (found.title + written, found.covers))


if __name__ == "__main__":
    sys.exit(PAGE.update(table()))
