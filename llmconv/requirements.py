"""Checks the platform and the version of transformers before anything else runs; names are loaded when first used."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from typing import Any

from llmconv.errors import UnsupportedInput, first_line
from llmconv.progress import warn

# supported versions of transformers, the second exclusive; the same as in pyproject.toml
OLDEST, NEWEST = (5, 16), (6,)
TESTED = (5, 24)  # the newest minor version of transformers that was tested (docs/versions.md)
RANGE = f"transformers {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWEST))}"


def require_platform() -> None:
    """Raises UnsupportedInput on Windows, where files cannot be locked and replaced as llmconv requires."""
    if sys.platform == "win32":
        problem = "llmconv does not run on native Windows"
        raise UnsupportedInput(problem, hint="run it in the Windows Subsystem for Linux (`wsl --install`)")


def require_transformers() -> None:
    """Raises UnsupportedInput if transformers is missing or too old; warns if it is newer than was tested."""
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
    """The refusal to run without a package that llmconv requires, or with a broken one; None for other errors."""
    cause = _first_cause(error)
    module = (cause.name or "").partition(".")[0]
    # the top module of the installed package whose code raised it; empty for llmconv and code of no package
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    raising = next((name for name in reversed(modules) if name != "importlib"), "")
    raising = raising if raising != "llmconv" and raising in packages_distributions() else ""
    if _is_required(module) and module != raising and isinstance(cause, ModuleNotFoundError):
        if not sys.modules.get(module):
            return _unusable(f"needs {_distribution(module)}, which is not installed")
        raising = raising or module
    broken = raising or (module if _is_required(module) else "")
    return _unusable(f"cannot use the installed {_distribution(broken)}: {first_line(cause)}") if broken else None


def _first_cause(error: ImportError) -> ImportError:
    """The error that an error of an import stands for: transformers hides it behind the name of one of its modules."""
    seen = {id(error)}
    while isinstance(error.__cause__, ImportError) and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _is_required(module: str) -> bool:
    """Whether a module is of a package that pyproject.toml requires."""
    required = [line for line in requires("llmconv") or () if "extra ==" not in line]
    needed = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in required}
    return bool(module) and _distribution(module).lower() in needed


def _distribution(module: str) -> str:
    return {"yaml": "pyyaml"}.get(module, module)


def _unusable(problem: str) -> UnsupportedInput:
    return UnsupportedInput(f"llmconv {problem}", hint="`llmconv doctor` shows what is missing")


def _install() -> str:
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"`pip install 'transformers>={oldest},<{newest}'`"


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are loaded from their modules when they are first used.

    The names are those that its `if TYPE_CHECKING` block imports, which type checkers read.
    """
    source = getattr(sys.modules[package].__loader__, "get_source")(package)  # noqa: B009 - of the loaders of files
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    places = {one.name: str(line.module) for line in imports for one in line.names}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        return getattr(importlib.import_module(places[name]), name)

    return get, lambda: sorted(places)
