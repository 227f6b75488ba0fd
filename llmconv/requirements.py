"""Checks the platform and the version of transformers before anything else runs."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from llmconv.errors import UnsupportedInput, first_line
from llmconv.progress import warn

OLDEST, NEWEST = (5, 16), (6,)
"""Supported versions of transformers, the second exclusive; the same as in pyproject.toml."""

TESTED = (5, 24)
"""The newest minor version of transformers that was tested (docs/versions.md)."""

RANGE = f"transformers {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWEST))}"


def require_platform() -> None:
    """Refuses Windows, where files cannot be locked and replaced as llmconv requires.

    Raises:
        UnsupportedInput: the platform is Windows.
    """
    if sys.platform == "win32":
        raise UnsupportedInput(
            "llmconv does not run on native Windows", hint="run it in the Windows Subsystem for Linux (`wsl --install`)"
        )


def require_transformers() -> None:
    """Checks the installed transformers; prints a warning for a newer version than was tested.

    Raises:
        UnsupportedInput: it is not installed, or too old.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedInput(f"llmconv needs {RANGE}; it is not installed", hint=_install()) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < OLDEST:
        raise UnsupportedInput(f"llmconv needs {RANGE}; this is {installed}", hint=_install())
    if numbers > TESTED:
        tested = ".".join(map(str, TESTED))
        warn(f"llmconv supports {RANGE}, and is tested up to {tested}; this is {installed}")


def unusable_package(error: ImportError) -> UnsupportedInput | None:
    """The refusal to run without a package that llmconv requires, or with one that does not load.

    Args:
        error: of an import.

    Returns:
        None for a module of any other package.
    """
    module = (error.name or "").partition(".")[0]
    package = {"yaml": "pyyaml"}.get(module, module)
    required = [line for line in requires("llmconv") or () if "extra ==" not in line]
    needed = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in required}
    if not package or package.lower() not in needed:
        return None
    problem = f"needs {package}, which is not installed"
    if not isinstance(error, ModuleNotFoundError) or sys.modules.get(module):
        problem = f"cannot use the installed {package}: {first_line(error)}"
    return UnsupportedInput(f"llmconv {problem}", hint="`llmconv doctor` shows what is missing")


def _install() -> str:
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"`pip install 'transformers>={oldest},<{newest}'`"
