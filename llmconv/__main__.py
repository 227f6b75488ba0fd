"""The program `llmconv`, also as `python -m llmconv`."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` may be shadowed: the current folder is on the path
import os
import sys
from typing import Any

# exit codes of an installation that cannot load; Python's own is 1, which means that a difference was found
REFUSED, BUG, INTERRUPTED = 3, 70, 130


def main() -> None:
    """Loads the command line and runs it; what it needs for that is checked without any package."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _interrupted)
    try:
        _leave_current_folder()
        from llmconv.cli import main as command  # noqa: PLC0415 - its errors are reported here
    except Exception as error:
        line = " ".join(str(error).replace("'", "`").split()) or type(error).__name__
        print(f"error: llmconv cannot start: {line}", file=sys.stderr)
        print("\nhint: install it again with the packages that it needs: docs/installing.md", file=sys.stderr)
        sys.exit(REFUSED if isinstance(error, ImportError) else BUG)
    command()


def _leave_current_folder() -> None:
    """Takes the current folder off the front of this program's `sys.path`.

    `python -m llmconv` puts it there, and so does an empty element of PYTHONPATH (as in `export PYTHONPATH=$OLD:/mine`
    where OLD is not set). An element that names the folder stays, and so does what follows the standard library.
    """
    try:
        current = os.path.realpath(os.getcwd())
    except OSError:  # it is deleted
        return
    named = {os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    library = os.path.dirname(os.__file__)
    front = sys.path[: sys.path.index(library) if library in sys.path else 1]
    kept = [path for path in front if os.path.realpath(path) != current or current in named]
    sys.path[: len(front)] = kept


def _interrupted(number: int, frame: Any) -> None:
    """Ctrl-C before the command begins, such as in an import: there is nothing to undo. `CommandGroup` replaces it."""
    os.write(2, b"error: interrupted\n\nhint: run the same command again\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
