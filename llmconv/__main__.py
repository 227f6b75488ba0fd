"""The program `llmconv`, also as `python -m llmconv`."""

from __future__ import annotations

import sys

REFUSED, BUG = 3, 70
"""Exit codes of an installation that cannot load; Python's own is 1, which means that a difference was found."""


def main() -> None:
    """Loads the command line and runs it; what it needs for that is checked without any package."""
    try:
        from llmconv.interpreters import leave_current_folder  # noqa: PLC0415 - as below

        leave_current_folder()
        from llmconv.cli import main as command  # noqa: PLC0415 - its errors are reported here
    except Exception as error:
        line = " ".join(str(error).replace("'", "`").split()) or type(error).__name__
        print(f"error: llmconv cannot start: {line}", file=sys.stderr)
        print("\nhint: install it again with the packages that it needs: docs/installing.md", file=sys.stderr)
        sys.exit(REFUSED if isinstance(error, ImportError) else BUG)
    command()


if __name__ == "__main__":
    main()
