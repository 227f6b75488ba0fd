"""Plugins: the modules of a package that each define one constant, found by listing the package."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def plugins(package: str, constant: str, kind: type[T], inside: str = "") -> dict[str, T]:
    """Collects one constant of type `kind` from every module of a package that has it, by name of the module, sorted.

    For an entry that is a package, `inside` is the module in it that defines the constant.
    """
    found: dict[str, T] = {}
    for entry in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda each: each.name):
        module = _module(f"{package}.{entry.name}", inside if entry.ispkg else "")
        row = getattr(module, constant, None)
        if isinstance(row, kind):
            found[entry.name] = row
    return found


def _module(name: str, inside: str) -> ModuleType | None:
    path = f"{name}.{inside}" if inside else name
    return importlib.import_module(path) if find_spec(path) else None
