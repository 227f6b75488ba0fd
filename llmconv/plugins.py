"""Plugins: the modules of a package that each define one constant, found by listing it; and modules loaded on use."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def plugins(package: str, constant: str, kind: type[T], *inside: str) -> dict[str, T]:
    """Collects one constant of type `kind` from every module of a package that has it, by name of the module, sorted.

    For an entry that is a package, the first module of `inside` that it has defines the constant.
    """
    found: dict[str, T] = {}
    for entry in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda each: each.name):
        name = f"{package}.{entry.name}"
        modules = [f"{name}.{one}" for one in inside] if entry.ispkg and inside else [name]
        row = next((getattr(importlib.import_module(one), constant, None) for one in modules if find_spec(one)), None)
        if isinstance(row, kind):
            found[entry.name] = row
    return found


def lazily(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are loaded from their modules when they are first used."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        return getattr(importlib.import_module(places[name]), name)

    return get, lambda: list(places)
