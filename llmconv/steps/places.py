"""Whether two inputs or outputs of steps are the same place."""

from __future__ import annotations

import os
from pathlib import Path

from llmconv.files.paths import LOCAL_SCHEMES, is_address


def place_of(name: str, home: Path) -> str:
    """One text for each place: of a path on this machine the one without links, of an address the address.

    Args:
        name: a path or an address.
        home: the folder that relative paths begin at.
    """
    scheme, separator, rest = name.partition("://")
    if is_address(name) and not (separator and scheme.lower() in LOCAL_SCHEMES):
        return name.rstrip("/")
    return os.path.realpath(home / (rest if separator else name))


def overlap(one: str, other: str, home: Path) -> bool:
    """Whether one of two paths or addresses is, or contains, the other.

    Args:
        one: a path or an address.
        other: the other one.
        home: the folder that relative paths begin at.
    """
    places = [f"{place_of(name, home).rstrip('/')}/" for name in (one, other)]
    return places[0].startswith(places[1]) or places[1].startswith(places[0])
