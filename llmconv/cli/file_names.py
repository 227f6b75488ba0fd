"""File names given in place of texts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from llmconv.errors import UsageProblem

FILE_OF_TEXTS = re.compile(r"\S+\.(?:txt|jsonl?|csv)", re.IGNORECASE)
"""A text that is most likely a file name given by mistake."""


def is_file(text: str) -> bool:
    """Whether a text has a suffix and is the name of a file."""
    with suppress(OSError, ValueError):  # too long for a name, or with an invalid character
        return bool(Path(text).suffix) and Path(text).is_file()
    return False


def refuse_file_name(text: str, kind: str, option: str, otherwise: str = "") -> None:
    """Raises UsageProblem if a text of the command line is the name of a file.

    `kind` is what it should be (a prompt, a text), `option` reads the texts of a file, `otherwise` ends the hint.
    """
    if is_file(text) or FILE_OF_TEXTS.fullmatch(text):
        raise UsageProblem(
            f"the {kind} `{text}` is the name of a file{'' if is_file(text) else ', which does not exist'}",
            hint=f"give `{option} {text}` to read its {kind}s{otherwise}",
        )
