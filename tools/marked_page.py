"""A part of a page that is generated, between two markers."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MarkedPage:
    """A page with a generated part.

    Attributes:
        page: its file.
        begin: the marker before the part.
        end: the marker after it.
    """

    page: Path
    begin: str
    end: str

    def update(self, part: str) -> int:
        """Writes the part into the page, or with `--check` compares it; returns 1 if it differs.

        Raises:
            LookupError: the page has no markers.
        """
        text = self.page.read_text()
        new = self.with_part(text, part)
        if "--check" not in sys.argv:
            self.page.write_text(new)
        elif new != text:
            print(f"error: `{self.begin}` in {self.page} is out of date\n\nhint: run `make docs`", file=sys.stderr)
            return 1
        return 0

    def with_part(self, text: str, part: str) -> str:
        """The text of the page with a part between the markers.

        Raises:
            LookupError: there are no markers.
        """
        marked = f"{self.begin}\n\n{part}\n\n{self.end}"
        new, count = re.subn(f"{re.escape(self.begin)}.*{re.escape(self.end)}", lambda _: marked, text, flags=re.DOTALL)
        if count != 1:
            raise LookupError(f"{self.page} has no markers `{self.begin}` and `{self.end}`")
        return new
