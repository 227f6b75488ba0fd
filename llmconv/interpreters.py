"""Interpreters of other environments: `NAME=PATH` of an option, and the command that runs a script with one.

The current folder may be a downloaded model, so no Python that llmconv starts imports from it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from llmconv.errors import UsageProblem

START = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; import runpy; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Unlike `python FILE`, it keeps the file's folder off `sys.path`, and unlike `-c` alone the current one: their modules
could shadow others. The option `-P` does so only from Python 3.11 on."""


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a child program, with `variables` added; no Python in it imports from the current folder."""
    named = os.pathsep.join(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    found = {**os.environ, "PYTHONPATH": named, "PYTHONSAFEPATH": "1", **variables}
    return found if named else {name: value for name, value in found.items() if name != "PYTHONPATH"}


def parse_interpreters(given: str | Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Paths by name, from `NAME=PATH` given once or several times; UsageProblem unless the name is in `known`."""
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
    return [interpreter, "-c", START, *map(str, (script, *arguments))]
