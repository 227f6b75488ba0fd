"""Write the table of a request's fields in docs/serving.md; with --check, only report whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from llmconv.serve.field_table import ENDPOINTS, IGNORED, REFUSED, SUPPORTED, TABLE, FieldRow
from tools.marked_page import MarkedPage

PAGE = MarkedPage(Path("docs/serving.md"), "<!-- fields: written by `make docs` -->", "<!-- end of fields -->")
ORDER = (SUPPORTED, IGNORED, REFUSED)


def table() -> str:
    """One row per field and meaning, supported ones first; rows of the same words share a line."""
    lines = [
        "| field | chat | completions | responses | embeddings | what it does, or what to use in its place |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for status in ORDER:
        same: dict[tuple[tuple[str, ...], str], list[FieldRow]] = {}
        for row in TABLE:
            if row.status == status:
                same.setdefault((row.endpoints, row.note), []).append(row)
        for (endpoints, note), rows in same.items():
            names = ", ".join(f"`{row.name}`" for row in rows)
            cells = " | ".join(status if one in endpoints else "" for one in ENDPOINTS)
            lines.append(f"| {names} | {cells} | {note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(PAGE.update(table()))
