"""Plugins: the modules of a package that each define one constant, found by listing it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def each_plugin(package: str, constant: str, kind: type[T], *inside: str) -> Iterator[tuple[str, T]]:
    """The constant of type `kind` of every module of a package that has it, by name, sorted; loaded one after another.

    For an entry that is a package, the first module of `inside` that it has defines the constant.
    """
    for entry in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda each: each.name):
        name = f"{package}.{entry.name}"
        modules = [f"{name}.{one}" for one in inside] if entry.ispkg and inside else [name]
        row = next((getattr(importlib.import_module(one), constant, None) for one in modules if find_spec(one)), None)
        if isinstance(row, kind):
            yield entry.name, row
