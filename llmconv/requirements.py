"""What llmconv needs around it: a platform, and a version of transformers; said before anything else is begun."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from llmconv.errors import UnsupportedInput
from llmconv.progress import warn

OLDEST, NEWEST = (5, 16), (6,)
"""The versions of transformers from the first, and below the second; pyproject.toml says the same."""

RANGE = f"transformers {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWEST))}"


def require_platform() -> None:
    """Refuses Windows, whose files cannot be locked and replaced as llmconv's promises need.

    Raises:
        UnsupportedInput: this is Windows.
    """
    if sys.platform == "win32":
        raise UnsupportedInput(
            "llmconv does not run on Windows itself", hint="run it in the Windows Subsystem for Linux (`wsl --install`)"
        )


def require_transformers() -> None:
    """Compares the installed transformers with what llmconv is tested with; one that is newer is a warning.

    Raises:
        UnsupportedInput: there is none, or it is too old.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedInput(f"llmconv needs {RANGE}; it is not installed", hint=_install()) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < OLDEST:
        raise UnsupportedInput(f"llmconv needs {RANGE}; this is {installed}", hint=_install())
    if numbers >= NEWEST:
        warn(f"llmconv is made for {RANGE}; this is {installed}, which was never tried")


def _install() -> str:
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"`pip install 'transformers>={oldest},<{newest}'`"
