"""Interpreters of other environments: `NAME=PATH` of an option, and the command that runs a script with one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from llmconv.errors import UsageProblem

START = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Unlike `python FILE`, it keeps the file's folder off `sys.path`: its modules could shadow others."""


def parse_interpreters(given: str | Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Paths by name.

    Args:
        given: `NAME=PATH`, once or several times.
        known: the names that an interpreter can be given for.

    Raises:
        UsageProblem: not of this form, or an unknown name.
    """
    found = {}
    for text in [given] if isinstance(given, str) else given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UsageProblem(f"`{text}` is not NAME=PATH", hint=f"give for example `{min(known)}=PATH`")
        if name not in known:
            raise UsageProblem(f"unknown name in `--python {text}`", hint=f"give one of: {', '.join(known)}")
        found[name] = path
    return found


def script_command(interpreter: str, script: Path, *arguments: object) -> list[str]:
    """The command that runs a script.

    Args:
        interpreter: path of a Python.
        script: path of the script.
        arguments: of the script.
    """
    return [interpreter, "-c", START, *map(str, (script, *arguments))]
