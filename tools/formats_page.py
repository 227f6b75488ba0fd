"""Write the table of formats in docs/reading.md; with --check, only report whether it is up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from llmconv.convert.formats import Format, formats

PAGE = Path("docs/reading.md")
BEGIN, END = "<!-- formats: written by `make docs` -->", "<!-- end of formats -->"


def main() -> int:
    """Writes the table between its markers, or compares it; returns 1 if it differs."""
    text = PAGE.read_text()
    new = with_table(text)
    if "--check" not in sys.argv:
        PAGE.write_text(new)
    elif new != text:
        print(
            f"error: the formats in {PAGE} are out of date\n\nhint: run `make docs`",
            file=sys.stderr,
        )
        return 1
    return 0


def with_table(text: str) -> str:
    """The page with the current table.

    Raises:
        LookupError: the page has no markers.
    """
    new, count = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table(), text, flags=re.DOTALL)
    if count != 1:
        raise LookupError(f"{PAGE} has no markers for the formats, `{BEGIN}` and `{END}`")
    return new


def table() -> str:
    """One row per format, markers included."""
    lines = [
        "| `llmconv formats` | reads | covers |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {_cells(found)} |" for name, found in formats().items()),
    ]
    return "\n\n".join([BEGIN, "\n".join(lines), END])


def _cells(found: Format) -> str:
    written = "; `from-hf` writes it" if found.save else ""
    return " | ".join(cell.replace("|", "\\|") for cell in (found.title + written, found.covers))


if __name__ == "__main__":
    sys.exit(main())
